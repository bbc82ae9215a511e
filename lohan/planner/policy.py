"""The noun: what lives where, what overlaps with what, and what that asks of memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from lohan.planner.cost import Layout

FP16 = Layout(weight=2.0, state=12.0, gradient=2.0, held=2.0)  # state: master, m and v in fp32


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Bytes that a policy takes in one tier: per parameter of the model, per parameter of its
    largest block, and fixed."""

    per_parameter: float = 0.0
    per_block: float = 0.0
    fixed: float = 0.0

    def bytes(self, parameters: float, block: float) -> float:
        return self.per_parameter * parameters + self.per_block * block + self.fixed


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How one system trains. Tiers are device, host or ssd.

    `host` and `device` are what it takes in memory beside activations and logits; the rest are
    facts about its software, the same on every machine and for every model."""

    name: str
    about: str
    weights: str  # where compute weights wait for their block
    state: str  # where master weights, m and v wait for their update
    gradients: str = "host"  # where gradients wait for it
    inputs: str = "host"  # where block inputs wait for backward
    optimizer: str = "cpu"  # or gpu
    activations: str = "static"  # the activation policy
    grad_offload: str = "serial"
    free: bool = False  # both are the user's choice, these are the defaults
    prefetch: int = 1  # blocks whose weights travel beside compute; 0: compute waits for them
    ring: int = 3  # tensors of state on their way through host memory; 1: nothing overlaps
    model_parallel: bool = False  # several GPUs share each block, not the batch
    reduce_rate: float = 0.0  # gradients/s of a further GPU summed in host memory; 0: GPUs do it
    whole_recompute: bool = True  # recomputation runs to the block's end
    layout: Layout = FP16
    host: Demand = field(default_factory=Demand)
    device: Demand = field(default_factory=Demand)
    peers: float = 0.0  # device bytes per parameter of a block more, where there are several GPUs
    logit_bytes: float = 0.0  # per token and word of the vocabulary; 0: the head runs in slices
    compute_share: float = 1.0  # of the device's speed that its kernels reach
    op_s: float = 0.0  # software cost of moving one tensor to or from SSD
    io_rate: float = 0.0  # bytes/s that its file access reaches; 0: what the drives give
