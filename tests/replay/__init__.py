"""The guard: numbers, plans and schedules of today against recorded ones."""

import os

# As the tests run, recorded or compared: before torch is imported (tests/conftest.py).
os.environ.setdefault("OMP_NUM_THREADS", "1")
