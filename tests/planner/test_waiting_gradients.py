"""Gradients that wait in host memory for their update are in the ledger."""

from __future__ import annotations

import pytest

from lohan.device.emulated import EmulatedDevice
from lohan.model.state import FLOAT
from lohan.util.units import MiB
from tests.support.delayed_runs import net_batches, small_net
from tests.support.models import attached


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_gradients_beside_a_device_are_in_the_ledger(clip, tmp_path):
    """With clipping, the gradients of all groups are counted, otherwise those of a few."""
    options = {"device": EmulatedDevice(16 * MiB), "clip": clip, "batch": net_batches(1)[0]}
    with attached(small_net(), tmp_path, **options) as session:
        rows = {e.owner: e.bytes for e in session.plan.ledger if e.tier == "host"}
        sizes = [g.numel for g in session.executor.blocks.trained if not g.resident]
    whole = FLOAT * sum(sizes)
    assert rows["waiting gradients"] == whole if clip else 0 < rows["waiting gradients"] <= whole
