"""A trained model as a plain Hugging Face folder, streamed, complete or not there at all.

Everything is written to a hidden folder beside the target, synced, then renamed.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lohan.errors import BudgetError, ModelError, StorageIOError
from lohan.model_files.parameters import pieces
from lohan.model_files.reader import STEMS, FileTensor
from lohan.model_files.writer import ShardedWriter, sync_folder, write_synced
from lohan.units import MiB, counted, format_bytes
from lohan.util.json_file import read_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".ot", ".onnx")
_TEMPLATES = "additional_chat_templates"


def export_folder(
    out: str | os.PathLike[str],
    *,
    tensors: Mapping[str, tuple[int, ...]],
    read_flat: Callable[[str, int, int], torch.Tensor],
    dtype: torch.dtype,
    source_folder: str | os.PathLike[str] | None = None,
    config: Any = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    buffers: Mapping[str, torch.Tensor] | None = None,
    max_shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
) -> Path:
    """Write the parameters `tensors` (name -> shape) in `dtype`, and what makes them a model.

    read_flat(name, start, stop) gives flattened elements in any float dtype. Config, generation
    settings and tokenizer are the source folder's; without one, config and tokenizer are the
    objects given (a config that transformers does not know is left out). A tied weight is listed
    once, under the name that named_parameters() gives it.
    """
    target = Path(out).absolute()
    buffers = buffers or {}
    files = _files_to_copy(Path(source_folder)) if source_folder is not None else []
    check_target(target, overwrite=overwrite)
    specs = [FileTensor(name, dtype, tuple(shape)) for name, shape in tensors.items()]
    specs += [FileTensor(n, b.dtype, tuple(b.shape)) for n, b in buffers.items()]
    check_space(target, sum(spec.nbytes for spec in specs) + sum(_size(f) for f in files))
    with replacing(target) as folder:
        for file in files:
            _copy_synced(file, folder)
        if source_folder is None and hasattr(config, "save_config"):
            config.save_config(folder)
        elif source_folder is None and hasattr(config, "save_pretrained"):
            config = copy.deepcopy(config)
            config.use_cache = True  # off for training only
            config.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        stem = _settled(folder / "config.json", dtype)
        writing = ShardedWriter(folder, tensors=specs, max_shard_bytes=max_shard_bytes, stem=stem)
        with writing as writer:
            for name, shape in tensors.items():
                for start, stop in pieces(torch.Size(shape).numel()):
                    writer.write(name, read_flat(name, start, stop).to(dtype))
            for name, buffer in buffers.items():
                writer.write(name, buffer)
    return target


def _files_to_copy(source: Path) -> list[Path]:
    """Everything but weights, their indexes and hidden files."""
    if not (source / "config.json").is_file():
        raise ModelError(
            f"{source}: the folder that the model came from holds no config.json; restore it, "
            "config and tokenizer are copied from there"
        )
    return [
        path
        for path in sorted(source.iterdir())
        if not path.name.startswith(".")
        and not path.name.endswith((*_WEIGHTS, ".index.json"))
        and (path.is_file() or path.name == _TEMPLATES)
    ]


def check_target(target: Path, *, overwrite: bool) -> None:
    if target.exists() and not target.is_dir():
        raise ModelError(f"{target}: is a file, not a folder; give another --out")
    content = [path.name for path in target.iterdir()] if target.is_dir() else []
    if not content:
        return
    files = counted(len(content), "file")
    if not overwrite:
        raise ModelError(
            f"{target}: exists and holds {files}; give another --out, or add --overwrite"
        )
    if "config.json" not in content and not any(n.endswith(".safetensors") for n in content):
        raise ModelError(
            f"{target}: holds {files} and no model, it is not overwritten; give another --out"
        )


def check_space(target: Path, needed: int) -> None:
    existing = next(path for path in target.parents if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed + 16 * MiB:
        raise BudgetError(
            f"{target}: the export needs {format_bytes(needed)}, {format_bytes(free)} free on "
            f"{existing}; free some space or give --out on another drive"
        )


def _size(path: Path) -> int:
    return sum(_size(p) for p in path.iterdir()) if path.is_dir() else path.stat().st_size


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A fresh folder that takes the target's place at the end, or vanishes on any error."""
    created = [path for path in target.parents if not path.exists()]
    folder = target.parent / f".{target.name}.export-{os.getpid()}"
    old = target.parent / f".{target.name}.replaced-{os.getpid()}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        folder.mkdir()
        yield folder
        sync_folder(folder)
        if target.exists():
            target.rename(old)
        try:
            folder.rename(target)
        except BaseException:
            if old.exists():
                old.rename(target)
            raise
        sync_folder(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        for path in created:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
        if isinstance(error, OSError):
            raise StorageIOError(
                f"{target}: export failed: {error.strerror} ({error.filename}); nothing was left "
                "behind, check space and permissions"
            ) from error
        raise


def _remove_leftovers(target: Path) -> None:
    """Folders of exports to the same target that were killed."""
    for path in target.parent.glob(f".{target.name}.export-*"):
        pid = path.name.rpartition("-")[2]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(path, ignore_errors=True)


def _copy_synced(path: Path, folder: Path) -> None:
    if path.is_dir():
        (folder / path.name).mkdir()
        for child in sorted(path.iterdir()):
            _copy_synced(child, folder / path.name)
        return
    copied = folder / path.name
    shutil.copyfile(path, copied)
    with open(copied, "rb") as stream:
        os.fsync(stream.fileno())


def _settled(file: Path, dtype: torch.dtype) -> str:
    """Name the exported dtype wherever the config names one, nested configs included; the config
    of diffusers names none. Returns how weight files are called."""
    if not file.is_file():
        return STEMS[0]

    def visit(node: dict[str, Any]) -> None:
        for key, value in node.items():
            if key in ("dtype", "torch_dtype"):
                node[key] = str(dtype).removeprefix("torch.")
            elif isinstance(value, dict):
                visit(value)

    raw = read_object(file, kind=ModelError, remedy="restore the folder that the model came from")
    if "_class_name" in raw:
        return STEMS[1]
    if "torch_dtype" not in raw:
        raw.setdefault("dtype", None)
    visit(raw)
    write_synced(file, json.dumps(raw, indent=2, ensure_ascii=False) + "\n")
    return STEMS[0]
