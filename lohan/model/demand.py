"""What a batch asks of memory: the nouns that `footprint` measures and the planner spends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lohan.model.shapes import BlockShape


@dataclass
class SiteFootprint:
    """Bytes of one call of a site: what it keeps until backward, its peak in backward beyond that
    (recomputation, gradients of inputs and weights), its peak in forward, and those of its inputs
    that take a gradient: where the device has a memory of its own, these leave it meanwhile."""

    input_bytes: int
    peak_bytes: int
    forward_bytes: int = 0
    travel_bytes: int = 0


@dataclass
class Footprint:
    sites: dict[str, SiteFootprint] = field(default_factory=dict)
    still: set[str] = field(default_factory=set)  # sites that no gradient comes to
    outside: int = 0  # bytes held between the sites when the last of them begins

    @property
    def input_bytes(self) -> int:
        return sum(site.input_bytes for site in self.sites.values())

    @property
    def peak_bytes(self) -> int:
        return max((site.peak_bytes for site in self.sites.values()), default=0)


@dataclass(frozen=True)
class Load:
    """What one batch asks for: its shape and the footprint of each micro-batch size."""

    batch: int
    seq: int
    measure: Callable[[int], Footprint]  # micro-batch -> footprint
    hidden: int = 0
    vocabulary: int = 0  # 0: the head is an ordinary site
    head_group: str | None = None
    text: bool = True  # `seq` is what --seq says, not the size of images or latents
    shapes: Mapping[str, BlockShape] = field(default_factory=dict)  # by site; what keeping saves
    # Bytes that a site keeps of these classes, where that is less than their sum.
    stored: Callable[[str, frozenset[str]], int] | None = None

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    @property
    def head_flops(self) -> float:
        """Of the head's forward, for the whole batch."""
        return 2.0 * self.hidden * self.vocabulary * self.tokens
