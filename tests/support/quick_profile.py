"""An effort with which a profile takes a second."""

from __future__ import annotations

from lohan.engine.probes import Effort, Sizes
from lohan.util.units import MiB

SIZES = Sizes(hidden=64, inner=160, heads=4, vocabulary=96, copies=2, chunk_params=4096)
TINY = Effort(
    sizes=SIZES,
    tokens=(4, 16),
    head_tokens=8,
    shared_tokens=4,
    shared_seconds=0.001,
    shared_bytes=MiB,
    seconds=0.001,
    drive_seconds=0.001,
    drive_bytes=MiB,
    chunk_bytes=MiB // 4,
)
