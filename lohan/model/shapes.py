"""A model as numbers: what planner, cost model and simulator must know of it, and no more.

Comes from a preset, from a config.json, or from the traced blocks of a real model; all three give
the same noun. FLOPs count a multiply-add as two.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Activation:
    """Tensors of one class inside a block that backward needs, and what keeping them saves.

    Elements and FLOPs are per token; `flops_per_context` counts once more for every token of the
    sequence (attention). `flops` is the forward work that need not be repeated when the class is
    kept. Masks and the like count as so many elements of two bytes."""

    name: str
    elements: float
    flops: float
    flops_per_context: float = 0.0

    def flops_at(self, seq: int) -> float:
        return self.flops + self.flops_per_context * seq

    def benefit_at(self, seq: int) -> float:
        """Offloading benefit: FLOPs saved per element kept; over the element size, per byte."""
        return self.flops_at(seq) / self.elements


@dataclass(frozen=True)
class BlockShape:
    """One block. `activations` are everything that backward needs, without the block's input, in
    the order in which forward makes them. `flops` also counts what makes the block's output: that
    is the next block's input, kept anyway, and belongs to no class."""

    name: str
    parameters: int
    input_elements: float  # per token
    flops: float  # of forward, per token
    flops_per_context: float = 0.0
    activations: tuple[Activation, ...] = ()

    def flops_at(self, seq: int) -> float:
        return self.flops + self.flops_per_context * seq

    @property
    def elements(self) -> float:
        """All that backward needs, the input included."""
        return self.input_elements + sum(part.elements for part in self.activations)

    def work(self, temporaries: float) -> float:
        """About what backward takes beside the input: all activations, so many more while it works
        on them, and the gradient that it begins with."""
        inside = self.elements - self.input_elements
        return inside + self.elements * temporaries + self.input_elements

    @property
    def widest(self) -> float:
        """About what forward without a graph makes and holds at once: what the largest operation
        reads and makes, and the block's output."""
        return self.input_elements + 2 * max((a.elements for a in self.activations), default=0.0)

    def scaled(self, factor: float, *, context: float) -> BlockShape:
        """So many times as much of everything per token, and of what attention takes."""
        return replace(
            self, input_elements=self.input_elements * factor, flops=self.flops * factor,
            flops_per_context=self.flops_per_context * context,
            activations=tuple(
                replace(
                    part, elements=part.elements * factor, flops=part.flops * factor,
                    flops_per_context=part.flops_per_context * context,
                )
                for part in self.activations
            ),
        )  # fmt: skip

    def recompute_flops_at(self, seq: int, kept: Collection[str] = ()) -> float:
        """Forward work to repeat where only the input and these classes are kept, and recomputation
        ends with the last tensor that backward needs."""
        return sum(part.flops_at(seq) for part in self.activations if part.name not in kept)

    def by_benefit(self, seq: int) -> list[Activation]:
        """Classes in the order in which keeping them pays."""
        return sorted(self.activations, key=lambda part: -part.benefit_at(seq))


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    name: str
    hidden: int
    vocabulary: int  # 0: no token head
    blocks: tuple[BlockShape, ...]
    embedding_parameters: int  # learned positions and projections of the embedding included
    head_parameters: int  # 0: none, or tied to the embedding
    tied: bool = False
    resident_parameters: int = 0  # norms and loose vectors outside the blocks
    sample_tokens: int = 0  # tokens of one sample where the data fix it (images); 0: the sequence
    temporaries: float = 1.0  # of a block's work, as a share of its activations

    @property
    def parameters(self) -> int:
        inside = sum(block.parameters for block in self.blocks)
        return inside + self.embedding_parameters + self.head_parameters + self.resident_parameters

    @property
    def head_flops(self) -> float:
        """Of the token head's forward, per token; 0 without one."""
        return 2.0 * self.hidden * self.vocabulary

    def flops_at(self, seq: int) -> float:
        """Of one forward through blocks and head, per token."""
        return sum(block.flops_at(seq) for block in self.blocks) + self.head_flops
