"""What `attach` is told besides model, optimizer and batch: a budget, and three frozen policies."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any

from torch import nn

from lohan.capture.blocks import default_decay
from lohan.config import without_aliases
from lohan.device.choose import Backend
from lohan.errors import BudgetError, ConfigError
from lohan.model.machine import Profile
from lohan.model.plan import Kept
from lohan.store.engine import Engine
from lohan.util.system import cgroup_memory_limit, host_memory_bytes, total_memory_bytes
from lohan.util.units import AUTO, format_bytes, parse_bytes

STORE_FOLDER = "lohan-store"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Hard limits. `host` bounds what LoHan holds in memory beyond Python and torch themselves
    (None: four fifths of what is free), `device` the same of an accelerator's own memory; `ssd`
    names directories to spread the state over. Several ranks on a machine share `host`.
    `commit_every`: "step", a number of steps, a time such as "10min", or "auto"."""

    ssd: Sequence[str | os.PathLike[str]]
    host: str | int | None = None
    device: str | int | None = None
    durability: str = "step"
    commit_every: str | int = AUTO

    def host_bytes(self, ranks: int = 1) -> int:
        """Of each of so many ranks on this machine."""
        if self.host is None:
            return host_memory_bytes() * 4 // 5 // ranks
        given, there = parse_bytes(self.host, name="host"), total_memory_bytes()
        there = min(there, cgroup_memory_limit() or there)
        if given > there:
            raise BudgetError(
                f"host is {format_bytes(given)}, this machine has {format_bytes(there)} of memory; "
                "lower --host, or leave it out for four fifths of what is free"
            )
        return given // ranks

    def device_bytes(self) -> int | None:
        return None if self.device is None else parse_bytes(self.device, name="device")


@dataclass(frozen=True, kw_only=True)
class OffloadPolicy:
    """What leaves memory, and what overlaps with compute. All of it changes speed only, but for
    the rounding of other micro-batches, of `grad_dtype` ("bf16" rounds sums of slices while they
    wait for their update: not PyTorch's result) and of `tiles`: so many tokens at a time in those
    parts of a block that do not mix tokens, "auto" where a plan needs it to fit, or "off".
    `activations` says
    what blocks keep for backward: "holistic", what pays on a machine of this `profile`; "recompute"
    (nothing but their inputs), "all", exact classes, or what another policy would keep ("static",
    "capuchin", "checkmate", "g10"). `run_again`: the loop asks `session.must_run_again` after every
    backward and, if so, runs the same batch again from the random state before it: then updates
    need not wait for the norm where memory has no room for all gradients."""

    activations: str | Kept = "holistic"
    grad_offload: str = "balanced"
    overlap: bool = True
    micro_batch: int | None = None
    tiles: int | str = "auto"
    grad_dtype: str = "fp32"
    profile: Profile | None = None
    run_again: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelPolicy:
    """How the model is cut and computes. `blocks` names the lists of repeated blocks, if not all
    that are found are to be used; `resident` modules to keep in memory, for weights that the model
    reads outside a call: with a batch such uses are found. `dtype` is the type that weights compute
    in, if not their own; masters keep the precision that the model has. `base` packs the frozen
    weights of linear layers in blocks ("nf4", "int8" or "fp8"): so they lie on SSD and in memory,
    and calls dequantise them. `compile` has torch compile the blocks, on accelerators only; a name
    or a function is torch.compile's backend. `decay` says by name which parameters decay. `check`
    compares each block's first call with a plain call of the same module, where there is memory for
    it, and refuses what differs; None: for models that docs/models.md does not have."""

    blocks: Sequence[str] = ()
    resident: Sequence[str] = ()
    dtype: str | None = None
    base: str = ""
    compile: bool | Backend = False
    decay: Callable[[str, nn.Parameter], bool] = default_decay
    check: bool | None = None


@dataclass(frozen=True, kw_only=True)
class StorePolicy:
    """The store: the folder `store_name` in each directory of the budget. `resume` opens the one
    that is there. `meta` goes into every manifest of a new one."""

    store_name: str = STORE_FOLDER
    resume: bool = False
    engine: str | Engine = "auto"
    meta: Mapping[str, Any] = field(default_factory=dict)
    progress: Callable[[int, int], None] = lambda done, total: None


def with_keywords(
    offload: OffloadPolicy, model: ModelPolicy, store: StorePolicy, keywords: Mapping[str, Any]
) -> tuple[OffloadPolicy, ModelPolicy, StorePolicy]:
    """The policies with fields that were given as keywords of `attach` itself."""
    made: list[Any] = []
    left = without_aliases(keywords)
    for policy in (offload, model, store):
        own = {f.name: left.pop(f.name) for f in fields(policy) if f.name in left}
        made.append(replace(policy, **own))
    if left:
        name = next(iter(left))
        known = [f.name for policy in (offload, model, store) for f in fields(policy)]
        near = get_close_matches(name, known, n=1) or [", ".join(known)]
        raise ConfigError(f"attach has no keyword {name!r}; it takes {near[0]}")
    return made[0], made[1], made[2]
