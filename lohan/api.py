"""The three calls: load, attach, and then your own loop with `loss.backward()`.

model = lohan.load("path/to/hf-folder")
with lohan.attach(model, optimizer=lohan.AdamW(lr=1e-5),
                  budget=lohan.Budget(host="8GiB", ssd=["/nvme0"])) as session:
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()            # the optimizer step; its tail runs beside the next forward
    session.export("tuned")
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lohan.blocks import check_float, cut
from lohan.errors import ModelError
from lohan.footprint import inventories, measure
from lohan.layout import Blocks
from lohan.machine import host_memory_bytes
from lohan.model_files.folder import build_model
from lohan.model_files.model_store import check_same, create_store, to_meta
from lohan.optim import AdamW
from lohan.plan import Kept, Plan
from lohan.planning.books import Books
from lohan.planning.demand import Footprint, Load
from lohan.planning.planner import Wishes, make_plan
from lohan.profile import Profile
from lohan.runtime.executor import Executor
from lohan.runtime.head import SlicedHead, find_decoder
from lohan.runtime.pool import HostPool
from lohan.runtime.progress import restore_rng
from lohan.session import Demand, Running, Session
from lohan.state import MODES
from lohan.storage.store import Store
from lohan.tensors import dtype_of
from lohan.trace import Trace
from lohan.units import parse_bytes

STORE_FOLDER = "lohan-store"
_MODE_OF = {dtype_of(mode): name for name, mode in MODES.items()}


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Hard limits. `host` bounds what LoHan holds in memory beyond Python and torch themselves
    (None: four fifths of what is free); `ssd` names directories to spread the state over."""

    ssd: Sequence[str | os.PathLike[str]]
    host: str | int | None = None
    durability: str = "step"

    def host_bytes(self) -> int:
        if self.host is None:
            return host_memory_bytes() * 4 // 5
        return parse_bytes(self.host, name="host")


def load(folder: str | os.PathLike[str], *, dtype: str = "fp32") -> nn.Module:
    """A causal LM from a Hugging Face folder: structure and buffers now, weights at `attach`."""
    if dtype not in MODES:
        raise ModelError(f"dtype is {dtype!r}; it must be one of {', '.join(MODES)}")
    return build_model(folder, dtype=dtype_of(MODES[dtype]))


def attach(
    model: nn.Module, *, optimizer: AdamW, budget: Budget,
    batch: Mapping[str, torch.Tensor] | None = None, micro_batch: int | None = None,
    overlap: bool = True, grad_offload: str = "balanced", clip: float = 0.0, trace: bool = False,
    activations: str | Kept = "holistic", profile: Profile | None = None,
    resume: bool = False, resident: Sequence[str] = (), engine: str = "auto",
    meta: Mapping[str, Any] | None = None, store_name: str = STORE_FOLDER,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Session:  # fmt: skip
    """Moves the model's parameters into a store on `budget.ssd` and takes over its blocks.

    `batch` is an example (or its shapes on the meta device): with it the plan covers activations
    and is refused before the start if it cannot fit. `resume` opens the store that is there.
    `resident` names modules to keep in memory, for weights that the model reads outside a call.
    `overlap` and `grad_offload` say what runs beside compute and change speed only; `clip` is the
    largest global gradient norm, 0 for none. `activations` says what blocks keep for backward:
    "recompute" (nothing but their inputs), "all", exact classes, or "holistic", what pays on a
    machine of this `profile`; it too changes speed only. `backward` returns before a step is
    durable; `Session.flush` waits for it.
    The store is the folder `store_name` in each directory of `budget.ssd`.
    """
    check_float(model)
    mode = _mode_of(model)
    blocks = cut(model, resident=resident)
    if mode == "fp16" and find_decoder(model) is None:
        raise ModelError(
            f"{type(model).__name__} in fp16: its loss is its own, so LoHan cannot scale it, and "
            "unscaled fp16 gradients underflow; use bf16 or fp32"
        )
    dirs = [Path(d) / store_name for d in budget.ssd]
    load = load_of(model, blocks, batch) if batch is not None else None
    host = budget.host_bytes()
    wishes = Wishes(
        mode=mode, micro_batch=micro_batch, overlap=overlap, grad_offload=grad_offload, clip=clip,
        durability=budget.durability, activations=activations,
    )  # fmt: skip
    with ExitStack() as undo:
        if resume:
            store = undo.enter_context(Store.open(dirs, engine=engine))
            check_same(store, blocks, mode)
            wishes = replace(
                wishes, chunk_params=store.meta["chunk_params"], durability=store.durability,
                gradients_on_ssd=any(region.scratch for region in store.regions),
            )  # fmt: skip
            plan = make_plan(blocks, wishes, host_bytes=host, load=load, profile=profile)
            restore_rng(store.meta)
        else:
            plan = make_plan(blocks, wishes, host_bytes=host, load=load, profile=profile)
            created = create_store(
                model, blocks, plan, dirs=dirs, durability=budget.durability, engine=engine,
                meta=meta or {}, progress=progress,
            )  # fmt: skip
            store = undo.enter_context(created)
        demand = Demand(blocks, wishes, load, host)
        run = partial(_running, model, demand, store, optimizer, Trace(keep=trace))
        to_meta(model)
        session = Session(model, demand, run, plan)
        undo.pop_all()
    return session


def _running(
    model: nn.Module, demand: Demand, store: Store, adamw: AdamW, trace: Trace, plan: Plan
) -> Running:
    """The store has the weights: the model's blocks now run from it."""
    pool = HostPool(demand.host_bytes)
    executor = Executor(
        model, blocks=demand.blocks, plan=plan, store=store, adamw=adamw, pool=pool, trace=trace,
        kept=kept_of(demand.blocks, plan, demand.load),
    )  # fmt: skip
    _reserve_rest(pool, plan)
    decoder = find_decoder(model)
    return executor, None if decoder is None else SlicedHead(executor, model, decoder)


def load_of(model: nn.Module, blocks: Blocks, batch: Mapping[str, torch.Tensor]) -> Load:
    """What a batch of these shapes asks of the plan."""
    shapes = _shapes(batch)
    first = next(iter(shapes.values()))
    seen: dict[int, Footprint] = {}
    head = model.get_output_embeddings() if find_decoder(model) is not None else None  # type: ignore[operator]
    head_site = next((s for s in blocks.sites if model.get_submodule(s.name) is head), None)

    def footprint(micro_batch: int) -> Footprint:
        if micro_batch not in seen:
            seen[micro_batch] = measure(model, blocks, shapes, micro_batch=micro_batch)
            if head_site is not None:  # runs in slices of tokens, planned apart
                seen[micro_batch].sites.pop(head_site.name, None)
        return seen[micro_batch]

    kinds = inventories(model, blocks, shapes, micro_batch=None)
    repeated = set(kinds) - ({head_site.name} if head_site is not None else set())
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return Load(
        batch=first.shape[0], seq=first.shape[1] if first.ndim > 1 else 1, measure=footprint,
        hidden=getattr(text, "hidden_size", 0),
        vocabulary=getattr(text, "vocab_size", 0) if head is not None else 0,
        head_group=head_site.groups[0] if head_site is not None else None,
        shapes={name: found.shape for name, found in kinds.items() if name in repeated},
    )  # fmt: skip


def kept_of(blocks: Blocks, plan: Plan, load: Load | None) -> dict[int, frozenset[str]]:
    """Classes of activations that each site keeps, by its number."""
    if load is None or not plan.kept:
        return {}
    books = Books(blocks, plan.mode, load, plan.micro_batch)
    numbers = {site.name: number for number, site in enumerate(blocks.sites)}
    return {numbers[name]: frozenset(books.kept_classes(plan, name)) for name in books.block_sites}


def _shapes(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without labels: the model gives its hidden states, and the loss is sliced."""
    return {name: tensor for name, tensor in batch.items() if name != "labels"}


def _mode_of(model: nn.Module) -> str:
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) != 1 or (dtype := dtypes.pop()) not in _MODE_OF:
        found = ", ".join(sorted(str(d) for d in dtypes | {p.dtype for p in model.parameters()}))
        raise ModelError(
            f"{type(model).__name__} has parameters of {found}; convert all of them to one of "
            f"{', '.join(str(dtype) for dtype in _MODE_OF)} first"
        )
    return _MODE_OF[dtype]


def _reserve_rest(pool: HostPool, plan: Plan) -> None:
    """What torch allocates itself counts too: the pool then holds the plan's whole ledger."""
    allocated = pool.ledger()
    for entry in plan.ledger:
        if entry.tier == "host" and entry.owner not in allocated:
            pool.reserve(entry.owner, entry.bytes)
