"""The peak memory of a run, in the pool and in torch, equals its plan."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import lohan
from lohan.capture.saved_call import SavedCall
from lohan.config import load_config
from lohan.device.ranks import join
from lohan.engine.buffers import HostBuffer, HostPool
from lohan.engine.session import Session
from lohan.planner.memory import INPUTS, KEPT, STREAMS, WAITING, WORK
from lohan.schedule.actions import Action
from lohan.train.logs import Meter
from lohan.train.run_folder import RunFolder
from lohan.train.trainer import begin, one_step
from lohan.util.display import Display
from lohan.util.units import parse_bytes
from tests.support.delayed_runs import delay_actions
from tests.support.model_folders import save_tokenizer
from tests.support.models import MEMORY_TOLERANCE, save_llama

MiB = 2**20
SHAPES = {
    "many blocks": {"hidden": 128, "layers": 5, "vocabulary": 512, "seq": 160},
    "wide head": {"hidden": 128, "layers": 2, "vocabulary": 4096, "seq": 128},
}


class LiveMemory(TorchDispatchMode):
    """A count of the bytes of all storages outside the pool that are created while it is active.

    It also records the owners of the storages at the peak. Use it around whole steps.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._live: dict[int, int] = {}
        self._calls: weakref.WeakSet[SavedCall] = weakref.WeakSet()
        self.total = self.peak = 0
        self.owners: dict[str, int] = {}  # at the peak
        self.most: dict[str, int] = {}  # of each owner, whenever that was

    def __enter__(self) -> LiveMemory:
        calls, result = self._calls, SavedCall.__init__
        self._made = result

        def remembered(call: SavedCall, *args: Any, **kwargs: Any) -> None:
            result(call, *args, **kwargs)
            calls.add(call)

        SavedCall.__init__ = remembered  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        SavedCall.__init__ = self._made  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        return out

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or storage.device.type != "cpu" or not storage.resizable():
            return
        size = storage.nbytes()
        self._live[key] = size
        weakref.finalize(storage, self._dead, key, size)
        self.total += size
        if self.total > 1.002 * self.peak:
            self.peak, self.owners = self.total, self._by_owner()
            for owner, held in self.owners.items():
                self.most[owner] = max(held, self.most.get(owner, 0))

    def _dead(self, key: int, size: int) -> None:
        if self._live.pop(key, None) is not None:
            self.total -= size

    def _by_owner(self) -> dict[str, int]:
        work = self._session.executor.runner
        calls = list(self._calls)
        kept = [kept for call in calls for kept in call.saved_ops if kept is not None]
        held = self._session.executor.collector.sink._grads
        gradients = [*held.values(), *work.pending.on_host.values()]
        collected, seen = {}, set[int]()
        for owner, tensors in (
            (INPUTS, (t for call in calls for t in call.tensors)),
            (KEPT, (t for one in kept for t in one.tensors)),
            (WAITING, (t for group in gradients for t in group.values())),
        ):
            collected[owner] = sum(self._sizes(tensors, seen))
        return {**collected, "work": self.total - sum(collected.values())}

    def _sizes(self, tensors: Iterable[torch.Tensor], seen: set[int]) -> Iterator[int]:
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key not in seen:
                seen.add(key)
                yield self._live.get(key, 0)


class SeenPool(HostPool):
    """A pool that records its allocations by owner; memory that is only reserved is torch's."""

    last: dict[str, int]

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.allocated: dict[str, int] = {}
        SeenPool.last = self.allocated

    def allocate(self, owner: str, count: int, *args: object, **kwargs: object) -> HostBuffer:
        result = super().allocate(owner, count, *args, **kwargs)
        self.allocated[owner] = self.allocated.get(owner, 0) + len(result.bytes)
        return result


def slow_writes(action: Action) -> None:
    """Delay writes, so that activations on their way to SSD stay in memory for long."""
    if action.kind == "O":
        time.sleep(0.4)


def held(folder: Path, ssd: Path, seq: int, *, slow: bool, **options):
    """Return the plan, the bytes of the pool by owner, and torch's memory, for a few steps."""
    model = lohan.load(folder).train()
    ids = torch.randint(0, 200, (4, seq), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0  # or the model would do without a mask, where the plan cannot know
    ssd.mkdir()
    budget = lohan.Budget(host=options.pop("host", "64MiB"), ssd=[ssd])
    with lohan.attach(
        model,
        optimizer=lohan.AdamW(lr=1e-3),
        budget=budget,
        batch={"input_ids": ids, "attention_mask": mask},
        **options,
    ) as session:
        if slow:
            delay_actions(session, slow_writes)
        live = LiveMemory(session)
        for step in range(3):
            if step == 1:  # the first makes what stays: resident gradients, recipes
                live.__enter__()
            model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
        live.__exit__(None, None, None)
        session.flush()
        return session.plan, dict(SeenPool.last), live


SLOW = pytest.mark.slow
CASES = [
    ("many blocks", {"activations": "recompute"}),
    pytest.param("many blocks", {"activations": "recompute", "micro_batch": 1}, marks=SLOW),
    ("many blocks", {"activations": "recompute", "clip": 1.0}),
    pytest.param(
        "many blocks", {"activations": "all", "micro_batch": 2, "host": "160MiB"}, marks=SLOW
    ),
    ("many blocks", {"activations": "all", "host": "40MiB"}),
    ("wide head", {"activations": "all", "micro_batch": 2}),
]


@pytest.mark.parametrize(("shape", "options"), CASES)
def test_the_peak_is_the_planned_one(shape, options, tmp_path, monkeypatch):
    monkeypatch.setattr("lohan.engine.executor.HostPool", SeenPool)
    sizes = dict(SHAPES[shape])
    seq = sizes.pop("seq")
    folder = save_llama(tmp_path / "model", **sizes)
    tight = options.get("host") == "40MiB"
    plan, pool, live = held(folder, tmp_path / "ssd", seq, slow=tight, **options)
    assert bool(plan.spilled_sites) is tight and bool(plan.kept) is (
        options["activations"] == "all"
    )
    planned = {entry.owner: entry.bytes for entry in plan.ledger if entry.tier == "host"}

    # The pool hands out what the ledger says, owner by owner.
    for owner, size in pool.items():
        assert size == pytest.approx(planned.get(owner, 0), rel=MEMORY_TOLERANCE, abs=2**15), owner

    # What is kept is the ledger's, and what torch holds for work: all of it together at the peak.
    by_torch = (INPUTS, KEPT, WAITING, STREAMS, WORK)
    if plan.kept and not plan.spilled_sites:
        for owner in (INPUTS, KEPT):
            assert live.owners[owner] == pytest.approx(planned[owner], rel=MEMORY_TOLERANCE), owner
    predicted = sum(planned.get(owner, 0) for owner in by_torch)
    assert live.peak == pytest.approx(predicted, rel=MEMORY_TOLERANCE)
    total = sum(pool.values()) + live.peak
    assert total == pytest.approx(plan.tier_bytes("host"), rel=MEMORY_TOLERANCE)
    assert set(pool) | set(by_torch) >= set(planned) - {"resident parameters"}


@pytest.mark.parametrize("host", ["6MiB", "12MiB"])
def test_preferences_stay_within_the_budget(host, tmp_path, monkeypatch):
    """Preference training and the reference pass stay within the budget.

    Full logits never exist in either of them.
    """
    monkeypatch.setattr("lohan.engine.executor.HostPool", SeenPool)
    folder = save_tokenizer(save_llama(tmp_path / "model", hidden=64, layers=3, vocabulary=4096))
    rows = [
        {"prompt": f"ask {i}: ", "chosen": "yes " * 20, "rejected": "no " * 20} for i in range(8)
    ]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    overrides = {
        "model": str(folder),
        "data": [str(tmp_path / "d.jsonl")],
        "out": str(tmp_path / "run"),
        "task": "preference",
        "budget.host": host,
        "train.steps": 3,
        "train.batch": 4,
        "train.seq": 128,
        "train.clip": 0.0,
    }
    config, display = load_config(None, overrides=overrides), Display()
    group = join({})
    session, inputs = begin(RunFolder(config.out), config, display, group)
    seen: dict[str, LiveMemory] = {}
    with session:
        budget = session.plan.tier_bytes("host")
        assert budget <= parse_bytes(host)
        meter, longest = Meter(session, session.executor.trace), inputs.train_examples.longest
        with LiveMemory(session) as seen["reference"]:
            inputs.task.before_training(session, inputs.train_examples, config, display.advance)
        for step in range(3):
            with LiveMemory(session) as seen[f"step {step + 1}"]:
                one_step(session, config, inputs, meter)
        session.flush()
        pool = sum(SeenPool.last.values())
    logits = 8 * longest * 4096 * 4
    for what, live in seen.items():
        assert pool + live.peak <= budget * (1 + MEMORY_TOLERANCE), what
        assert live.peak < logits, what
