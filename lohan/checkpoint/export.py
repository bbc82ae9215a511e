"""A trained model as a plain Hugging Face folder, streamed, complete or not there at all."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lohan.checkpoint.quantized import without_quantization
from lohan.checkpoint.replacing import check_space, check_target, replacing, target_check
from lohan.checkpoint.safetensors import STEMS, FileTensor, ShardedWriter
from lohan.checkpoint.sources import pieces
from lohan.errors import ModelError
from lohan.util.files import read_object, sync_path, write_new

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".ot", ".onnx")
SHARD_BYTES = 5 * 10**9  # of a file of weights, as transformers has it
_TEMPLATES = "additional_chat_templates"


def export_folder(
    out: str | os.PathLike[str],
    *,
    tensors: Mapping[str, tuple[int, ...]],
    read_flat: Callable[[str, int, int], torch.Tensor],
    dtype: torch.dtype,
    source_folder: str | os.PathLike[str] | None = None,
    config: Any = None,
    generation_config: Any = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    buffers: Mapping[str, torch.Tensor] | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    mark: str | None = None,
    chat_template: str | None = None,
) -> Path:
    """Write the parameters `tensors` (name -> shape) in `dtype`, and what makes them a model.

    read_flat(name, start, stop) gives flattened elements in any float dtype. Config, generation
    settings and tokenizer are the source folder's, but for what is given here: without a folder
    both are (a config that transformers does not know is left out). A tied weight is listed
    once, under the name that named_parameters() gives it. `mark` is the id of the run whose own
    export this is.
    """
    target = Path(out).absolute()
    buffers = buffers or {}
    files = _files_to_copy(Path(source_folder)) if source_folder is not None else []
    check_target(target, overwrite=overwrite)
    specs = [FileTensor(name, dtype, tuple(shape)) for name, shape in tensors.items()]
    specs += [FileTensor(n, b.dtype, tuple(b.shape)) for n, b in buffers.items()]
    check_space(target, sum(spec.nbytes for spec in specs) + sum(_size(f) for f in files))
    check = target_check(target, overwrite=overwrite, mark=mark)
    with replacing(target, check=check, mark=mark) as folder:
        for file in files:
            _copy_synced(file, folder)
        if hasattr(config, "save_config"):
            config.save_config(folder)
        elif hasattr(config, "save_pretrained"):
            config = copy.deepcopy(config)
            config.use_cache = True  # off for training only
            config.save_pretrained(folder)
        if generation_config is not None:
            generation_config.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if chat_template is not None:
            (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
            sync_path(folder / "chat_template.jinja")
        stem = _set_dtype(folder / "config.json", dtype)
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


def _size(path: Path) -> int:
    return sum(_size(p) for p in path.iterdir()) if path.is_dir() else path.stat().st_size


def _copy_synced(path: Path, folder: Path) -> None:
    if path.is_dir():
        (folder / path.name).mkdir()
        for child in sorted(path.iterdir()):
            _copy_synced(child, folder / path.name)
        return
    copied = folder / path.name
    shutil.copyfile(path, copied)
    sync_path(copied)


def _set_dtype(file: Path, dtype: torch.dtype) -> str:
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
    without_quantization(raw)
    write_new(file, (json.dumps(raw, indent=2, ensure_ascii=False) + "\n").encode())
    return STEMS[0]
