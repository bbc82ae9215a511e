"""The use of the host memory that buffers and activations leave free.

The closed form and the fill of a plan agree, because both follow this module. To add a use of
host memory, add it to `Use`, to `_Pricer._traffic` of planner/activations.py, which prices it, and
to `GreedyFill`, which assigns memory to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Use(Enum):
    """A use of free host memory. The uses are ordered by value, and the first is filled first.

    A waiting gradient in memory saves a write and a read of SSD in every step. Weights precede
    optimizer state, because every cached byte of weights saves two reads per step.
    """

    GRADIENTS = "waiting gradients"
    WEIGHTS = "cached weights"
    STATE = "cached optimizer state"


@dataclass(frozen=True)
class FillOrder:
    """Variations in the order in which free host memory is used, which the planner compares."""

    spill_all: bool = False  # all held gradients go to SSD, even if memory has room for them
    whole_groups: bool = False  # weights and state of whole groups come before other weights


def share_out(free: float, wanted: Mapping[Use, float]) -> dict[Use, float]:
    """Return how many bytes each use gets if `free` bytes are divided in the order of `Use`.

    `wanted` are the bytes that each use could fill.
    """
    shares: dict[Use, float] = {}
    for use in Use:
        shares[use] = min(max(0.0, free), wanted.get(use, 0.0))
        free -= shares[use]
    return shares
