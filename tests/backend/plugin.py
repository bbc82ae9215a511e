"""For a pytest of its own: the accelerator of this process is the trial backend, late at random."""

from __future__ import annotations

from tests.backend import register

register().set_delays(1000, 100, 7)
