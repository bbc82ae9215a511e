"""Comparison of numbers, plans and schedules with recorded ones."""

import os

# As the tests run, recorded or compared: before torch is imported (tests/conftest.py).
os.environ.setdefault("OMP_NUM_THREADS", "1")
