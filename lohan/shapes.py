"""A model as numbers: what planner, cost model and simulator must know of it, and no more.

Comes from a preset, from a config.json, or from the traced blocks of a real model; all three give
the same noun. FLOPs count a multiply-add as two.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Activation:
    """Tensors of one class inside a block that backward needs, and what keeping them saves.

    Elements and FLOPs are per token; `flops_per_context` counts once more for every token of the
    sequence (attention). `flops` is the forward work that need not be repeated when the class is
    kept."""

    name: str
    elements: float
    flops: float
    flops_per_context: float = 0.0

    def flops_at(self, seq: int) -> float:
        return self.flops + self.flops_per_context * seq


@dataclass(frozen=True)
class BlockShape:
    """One block. `activations` are everything that backward needs, without the block's input."""

    name: str
    parameters: int
    input_elements: float  # per token
    flops: float  # of forward, per token
    flops_per_context: float = 0.0
    activations: tuple[Activation, ...] = ()

    def flops_at(self, seq: int) -> float:
        return self.flops + self.flops_per_context * seq


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    name: str
    hidden: int
    vocabulary: int  # 0: no token head
    blocks: tuple[BlockShape, ...]
    embedding_parameters: int
    head_parameters: int  # 0: none, or tied to the embedding
    tied: bool = False
    resident_parameters: int = 0  # norms and loose vectors outside the blocks
    sample_tokens: int = 0  # tokens of one sample where the data fix it (images); 0: the sequence

    @property
    def parameters(self) -> int:
        inside = sum(block.parameters for block in self.blocks)
        return inside + self.embedding_parameters + self.head_parameters + self.resident_parameters
