"""Checksums computed during the update detect damage."""

from __future__ import annotations

import pytest
import torch

import lohan
from lohan.errors import ChecksumError
from lohan.model.layout import RESIDENT
from lohan.store.admin import verify
from lohan.store.files import SLOTS
from lohan.store.store import Store
from tests.support.delayed_runs import PlanTuning, net_batches, small_net, tune_plans
from tests.support.models import attached, lr


@pytest.fixture
def taken(monkeypatch):
    """Record the keys of written chunks by the source of their checksum."""
    collected: dict[bool, set[str]] = {True: set(), False: set()}
    write = Store.write

    def noted(store, key, chunk, buffer, *, crc=None):
        if not key.startswith("g/"):
            collected[crc is not None].add(key)
        return write(store, key, chunk, buffer, crc=crc)

    monkeypatch.setattr(Store, "write", noted)
    return collected


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "dtype, optimizer",
    [
        (torch.float32, lohan.AdamW(lr=lr)),
        (torch.bfloat16, lohan.AdamW(lr=lr, ema=0.9)),
        (torch.bfloat16, lohan.AdamW(lr=lr, moments="int8")),
        (torch.float32, lohan.SGD(lr=lr, moments="bf16")),
    ],
)
def test_updates_pass_checksums_to_the_store(
    dtype, optimizer, overlap, taken, tmp_path, monkeypatch
):
    """Updates compute the checksums of everything but resident parameters.

    This holds also for a block without a gradient, and every chunk of the store has the
    checksum that it was written with.
    """
    tune_plans(monkeypatch, PlanTuning(cached=0.4, spilled=0.5))
    dataset = net_batches(4, kind="tied", dtype=dtype, still={2: 1})
    options = {"optimizer": optimizer, "clip": 0.01, "overlap": overlap}
    with attached(small_net("tied", dtype=dtype), tmp_path, **options) as session:
        for keys in taken.values():
            keys.clear()  # of the store's first generation
        for batch in dataset:
            session.model(**batch).backward()
        session.commit()
        groups = [g for g in session.executor.blocks.groups if g.key != RESIDENT]
        assert {f"{kind}/{g.key}" for g in groups for kind in "ws"} <= taken[True]
        assert taken[False] == {f"w/{RESIDENT}", f"s/{RESIDENT}"}
        assert verify(session.store) == []


def test_resident_parameters_may_be_changed_between_steps(tmp_path, monkeypatch):
    """User code changes them between steps, like the scale of CLIP."""
    tune_plans(monkeypatch, PlanTuning(cached=1.0))
    with attached(small_net(), tmp_path, clip=0.01) as session:
        for batch in net_batches(4):
            session.model(**batch).backward()
            clamped = session.weight("shift").clamp_(-0.05, 0.05)
            session.model.load_state_dict({"shift": clamped}, strict=False)
            assert torch.equal(session.weight("shift"), clamped)
        session.commit()
        assert verify(session.store) == []
        assert session.model.shift.abs().max() <= 0.05


def test_damaged_bytes_are_noticed(tmp_path):
    with attached(small_net(), tmp_path) as session:
        for batch in net_batches(2):
            session.model(**batch).backward()
        session.commit()
        store, key = session.store, "s/blocks.2"
        extent, slot = store.layout.find(key, 0), store.generation % 2
        dirs, text = store.dirs, store.checksum(key, 0)
    with (dirs[extent.directory] / SLOTS[slot]).open("r+b") as raw:
        raw.seek(extent.offset + 1000)
        byte = raw.read(1)[0]
        raw.seek(extent.offset + 1000)
        raw.write(bytes([byte ^ 4]))
    with Store.open(dirs) as again:
        (problem,) = verify(again)
        assert key in str(problem) and f"{text:#010x} expected" in str(problem)
    with (
        pytest.raises(ChecksumError, match="the drive returned other bytes"),
        attached(small_net(), tmp_path, resume=True) as session,
    ):
        for batch in net_batches(2):
            session.model(**batch).backward()
        session.flush()
