"""Export of committed weights as a Hugging Face folder."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lohan.capture.blocks import dtype_of
from lohan.checkpoint.adapters import (
    MergedReader,
    base_names,
    base_of,
    export_adapter,
    is_adapted,
)
from lohan.checkpoint.hf_folder import (
    SHARD_BYTES,
    export_folder,
    is_of_another_class,
    persistent_buffers,
    structure_of,
    weights_folder,
)
from lohan.checkpoint.safetensors import ReadFlat
from lohan.checkpoint.sources import Saved
from lohan.checkpoint.store_io import gathering_reader, store_reader
from lohan.model.state import STATE_FORMATS, stored_model
from lohan.store.store import Store

if TYPE_CHECKING:
    from lohan.engine.session import Session


def config_of(model: nn.Module | None) -> Any:
    """Return the object that can write config.json for a model, or None if it has no config.

    This is the model itself for diffusers. For other models, it is their config. The name of the
    model's class is written into the config first, as `save_pretrained` does.
    """
    if hasattr(model, "save_config"):
        return model
    config: Any = getattr(model, "config", None)
    if hasattr(model, "save_pretrained") and hasattr(config, "architectures"):
        config = copy.deepcopy(config)
        config.architectures = [type(model).__name__]
    return config


def export_store(
    store: Store | Sequence[Store],
    out: str | os.PathLike[str],
    *,
    source_folder: str | os.PathLike[str] | None,
    dtype: str | None = None,
    overwrite: bool = False,
    buffers: Mapping[str, torch.Tensor] | None = None,
    model: nn.Module | None = None,
    ema: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    read: ReadFlat | None = None,
    mark: str | None = None,
    chat_template: str | None = None,
    card: str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Stream the committed weights of a store into a Hugging Face folder.

    `store` is one store, or the stores of all ranks. The layout is that of `save_pretrained`.
    `model` is needed in two cases: if there is no source folder with a config, and for an adapter,
    whose PEFT folder is then the only output. `ema` selects the average of the weights. `read`, if
    given, provides the weights instead of the stores. `mark` is the id of the run that exports.
    `chat_template` is the template used in training, if it differs from that of the source folder.
    `card` is the text of the model card.
    """
    stores = (store,) if isinstance(store, Store) else tuple(store)
    held = stored_model(stores[0].meta, stores[0].layout.regions)
    source = read or store_reader(*stores, ema=ema)
    adapter = model if model is not None and is_adapted(model) else None
    shapes = {
        tensor.name: tensor.shape
        for group in held.groups
        if adapter is None or not group.frozen
        for tensor in group.tensors
    }
    read_flat = _with_progress(source, shapes, progress)
    torch_dtype = dtype_of(STATE_FORMATS[dtype or held.state_format.name])
    if adapter is not None:
        return export_adapter(
            adapter,
            out,
            shapes=shapes,
            read_flat=read_flat,
            dtype=torch_dtype,
            overwrite=overwrite,
            mark=mark,
            card=card,
        )
    if buffers is None:
        buffers = {} if model is None else persistent_buffers(model)
    return _export_weights(
        out,
        model=model,
        shapes=shapes,
        buffers=buffers,
        read_flat=read_flat,
        dtype=torch_dtype,
        source_folder=source_folder,
        overwrite=overwrite,
        mark=mark,
        chat_template=chat_template,
        card=card,
        max_shard_bytes=max_shard_bytes,
    )


def export_session(
    session: Session, out: str | os.PathLike[str], *, ema: bool = False, **how: Any
) -> Path:
    """Commit and export the last step, as `export_store` does for a store."""
    session.commit()
    group, folder = session.process_group, Path(out)
    with group.all_or_none(), gathering_reader(group, session.store, ema=ema) as read:
        if read is not None:
            folder = export_store(session.store, out, model=session.model, read=read, **how)
    return folder


def export_merged(
    model: nn.Module,
    read: ReadFlat,
    out: str | os.PathLike[str],
    *,
    dtype: str,
    source_folder: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    chat_template: str | None = None,
    card: str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    mark: str | None = None,
) -> Path:
    """Stream the base of a PEFT model, with its adapters merged, into a Hugging Face folder.

    `read` provides all parameters by their names in the PEFT model.
    """
    merged, base = MergedReader(model, read), base_of(model)
    plain = base_names(base)
    buffers = {plain[name]: buffer for name, buffer in persistent_buffers(base).items()}
    return _export_weights(
        out,
        model=base,
        shapes=merged.shapes,
        buffers=buffers,
        read_flat=_with_progress(merged.read_flat, merged.shapes, progress),
        dtype=dtype_of(STATE_FORMATS[dtype]),
        source_folder=source_folder,
        overwrite=overwrite,
        chat_template=chat_template,
        card=card,
        max_shard_bytes=max_shard_bytes,
        mark=mark,
    )


def _export_weights(
    out: str | os.PathLike[str],
    *,
    model: nn.Module | None,
    shapes: Mapping[str, tuple[int, ...]],
    buffers: Mapping[str, torch.Tensor],
    source_folder: str | os.PathLike[str] | None,
    read_flat: ReadFlat,
    **how: Any,
) -> Path:
    if source_folder is not None:
        source_folder = weights_folder(Path(source_folder))
    same_class = source_folder is not None and not is_of_another_class(model, Path(source_folder))
    config = None if same_class else config_of(model)
    generation = getattr(model, "generation_config", None) if source_folder is None else None
    saved = Saved.of(model or structure_of(source_folder), shapes, buffers)
    return export_folder(
        out,
        tensors=saved.tensors,
        read_flat=saved.reading(read_flat),
        buffers=saved.buffers,
        source_folder=source_folder,
        config=config,
        generation_config=generation,
        **how,
    )


def _with_progress(
    read: ReadFlat, shapes: Mapping[str, tuple[int, ...]], progress: Callable[[int, int], None]
) -> ReadFlat:
    total = sum(torch.Size(shape).numel() for shape in shapes.values())
    done = 0

    def read_flat(name: str, start: int, stop: int) -> torch.Tensor:
        nonlocal done
        piece = read(name, start, stop)
        done += stop - start
        progress(done, total)
        return piece

    return read_flat
