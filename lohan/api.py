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

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lohan import checkpoint
from lohan.blocks import Blocks, check_float, cut, groups_from_json
from lohan.errors import ModelError, StoreError
from lohan.export import export_folder
from lohan.footprint import Footprint, measure
from lohan.hf import build_model, persistent_buffers
from lohan.machine import host_memory_bytes
from lohan.optim import AdamW
from lohan.parameters import FolderSource, ModuleSource, ParameterSource, checkpoint_map
from lohan.plan import Plan
from lohan.planner import Load, Wishes, make_plan
from lohan.runtime.executor import Executor
from lohan.runtime.head import SlicedHead, find_decoder
from lohan.runtime.pool import HostPool
from lohan.runtime.progress import Progress, restore_rng
from lohan.safetensors_io import TensorFolder
from lohan.state import MODES, regions
from lohan.storage.store import Store
from lohan.trace import Trace
from lohan.units import parse_bytes

STORE_FOLDER = "lohan-store"
_MODE_OF = {mode.dtype: name for name, mode in MODES.items()}


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
    return build_model(folder, dtype=MODES[dtype].dtype)


def attach(
    model: nn.Module, *, optimizer: AdamW, budget: Budget,
    batch: Mapping[str, torch.Tensor] | None = None, micro_batch: int | None = None,
    overlap: bool = True, grad_offload: str = "balanced", clip: float = 0.0, trace: bool = False,
    resume: bool = False, resident: Sequence[str] = (), engine: str = "auto",
    meta: Mapping[str, Any] | None = None, store_name: str = STORE_FOLDER,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Session:  # fmt: skip
    """Moves the model's parameters into a store on `budget.ssd` and takes over its blocks.

    `batch` is an example (or its shapes on the meta device): with it the plan covers activations
    and is refused before the start if it cannot fit. `resume` opens the store that is there.
    `resident` names modules to keep in memory, for weights that the model reads outside a call.
    `overlap` and `grad_offload` say what runs beside compute and change speed only; `clip` is the
    largest global gradient norm, 0 for none. `backward` returns before a step is durable;
    `Session.flush` waits for it.
    The store is the folder `store_name` in each directory of `budget.ssd`.
    """
    check_float(model)
    mode = _mode_of(model)
    blocks = cut(model, resident=resident)
    decoder = find_decoder(model)
    if mode == "fp16" and decoder is None:
        raise ModelError(
            f"{type(model).__name__} in fp16: its loss is its own, so LoHan cannot scale it, and "
            "unscaled fp16 gradients underflow; use bf16 or fp32"
        )
    dirs = [Path(d) / store_name for d in budget.ssd]
    load = load_of(model, blocks, batch) if batch is not None else None
    host = budget.host_bytes()

    wishes = Wishes(
        mode=mode, micro_batch=micro_batch, overlap=overlap, grad_offload=grad_offload, clip=clip,
        durability=budget.durability,
    )  # fmt: skip

    if resume:
        store = Store.open(dirs, engine=engine)
    else:
        plan = make_plan(blocks, wishes, host_bytes=host, load=load)
        source = _source(model)
        store = _create(model, blocks, plan, source, budget, dirs, engine, meta, progress)
    try:
        if resume:
            _check_same(store, blocks, mode)
            wishes = replace(
                wishes, chunk_params=store.meta["chunk_params"], durability=store.durability,
                gradients_on_ssd=any(region.scratch for region in store.regions),
            )  # fmt: skip
            plan = make_plan(blocks, wishes, host_bytes=host, load=load)
            restore_rng(store.meta)
        _to_meta(model)
        pool = HostPool(host)
        executor = Executor(
            model, blocks=blocks, plan=plan, store=store, adamw=optimizer, pool=pool,
            trace=Trace(keep=trace),
        )  # fmt: skip
        _reserve_rest(pool, plan)
        head = None if decoder is None else SlicedHead(executor, model, decoder)
        return Session(model, executor, head, host_bytes=host)
    except BaseException:
        store.close()
        raise


class Session:
    """A model attached to its store. Close it (or use `with`) to let the store go."""

    def __init__(
        self, model: nn.Module, executor: Executor, head: SlicedHead | None, *, host_bytes: int
    ) -> None:
        self.model, self.executor, self._head = model, executor, head
        self.host_bytes = host_bytes  # the budget that the plan was made for
        self._closed = False
        self._settled = self.step  # the last step known to be durable and whole

    @property
    def step(self) -> int:
        return self.executor.progress.step

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self.executor.adamw.lr_at(self.step)

    @property
    def plan(self) -> Plan:
        return self.executor.plan

    @property
    def store(self) -> Store:
        return self.executor.store

    def export(
        self, out: str | os.PathLike[str], *, dtype: str | None = None,
        source_folder: str | os.PathLike[str] | None = None, overwrite: bool = False,
    ) -> Path:  # fmt: skip
        """Writes the weights of the last step as a Hugging Face folder."""
        self.settle()
        source = source_folder or _folder_of(self.model)
        return export_store(
            self.store, out, source_folder=source, dtype=dtype, overwrite=overwrite,
            buffers=persistent_buffers(self.model), config=getattr(self.model, "config", None),
        )  # fmt: skip

    def take_committed(self) -> list[dict[str, Any]]:
        """What the manifests of newly committed steps carry, oldest first."""
        committed = self.executor.work.committed
        return [committed.popleft() for _ in range(len(committed))]

    def flush(self) -> None:
        """Waits until every finished step is updated and committed. A loop need not: the next
        forward waits for what it uses."""
        self.executor.flush()

    def settle(self) -> None:
        """`flush`, and makes the last step durable where steps are not by themselves. `export` and
        `close` do it."""
        self.flush()
        if self.store.durability == "checkpoint" and self._settled != self.step:
            self.executor.parts.write_pinned()
            self.store.commit(clean=True)
        self._settled = self.step

    def close(self, *, flush: bool = True) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if flush:
                self.settle()
        finally:
            if self._head is not None:
                self._head.remove()
            self.executor.close()
            self.store.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(flush=kind is None)


def export_store(
    store: Store, out: str | os.PathLike[str], *, source_folder: str | os.PathLike[str] | None,
    dtype: str | None = None, overwrite: bool = False,
    buffers: Mapping[str, torch.Tensor] | None = None, config: Any = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:  # fmt: skip
    """Streams the committed weights of a store into a Hugging Face folder; needs no model."""
    mode = MODES[store.meta["mode"]]
    groups = groups_from_json(store.meta["layout"])
    reader = checkpoint.StoreReader(
        store, groups, mode=mode, chunk_params=store.meta["chunk_params"]
    )
    total = sum(group.parameters for group in groups)
    done = 0

    def read_flat(name: str, start: int, stop: int) -> torch.Tensor:
        nonlocal done
        piece = reader.read_flat(name, start, stop)
        done += stop - start
        progress(done, total)
        return piece

    return export_folder(
        out, tensors={name: reader.shape(name) for name in reader.names()}, read_flat=read_flat,
        dtype=MODES[dtype].dtype if dtype else mode.dtype, source_folder=source_folder,
        config=None if source_folder else config, buffers=buffers, overwrite=overwrite,
    )  # fmt: skip


def _mode_of(model: nn.Module) -> str:
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) != 1 or (dtype := dtypes.pop()) not in _MODE_OF:
        found = ", ".join(sorted(str(d) for d in dtypes | {p.dtype for p in model.parameters()}))
        raise ModelError(
            f"{type(model).__name__} has parameters of {found}; convert all of them to one of "
            f"{', '.join(str(m.dtype) for m in MODES.values())} first"
        )
    return _MODE_OF[dtype]


def _folder_of(model: nn.Module) -> Path | None:
    name = getattr(getattr(model, "config", None), "name_or_path", "")
    return Path(name) if name and (Path(name) / "config.json").is_file() else None


def _source(model: nn.Module) -> ParameterSource:
    """A model on the meta device comes from its folder, any other from memory."""
    if not any(parameter.is_meta for parameter in model.parameters()):
        return ModuleSource(model)
    folder = _folder_of(model)
    if folder is None:
        raise ModelError(
            f"{type(model).__name__} is on the meta device and names no folder to take its weights "
            "from; build it with lohan.load(FOLDER)"
        )
    tensors = TensorFolder(folder)
    return FolderSource(tensors, checkpoint_map(model, tensors).parameters)


def load_of(model: nn.Module, blocks: Blocks, batch: Mapping[str, torch.Tensor]) -> Load:
    """What a batch of these shapes asks of the plan."""
    shapes = {k: v for k, v in batch.items() if k != "labels"}
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

    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return Load(
        batch=first.shape[0], seq=first.shape[1] if first.ndim > 1 else 1, measure=footprint,
        hidden=getattr(text, "hidden_size", 0),
        vocabulary=getattr(text, "vocab_size", 0) if head is not None else 0,
        head_group=head_site.groups[0] if head_site is not None else None,
    )  # fmt: skip


def _create(
    model: nn.Module, blocks: Blocks, plan: Plan, source: ParameterSource, budget: Budget,
    dirs: list[Path], engine: str, meta: Mapping[str, Any] | None,
    progress: Callable[[int, int], None],
) -> Store:  # fmt: skip
    mode = MODES[plan.mode]
    layout = regions(
        blocks.groups, mode=mode, chunk_params=plan.chunk_params, gradients=plan.holds_all
    )
    store = Store.create(dirs, layout, durability=budget.durability, engine=engine)
    try:
        first = {
            **(meta or {}),
            **Progress.start(plan.mode).to_meta(),
            "mode": plan.mode,
            "chunk_params": plan.chunk_params,
            "layout": blocks.to_json(),
        }
        checkpoint.fill(
            store, blocks.groups, source, mode=mode, chunk_params=plan.chunk_params, meta=first,
            progress=progress,
        )  # fmt: skip
    except BaseException:
        store.close()
        raise
    return store


def _check_same(store: Store, blocks: Blocks, mode: str) -> None:
    if store.meta["layout"] != json.loads(json.dumps(blocks.to_json())):
        raise StoreError(
            f"the store in {store.dirs[0]} holds another model than {blocks.parameters:,} "
            "parameters cut this way; resume with the model and options it was made with"
        )
    if store.meta["mode"] != mode:
        raise StoreError(
            f"the store in {store.dirs[0]} was made for {store.meta['mode']}, the model is {mode}; "
            f"load it with dtype={store.meta['mode']!r}"
        )


def _reserve_rest(pool: HostPool, plan: Plan) -> None:
    """What torch allocates itself counts too: the pool then holds the plan's whole ledger."""
    allocated = pool.ledger()
    for entry in plan.ledger:
        if entry.tier == "host" and entry.owner not in allocated:
            pool.reserve(entry.owner, entry.bytes)


def _to_meta(model: nn.Module) -> None:
    """The store owns the weights now: the module keeps only their shapes."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(
                        parameter.detach().to("meta"), requires_grad=parameter.requires_grad
                    )
                module._parameters[name] = made[id(parameter)]
