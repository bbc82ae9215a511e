"""The settings of `attach` besides model, optimizer and batch: a budget and three policies."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any

from torch import nn

from lohan.capture.blocks import default_decay
from lohan.device.choose import Backend
from lohan.errors import BudgetError, ConfigError
from lohan.model.machine import Profile
from lohan.model.plan import Kept
from lohan.store.io_engine import IOEngine
from lohan.util.memory import cgroup_memory_limit, host_memory_bytes, total_memory_bytes
from lohan.util.units import AUTO, format_bytes, parse_bytes

STORE_FOLDER = "lohan-store"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The limits of memory, and the directories of the state.

    `host` limits the main memory that LoHan uses in addition to Python and torch. None means four
    fifths of the free memory. Several ranks on a machine share it. `device` limits the memory of an
    accelerator in the same way. `ssd` names the directories over which the state is spread.
    `commit_every` is "step", a number of steps, a time such as "10min", or "auto". `log_gradients`
    is "off", or the number of steps from one write of the full state to the next; the steps in
    between are committed by logging their gradients. With "auto", gradients are logged if that
    makes steps faster.
    """

    ssd: Sequence[str | os.PathLike[str]]
    host: str | int | None = None
    device: str | int | None = None
    commit_every: str | int = AUTO
    log_gradients: str | int = AUTO

    def host_bytes(self, ranks: int = 1) -> int:
        """Return the host memory of each of `ranks` ranks on this machine, in bytes."""
        if self.host is None:
            return host_memory_bytes() * 4 // 5 // ranks
        budget, available = parse_bytes(self.host, name="host"), total_memory_bytes()
        available = min(available, cgroup_memory_limit() or available)
        if budget > available:
            raise BudgetError(
                f"host is {format_bytes(budget)}, this machine has {format_bytes(available)} of "
                "memory; "
                "lower --host, or leave it out for four fifths of what is free"
            )
        return budget // ranks

    def device_bytes(self) -> int | None:
        return None if self.device is None else parse_bytes(self.device, name="device")


@dataclass(frozen=True, kw_only=True)
class OffloadPolicy:
    """The placement of activations and updates, and their overlap with compute.

    These settings affect only the speed, with one exception: results are rounded differently with
    `tiles` or with another micro-batch size.

    `tiles` is the number of tokens per tile in the parts of a block that do not mix tokens, "off",
    or "auto", which uses tiles if a plan needs them to fit or if a GPU is faster with them.

    `activations` selects what blocks keep for backward: "holistic" (the fastest choice on a machine
    with this `profile`), "recompute" (only the inputs), "all", exact classes, or the choice of
    another policy ("static", "capuchin", "checkmate", "g10").

    `run_again` states that the loop checks `session.must_run_again` after every backward and, if it
    is True, runs the same batch again from the random state before it. Updates then need not wait
    for the norm even if memory cannot hold all gradients.
    """

    activations: str | Kept = "holistic"
    update_mode: str = "balanced"
    overlap: bool = True
    micro_batch: int | None = None
    tiles: int | str = "auto"
    profile: Profile | None = None
    run_again: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelPolicy:
    """How the model is divided into blocks, and how it computes.

    `blocks` names the lists of repeated blocks to use; by default all lists are used.
    `resident` names modules to keep in memory because the model reads their weights outside a
    call; with an example batch, such modules are detected. `dtype` is the type in which weights
    compute, if it differs from their own; the master weights keep the precision of the model.
    `base` packs the frozen weights of linear layers in blocks ("nf4", "int8" or "fp8"), on SSD
    and in memory; calls dequantise them. `compile` compiles the blocks with torch, on
    accelerators only; a name or a function is the backend of torch.compile. With
    `deterministic`, runs on an accelerator repeat bit for bit: torch uses kernels with a fixed
    order of sums, and raises an error if it has none. `decay` selects by name the parameters
    that decay. `check` compares the first call of each block with a plain call of the same
    module, if memory permits, and refuses a block that differs; None does so for models that
    docs/models.md does not list.
    """

    blocks: Sequence[str] = ()
    resident: Sequence[str] = ()
    dtype: str | None = None
    base: str = ""
    compile: bool | Backend = False
    deterministic: bool = False
    decay: Callable[[str, nn.Parameter], bool] = default_decay
    check: bool | None = None


@dataclass(frozen=True, kw_only=True)
class StorePolicy:
    """The store, which is the folder `store_name` in each directory of the budget.

    `resume` opens an existing store. `meta` is written into every manifest of a new one.
    """

    store_name: str = STORE_FOLDER
    resume: bool = False
    engine: str | IOEngine = "auto"
    meta: Mapping[str, Any] = field(default_factory=dict)
    progress: Callable[[int, int], None] = lambda done, total: None


def with_keywords(
    offload: OffloadPolicy, model: ModelPolicy, store: StorePolicy, keywords: Mapping[str, Any]
) -> tuple[OffloadPolicy, ModelPolicy, StorePolicy]:
    """Return the policies with the fields that were given as keywords of `attach`."""
    policies: list[Any] = []
    remaining = dict(keywords)
    for policy in (offload, model, store):
        values = {f.name: remaining.pop(f.name) for f in fields(policy) if f.name in remaining}
        policies.append(replace(policy, **values))
    if remaining:
        name = next(iter(remaining))
        names = [f.name for policy in (offload, model, store) for f in fields(policy)]
        near = get_close_matches(name, names, n=1) or [", ".join(names)]
        raise ConfigError(f"attach has no keyword {name!r}; it takes {near[0]}")
    return policies[0], policies[1], policies[2]
