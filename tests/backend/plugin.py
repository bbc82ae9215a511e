"""A pytest plugin that makes the trial backend this process's accelerator, with random delays."""

from __future__ import annotations

from tests.backend import register

register().set_delays(1000, 100, 7)
