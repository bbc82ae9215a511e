"""A trained or untouched model that runs forward only, its weights streamed from a store.

A run has its store. A Hugging Face folder gets one with its weights alone, which goes when the work
is done.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lohan.capture.buffers import restore_buffers
from lohan.capture.fake import CPU
from lohan.capture.footprint import measure_forward
from lohan.capture.packing import check_packs
from lohan.checkpoint.hf_folder import causal_config
from lohan.checkpoint.model_store import check_same, to_meta
from lohan.checkpoint.model_store import source_of as source_of_model
from lohan.checkpoint.sets import StoreSet, open_set
from lohan.checkpoint.shards import ShardReader
from lohan.checkpoint.weights_store import create_weights_store
from lohan.device.choose import open_device
from lohan.engine.attach import Budget, blocks_of, load, running
from lohan.engine.session import Demand, Session
from lohan.errors import BudgetError, ConfigError, StoreError
from lohan.lora import Lora
from lohan.model.layout import Blocks
from lohan.model.plan import Plan
from lohan.model.state import MODES, stored_model
from lohan.optim import AdamW
from lohan.planner.forward import forward_plan
from lohan.planner.planner import Wishes
from lohan.store.admin import remove
from lohan.store.store import Store
from lohan.train.claiming import stores_of
from lohan.train.run_folder import RunFolder
from lohan.util.trace import Trace

LOGIT_COPIES = 4  # logits, their fp32 copy, and what is made of them
HEAD_TOKENS = (16, 256)  # of one slice of the head, at least and at most
HEAD_SHARE = 4  # a slice may take one part in so many of the budget
CHUNK_PARAMS = 2**22


@dataclass(frozen=True)
class Source:
    """What to run: a Hugging Face folder, and the stores of a run that was made from it."""

    folder: Path
    stores: StoreSet | None = None
    lora: Lora | None = None


@dataclass(frozen=True)
class Shape:
    """The largest batch to come. `cache_tokens` is how long its rows get where keys and values are
    kept, 0 if they are not."""

    batch: int
    tokens: int
    cache_tokens: int = 0
    packed: bool = False


def source_of(place: Path) -> Source:
    """A run, or a model folder."""
    run = RunFolder(place.absolute())
    if run.config_file.is_file():
        config = run.config()
        return Source(config.model, stores_of(run, config), config.train.adapter)
    if not (place / "config.json").is_file():
        raise ConfigError(
            f"{place}: neither a run (run.toml) nor a model folder (config.json); give the folder "
            "that `lohan train --out` wrote, or one with config.json and weights"
        )
    return Source(place.absolute())


@contextmanager
def open_stream(
    source: Source, shape: Shape, budget: Budget, *, device: str = "cpu",
    dtype: str | None = None, progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Session]:  # fmt: skip
    """The model in evaluation mode, its memory planned for `shape` within the budget, whose `ssd`
    is where the weights of a model folder, or of a run with several ranks, go."""
    with ExitStack() as undo:
        place = open_device(device, memory=budget.device_bytes())
        room = place.memory_bytes() if place.linked else None
        stores: tuple[Store, ...] = ()
        if source.stores is not None:
            stores = undo.enter_context(open_set(source.stores))
            held = stored_model(stores[0].meta, stores[0].regions)
            dtype = held.mode.name
        mode = dtype or own_mode(source.folder)
        model = load(source.folder, dtype=mode, lora=source.lora).eval()
        if shape.packed:
            check_packs(model)
        blocks = blocks_of(model, batch_of(shape))
        if stores:
            check_same(stores[0], blocks, mode)
            restore_buffers(model, stores[0].meta)
        host = budget.host_bytes()
        chunk = held.chunk_params if stores else CHUNK_PARAMS
        plan = _plan(
            model, blocks, shape, mode, host=host, device=room, chunk_params=chunk,
            place=place.torch_device,
        )  # fmt: skip
        if len(stores) == 1:
            store = stores[0]
        else:
            dirs = [undo.enter_context(_temporary(ssd)) for ssd in _room(source, budget)]
            created = create_weights_store(
                ShardReader(stores) if stores else source_of_model(model), blocks, mode,
                chunk_params=plan.chunk_params, dirs=dirs, progress=progress,
            )  # fmt: skip
            undo.callback(remove, dirs)
            store = undo.enter_context(created)
        to_meta(model)
        demand = Demand(blocks, Wishes(mode=mode), None, host, None, place, room)
        run = partial(running, model, demand, store, AdamW(lr=0.0), Trace())
        yield undo.enter_context(Session(model, demand, run, plan))


def _room(source: Source, budget: Budget) -> Sequence[str | os.PathLike[str]]:
    """Where weights may be put together: as the user says, or else beside a run's own."""
    beside = [path.parent for path in source.stores.dirs[0]] if source.stores else [Path.cwd()]
    return budget.ssd or beside


def _plan(
    model: nn.Module, blocks: Blocks, shape: Shape, mode: str, *, host: int, device: int | None,
    chunk_params: int, place: torch.device,
) -> Plan:  # fmt: skip
    """With the largest micro-batch that fits; what fills a cache cannot be cut."""
    micro_batch, (least, most) = shape.batch, HEAD_TOKENS
    each = LOGIT_COPIES * 4 * model.config.get_text_config().vocab_size  # type: ignore[operator, union-attr]
    room = (host if device is None else device) // HEAD_SHARE
    head = max(least, min(most, shape.batch * shape.tokens, room // each))
    while True:
        try:
            return forward_plan(
                blocks, mode, host_bytes=host, device_bytes=device, micro_batch=micro_batch,
                head_tokens=head, chunk_params=chunk_params,
                needs=needs_of(
                    model, blocks, shape, mode, micro_batch=micro_batch, head=head, place=place
                ),
            )  # fmt: skip
        except BudgetError:
            if micro_batch == 1 or shape.cache_tokens:
                raise
            micro_batch = -(-micro_batch // 2)


@contextmanager
def _temporary(ssd: str | os.PathLike[str]) -> Iterator[Path]:
    """A new folder there, since the usual place for such things may be in memory."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="lohan-weights-", dir=ssd)
    except OSError as error:
        raise StoreError(
            f"{ssd}: no folder can be made there ({error.strerror}); give another place as --ssd"
        ) from None
    with folder as path:
        yield Path(path) / "store"


def own_mode(folder: Path) -> str:
    """The mode that computes in the type of the folder's weights."""
    named = str(getattr(causal_config(folder), "dtype", None) or "float32").removeprefix("torch.")
    return next((name for name, mode in MODES.items() if mode.dtype == named), "fp32")


def batch_of(shape: Shape) -> dict[str, torch.Tensor]:
    """The largest batch, without its memory."""
    ids = torch.empty((shape.batch, shape.tokens), dtype=torch.long, device="meta")
    return {"input_ids": ids} | ({"position_ids": ids} if shape.packed else {})


def needs_of(
    model: nn.Module, blocks: Blocks, shape: Shape, mode: str, *, micro_batch: int, head: int,
    place: torch.device = CPU,
) -> dict[str, int]:  # fmt: skip
    """Bytes beside the weights, by owner. The head takes `head` tokens at a time, or the last of
    each row where tokens are made."""
    config: Any = model.config
    text, width = config.get_text_config(), MODES[mode].weight_bytes
    found = measure_forward(model, blocks, batch_of(shape), micro_batch=micro_batch, place=place)
    last: Any = model.get_output_embeddings()  # type: ignore[operator]
    sites = {model.get_submodule(site.name): site.name for site in blocks.sites}
    found.sites.pop(sites.get(last, ""), None)  # never has all tokens
    rows = shape.batch if shape.cache_tokens else head
    logits = rows * text.vocab_size * 4 * LOGIT_COPIES
    stream = shape.batch * shape.tokens * text.hidden_size * width
    work = max(found.peak_bytes, logits)
    needs = {"hidden state": 2 * stream, "work of one block or the head": work}
    if shape.cache_tokens:
        needs["keys and values"] = cache_bytes(text, width, shape.batch, shape.cache_tokens)
    return needs


def cache_bytes(text: Any, width: int, batch: int, tokens: int) -> int:
    """Keys and values of all layers; one layer's exist twice while it grows."""
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    each = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return (text.num_hidden_layers + 1) * 2 * heads * each * batch * tokens * width
