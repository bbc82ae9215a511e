"""Models that run forward only, with weights streamed from a store.

A run has its own store. For a Hugging Face folder, a temporary store with only the weights is
created and removed afterwards.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lohan.capture.fake import CPU
from lohan.capture.footprint import measure
from lohan.checkpoint.hf_folder import causal_config
from lohan.checkpoint.resharding import StoreSet, open_set
from lohan.checkpoint.store_io import check_same, create_weights_store, store_reader, to_meta
from lohan.checkpoint.store_io import source_of as source_of_model
from lohan.checkpoint.train_state import restore_buffers
from lohan.device.choose import open_device
from lohan.engine.attach import device_overhead, load, make_executor
from lohan.engine.context import PlanContext, blocks_of
from lohan.engine.logged import fold_log
from lohan.engine.policies import Budget
from lohan.engine.session import Session
from lohan.errors import BudgetError, ConfigError, StoreError
from lohan.model.layout import Blocks
from lohan.model.options import PlanOptions
from lohan.model.plan import Plan
from lohan.model.state import STATE_FORMATS, stored_model
from lohan.optim import AdamW, Lora
from lohan.param_groups import ParamGroups
from lohan.planner.memory import WORK
from lohan.planner.planner import forward_plan
from lohan.store.admin import remove
from lohan.store.files import StoreLock, is_locked
from lohan.store.store import Store
from lohan.train.language import check_packs
from lohan.train.run_folder import RunFolder, stores_of
from lohan.util.trace import Trace

LOGIT_COPIES = 4  # the logits, their fp32 copy and intermediate results
HEAD_TOKENS = (16, 256)  # smallest and largest number of tokens in a slice of the head
HEAD_SHARE = 4  # A slice may take this fraction (1 / HEAD_SHARE) of the budget.
CHUNK_PARAMS = 2**22
NO_UPDATES = ParamGroups([AdamW(lr=0.0)], {})


@dataclass(frozen=True)
class Source:
    """The model to run: a Hugging Face folder or, if `stores` is given, a run based on it."""

    folder: Path
    stores: StoreSet | None = None
    lora: Lora | None = None
    base: str = ""  # how the frozen weights are packed
    template: str | None = None  # chat template that replaces the folder's own


@dataclass(frozen=True)
class Shape:
    """The largest batch to plan for.

    `cache_tokens` is the final length of its rows if keys and values are cached, otherwise 0.
    """

    batch: int
    tokens: int
    cache_tokens: int = 0
    packed: bool = False


def source_of(folder: Path) -> Source:
    """Return the model to run, given a run folder or a model folder."""
    run = RunFolder(folder.absolute())
    if run.config_file.is_file():
        config = run.config()
        return Source(
            config.model,
            stores_of(run, config),
            config.train.adapter,
            config.train.base or "",
            config.train.chat_template,
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder}: neither a run (run.toml) nor a model folder (config.json); give the folder "
            "that `lohan train --out` wrote, or one with config.json and weights"
        )
    return Source(folder.absolute())


@contextmanager
def open_stream(
    source: Source,
    shape: Shape,
    budget: Budget,
    *,
    device: str = "cpu",
    dtype: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Session]:
    """Open the model in evaluation mode, with its memory planned for `shape` within the budget.

    The weights of a model folder, or of a run with several ranks, are copied to `budget.ssd`.
    """
    with ExitStack() as undo:
        opened = open_device(device, memory=budget.device_bytes())
        room = opened.memory_bytes() if opened.has_own_memory else None
        stores: tuple[Store, ...] = ()
        if source.stores is not None:
            stores = undo.enter_context(open_set(source.stores, fold=fold_log))
            held = stored_model(stores[0].meta, stores[0].layout.regions)
            dtype = held.state_format.name
        dtype = dtype or own_dtype(source.folder)
        model = load(source.folder, dtype=dtype, lora=source.lora).eval()
        if shape.packed:
            check_packs(model)
        blocks = blocks_of(model, batch_of(shape), base=source.base, dtype=dtype)
        if stores:
            check_same(stores[0], blocks, dtype)
            if len(stores) > 1:  # The copy of several stores contains dequantised weights.
                blocks = blocks_of(model, batch_of(shape))
            restore_buffers(model, stores[0].meta)
        host = budget.host_bytes()
        chunk = held.chunk_params if stores else CHUNK_PARAMS
        plan = _plan(
            model,
            blocks,
            shape,
            dtype,
            host=host,
            device=room,
            chunk_params=chunk,
            torch_device=opened.torch_device,
            overhead=device_overhead(opened, model, host),
        )
        if len(stores) == 1:
            store = stores[0]
        else:
            # Use the user's folders, or else those next to the run's stores.
            folders = (
                [path.parent for path in source.stores.dirs[0]] if source.stores else [Path.cwd()]
            )
            dirs = [undo.enter_context(_temporary(ssd)) for ssd in budget.ssd or folders]
            created = create_weights_store(
                store_reader(*stores) if stores else source_of_model(model),
                blocks,
                dtype,
                chunk_params=plan.chunk_params,
                dirs=dirs,
                progress=progress,
            )
            undo.callback(remove, dirs)
            store = undo.enter_context(created)
        to_meta(model)
        context = PlanContext(blocks, PlanOptions(dtype=dtype), None, host, None, opened, room)
        executor_for = partial(make_executor, model, context, store, NO_UPDATES, Trace())
        yield undo.enter_context(Session(model, context, executor_for, plan))


def _plan(
    model: nn.Module,
    blocks: Blocks,
    shape: Shape,
    dtype: str,
    *,
    host: int,
    device: int | None,
    chunk_params: int,
    torch_device: torch.device,
    overhead: Iterable[tuple[str, int]],
) -> Plan:
    """Return a plan with the largest micro-batch that fits.

    With cached keys and values, raise BudgetError instead of dividing the batch.
    """
    micro_batch, (least, most) = shape.batch, HEAD_TOKENS
    each = LOGIT_COPIES * 4 * model.config.get_text_config().vocab_size  # type: ignore[operator, union-attr]
    room = (host if device is None else device) // HEAD_SHARE
    head = max(least, min(most, shape.batch * shape.tokens, room // each))
    while True:
        try:
            return forward_plan(
                blocks,
                dtype,
                host_bytes=host,
                device_bytes=device,
                micro_batch=micro_batch,
                head_tokens=head,
                chunk_params=chunk_params,
                needs=needs_of(
                    model,
                    blocks,
                    shape,
                    dtype,
                    micro_batch=micro_batch,
                    head=head,
                    torch_device=torch_device,
                )
                | dict(overhead),
            )
        except BudgetError:
            if micro_batch == 1 or shape.cache_tokens:
                raise
            micro_batch = -(-micro_batch // 2)


WEIGHTS_PREFIX = "lohan-weights-"
# Name of the lock file in a folder made by `_temporary`, locked by the process that made it.
WEIGHTS_LOCK = ".lohan-weights"


@contextmanager
def _temporary(ssd: str | os.PathLike[str]) -> Iterator[Path]:
    """Make a folder for a copy of the weights in `ssd`, and remove it at the end.

    The system's folder for temporary files may be in memory, so it is not used. A process that is
    killed leaves its folder; the next one that copies weights there removes it.
    """
    _remove_abandoned(Path(ssd))
    try:
        folder = tempfile.TemporaryDirectory(prefix=WEIGHTS_PREFIX, dir=ssd)
    except OSError as error:
        raise StoreError(
            f"{ssd}: no folder can be made there ({error.strerror}); give another place as --ssd"
        ) from None
    with folder as path, StoreLock([Path(path)], name=WEIGHTS_LOCK):
        yield Path(path) / "store"


def _remove_abandoned(ssd: Path) -> None:
    """Remove the folders in `ssd` that `_temporary` made in processes that have ended."""
    for folder in ssd.glob(f"{WEIGHTS_PREFIX}*"):
        made_here = (folder / WEIGHTS_LOCK).is_file() and not folder.is_symlink()
        if made_here and not is_locked(folder, name=WEIGHTS_LOCK):
            shutil.rmtree(folder, ignore_errors=True)


def own_dtype(folder: Path) -> str:
    """Return the name of the type in the folder's config, or "fp32" if it is not supported."""
    named = str(getattr(causal_config(folder), "dtype", None) or "float32").removeprefix("torch.")
    return next((name for name, fmt in STATE_FORMATS.items() if fmt.dtype == named), "fp32")


def batch_of(shape: Shape) -> dict[str, torch.Tensor]:
    """Return a batch of this shape on the meta device."""
    ids = torch.empty((shape.batch, shape.tokens), dtype=torch.long, device="meta")
    return {"input_ids": ids} | ({"position_ids": ids} if shape.packed else {})


def needs_of(
    model: nn.Module,
    blocks: Blocks,
    shape: Shape,
    dtype: str,
    *,
    micro_batch: int,
    head: int,
    torch_device: torch.device = CPU,
) -> dict[str, int]:
    """Return the bytes needed in addition to the weights, by owner.

    The head processes `head` tokens at a time or, in generation, the last token of each row.
    """
    config: Any = model.config
    text, width = config.get_text_config(), STATE_FORMATS[dtype].weight_bytes
    measured = measure(
        model,
        blocks,
        batch_of(shape),
        micro_batch=micro_batch,
        torch_device=torch_device,
        training=False,
    )
    last: Any = model.get_output_embeddings()  # type: ignore[operator]
    sites = {model.get_submodule(site.name): site.name for site in blocks.sites}
    measured.sites.pop(sites.get(last, ""), None)  # the head never gets all tokens at once
    rows = shape.batch if shape.cache_tokens else head
    logits = rows * text.vocab_size * 4 * LOGIT_COPIES
    stream = shape.batch * shape.tokens * text.hidden_size * width
    work = max(measured.peak_bytes, logits)
    needs = {"hidden state": 2 * stream, WORK: work}
    if shape.cache_tokens:
        needs["keys and values"] = cache_bytes(text, width, shape.batch, shape.cache_tokens)
    return needs


def cache_bytes(text: Any, width: int, batch: int, tokens: int) -> int:
    """Return the bytes of keys and values of all layers.

    One layer is counted twice, because its old and new cache coexist while it grows.
    """
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    each = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int((text.num_hidden_layers + 1) * 2 * heads * each * batch * tokens * width)
