"""The shape of a batch, and its memory footprint: measured or derived, used by the planner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lohan.model.shapes import BlockShape

# Bytes to which each offloaded tensor is aligned, as by CUDA's allocator. cuBLAS chooses its kernel
# by the alignment too, and must choose the same one for a kept result as for a new one.
OFFLOAD_ALIGN = 512


@dataclass
class SiteFootprint:
    """The memory, in bytes, of one call of a site.

    * `input_bytes` are kept until backward.
    * `peak_bytes` is the additional peak in backward: recomputation, and gradients of inputs and
      weights.
    * `forward_bytes` is the peak in forward.
    * `offload_bytes` are the inputs that require a gradient, each aligned to `OFFLOAD_ALIGN`. If
      the device has its own memory, they are moved to the host between forward and backward.
    * `shared_bytes` are the part of `input_bytes` that requires no gradient, such as masks. They
      are not moved.
    """

    input_bytes: int
    peak_bytes: int
    forward_bytes: int = 0
    offload_bytes: int = 0
    shared_bytes: int = 0


@dataclass
class Footprint:
    sites: dict[str, SiteFootprint] = field(default_factory=dict)
    no_backward: set[str] = field(default_factory=set)  # Sites that no gradient reaches.
    outside: int = 0  # Bytes held outside the sites when the last of them begins.
    # The largest first dimension of a block's call that can run in slices.
    rows: int = 0

    @property
    def input_bytes(self) -> int:
        return sum(site.input_bytes for site in self.sites.values())

    @property
    def peak_bytes(self) -> int:
        return max((site.peak_bytes for site in self.sites.values()), default=0)


@dataclass(frozen=True)
class BatchWorkload:
    """The shape of one batch, and its footprint for each micro-batch size."""

    batch: int  # Number of rows that blocks are called with; micro-batches are slices of these.
    seq: int
    measure: Callable[[int], Footprint]  # Maps a micro-batch size to the footprint.
    # Samples in the batch that the model is called with, if blocks process more rows.
    samples: int = 0
    hidden: int = 0
    vocabulary: int = 0  # 0: the head is an ordinary site.
    head_group: str | None = None
    # true if `seq` is the value of --seq, not the number of tokens of an image or latent
    text: bool = True
    # The block of each site, with the work that keeping activations saves.
    shapes: Mapping[str, BlockShape] = field(default_factory=dict)
    tiles: int = 0  # Tokens per tile, as in Plan.
    # Returns the same batch for another tile size.
    tiled: Callable[[int], BatchWorkload] | None = None
    # Returns the bytes that a site keeps for a set of classes, if that is less than the sum over
    # the classes.
    stored: Callable[[str, frozenset[str]], int] | None = None
    # Returns the bytes that a site offloads for a set of classes and a share of the batch, with
    # every tensor aligned.
    offloaded: Callable[[str, frozenset[str], float], int] | None = None
    # Cache of planning results, reused by later plans of the same batch.
    plan_cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def in_tiles(self, tokens: int) -> BatchWorkload:
        """Return the same batch with blocks that run in tiles of `tokens` tokens."""
        if tokens == self.tiles or self.tiled is None:
            return self
        key = "tiles", tokens
        if key not in self.plan_cache:
            self.plan_cache[key] = self.tiled(tokens)
        tiled: BatchWorkload = self.plan_cache[key]
        return tiled

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    @property
    def head_flops(self) -> float:
        """The FLOPs of the head's forward for the whole batch."""
        return 2.0 * self.hidden * self.vocabulary * self.tokens
