"""What a plan is to be made for, beside the model and the machine."""

from __future__ import annotations

from dataclasses import dataclass

from lohan.model.plan import Kept
from lohan.optim import USUAL, StateKind


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the user has decided."""

    mode: str
    micro_batch: int | None = None
    overlap: bool = True
    grad_offload: str = "balanced"
    clip: float = 0.0
    chunk_params: int | None = None  # a store's chunks are fixed when it is made
    head_tokens: int | None = None  # slices of the head, where a run must not change them
    # Whether the store has room for held gradients. None: it is yet to be made, with what it takes.
    gradients_on_ssd: bool | None = None
    durability: str = "step"
    minimise: str = "time"  # or writes
    activations: str | Kept = "holistic"  # one of ACTIVATIONS, or exactly these
    kind: StateKind = USUAL
    world: int = 1  # ranks; the blocks to plan for are then one rank's pieces
