"""Settings that every test shares."""

from __future__ import annotations

import os

# Models here are so small that a second compute thread only waits for the first; with other work
# on the machine that wait dominates. Children inherit it. It must be set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
