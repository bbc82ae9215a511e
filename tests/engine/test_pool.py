"""Host memory has one budget and a ledger of owners."""

from __future__ import annotations

import threading

import pytest
import torch

from lohan.engine.buffers import HostPool
from lohan.errors import BudgetError
from lohan.util.units import PAGE


def test_ledger_follows_allocate_reserve_and_free():
    pool = HostPool(64 * PAGE)
    first = pool.allocate("weights", 3 * PAGE)
    second = pool.allocate("weights", 1)  # whole pages, so that every buffer suits the store
    pool.reserve("activations", 100)
    assert pool.ledger() == {"weights": 4 * PAGE, "activations": 100}
    assert pool.used_bytes == 4 * PAGE + 100
    pool.unreserve("weights", len(first.bytes))
    pool.unreserve("activations", 100)
    assert pool.ledger() == {"weights": PAGE}
    pool.unreserve("weights", len(second.bytes))
    assert pool.ledger() == {} and pool.used_bytes == 0
    assert pool.peak_bytes == 4 * PAGE + 100


def test_over_budget_allocation_names_owner_and_changes_nothing():
    pool = HostPool(2**20)
    pool.allocate("weights", 2**19)
    wanted = (
        r"optimizer state needs 768\.00 KiB more, but 512\.00 KiB of the 1\.00 MiB budget are "
        r"taken; raise --host to at least 1\.25 MiB or lower --batch$"
    )
    for ask in (pool.allocate, pool.reserve):
        with pytest.raises(BudgetError, match=wanted):
            ask("optimizer state", 3 * 2**18)
    assert pool.ledger() == {"weights": 2**19} and pool.peak_bytes == 2**19
    pool.allocate("optimizer state", 2**19)  # the last byte of the budget is usable
    with pytest.raises(BudgetError):
        pool.reserve("anything", 1)


def test_buffers_are_aligned_and_are_one_memory():
    pool = HostPool(2**20)
    buffer = pool.allocate("weights", 3 * PAGE)
    assert buffer.bytes.ctypes.data % PAGE == 0
    buffer.tensor(torch.float32).fill_(1.0)
    assert buffer.part(PAGE, 2 * PAGE).tensor(torch.float32).eq(1.0).all()
    buffer.part(PAGE, 2 * PAGE).bytes[:] = 0
    assert int(buffer.tensor(torch.float32).sum()) == 2 * PAGE // 4


def test_concurrent_allocations_stay_within_the_budget():
    pool = HostPool(10 * PAGE)
    granted, refused = [], []

    def ask():
        for _ in range(50):
            try:
                granted.append(pool.allocate("lane", PAGE))
            except BudgetError:
                refused.append(1)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(granted) == 10 and len(refused) == 190
    assert pool.used_bytes == pool.peak_bytes == 10 * PAGE


def test_a_budget_beyond_the_machine_is_refused(monkeypatch):
    import lohan
    from lohan.engine import policies

    monkeypatch.setattr(policies, "total_memory_bytes", lambda: 8 * 2**30)
    monkeypatch.setattr(policies, "cgroup_memory_limit", lambda: None)
    assert lohan.Budget(host="8GiB", ssd=[]).host_bytes(2) == 4 * 2**30
    with pytest.raises(lohan.LohanError, match=r"host is 9\.00 GiB, this machine has 8\.00 GiB"):
        lohan.Budget(host="9GiB", ssd=[]).host_bytes()
