"""The systems that are compared, each in a few lines.

The numbers are of their software, found once from what the paper publishes of each on one machine;
docs/paper.md says from what. Rates of hardware are in the machine presets.
"""

from __future__ import annotations

import difflib
from dataclasses import replace

from lohan.errors import ConfigError
from lohan.planner.policy import Demand, Policy

GB = 1e9

# Weights of two blocks and gradients of two, in 16 bit.
_TWO_BLOCKS = Demand(per_block=8.0)
# Logits in 16 bit and in fp32, and a gradient of each.
_LOGITS = 12.0

_LOHAN = Policy(
    name="lohan",
    about="the paper as published: everything on SSD, updates while backward runs, activations by"
    " Algorithm 1",
    weights="ssd", state="ssd", inputs="host", activations="holistic", grad_offload="optimized",
    free=True, prefetch=2, reduce_rate=3.2e9, whole_recompute=False,
    # Host: four blocks of P32, m, v, P16 and G16 (16 each), G32 of four (4 each), weights of four.
    host=Demand(per_block=88.0, fixed=20 * GB), device=_TWO_BLOCKS, peers=2.0, op_s=0.005,
)  # fmt: skip

_ZERO_INFINITY = Policy(
    name="zero-infinity",
    about="states and gradients on SSD, block inputs in host memory, all else recomputed; updates"
    " after backward, one tensor at a time",
    weights="ssd", state="ssd", gradients="ssd", inputs="host", prefetch=0, ring=1,
    # Host: pinned 16-bit weights and gradients, rounded up, and the buffers of its swapper.
    host=Demand(per_parameter=5.0, fixed=70 * GB), device=_TWO_BLOCKS, logit_bytes=_LOGITS,
    compute_share=0.8, op_s=0.005,
)  # fmt: skip

_ZERO_OFFLOAD = Policy(
    name="zero-offload",
    about="states in host memory, block inputs on the device, all else recomputed; updates after"
    " backward",
    weights="host", state="host", inputs="device",
    # Host: P32, m, v and G32 (16), P16 and G16 (4), pinned buffers rounded up.
    host=Demand(per_parameter=21.6), device=_TWO_BLOCKS, logit_bytes=_LOGITS, compute_share=0.8,
)  # fmt: skip

_COLOSSAL_AI = Policy(
    name="colossal-ai",
    about="weights in chunks in host memory, optimizer state in one file on SSD, read and written"
    " by one thread after backward",
    weights="host", state="ssd", inputs="device", ring=1,
    host=Demand(per_parameter=8.0, fixed=10 * GB),
    # Two chunks of weights, gradients and their fp32 copies with state: 16 each, and padding.
    device=Demand(per_block=34.0), logit_bytes=6.0, io_rate=4.9 * GB,
)  # fmt: skip

_FLASHNEURON = Policy(
    name="flashneuron",
    about="states on the device, all activations on SSD",
    weights="device", state="device", gradients="device", inputs="ssd", optimizer="gpu",
    activations="g10", device=Demand(per_parameter=16.0), whole_recompute=False,
)  # fmt: skip

_G10 = Policy(
    name="g10",
    about="states and all activations on SSD by GPUDirect, updates on the GPU after backward",
    weights="ssd", state="ssd", inputs="ssd", optimizer="gpu", activations="g10", prefetch=2,
    ring=8, whole_recompute=False, device=_TWO_BLOCKS,
)  # fmt: skip

_MEGATRON = Policy(
    name="megatron",
    about="everything in the memories of several GPUs, which share each block",
    weights="device", state="device", gradients="device", inputs="device", optimizer="gpu",
    model_parallel=True, device=Demand(per_parameter=16.0), compute_share=0.8,
)  # fmt: skip

_FAST_DIT = Policy(
    name="fast-dit",
    about="everything on the device, block inputs kept, all else recomputed",
    weights="device", state="device", gradients="device", inputs="device", optimizer="gpu",
    # fp32 weights, gradients, m and v, and 16-bit weights to compute with; the CUDA context.
    device=Demand(per_parameter=18.0, fixed=0.7 * GB),
)  # fmt: skip

_ALL = (
    _LOHAN, _ZERO_INFINITY, _ZERO_OFFLOAD, _COLOSSAL_AI, _FLASHNEURON, _G10, _MEGATRON, _FAST_DIT,
)  # fmt: skip
POLICIES = {policy.name: policy for policy in _ALL}
AUTO = "auto"  # LoHan as it is built here; compare.py


def policy_names() -> list[str]:
    return [AUTO, *POLICIES]


def policy(name: str) -> Policy:
    if name in POLICIES:
        return POLICIES[name]
    near = difflib.get_close_matches(name, policy_names(), n=1)
    hint = f"did you mean {near[0]}?" if near else f"they are {', '.join(policy_names())}"
    raise ConfigError(f"{name!r} is not a policy; {hint}")


def with_choices(
    chosen: Policy, *, grad_offload: str | None = None, activations: str | None = None
) -> Policy:
    """The policy with the user's own choices, where it leaves them free."""
    wishes = {
        "grad_offload": grad_offload or chosen.grad_offload,
        "activations": activations or chosen.activations,
    }
    for key, value in wishes.items():
        if not chosen.free and value != getattr(chosen, key):
            raise ConfigError(
                f"{chosen.name} has {key} {getattr(chosen, key)}, not {value}; leave --"
                f"{key.replace('_', '-')} out or use --policy lohan"
            )
    return replace(chosen, grad_offload=wishes["grad_offload"], activations=wishes["activations"])
