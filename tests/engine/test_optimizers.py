"""Other optimizers and moments with fewer bits are correct and reproducible."""

from __future__ import annotations

import copy
import itertools
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import lohan
from lohan import _core
from lohan.config import UPDATE_MODES
from lohan.errors import ConfigError, StoreError
from lohan.model.state import STATE_FORMATS, state_format_of
from lohan.optim import MOMENTS, OPTIMIZERS, Optimizer
from lohan.tools.reference import in_memory
from tests.support.delayed_runs import (
    PlanTuning,
    RunResult,
    memory_engine,
    net_batches,
    small_net,
    train_with_delays,
    tune_plans,
)
from tests.support.models import (
    assert_close,
    attached,
    batches,
    decay_groups,
    lohan_run,
    loss_of,
    lr,
    master_weights,
    small_model,
)

SHARED: dict[str, Any] = {"lr": lr, "weight_decay": 0.1}
OWN: dict[str, dict[str, Any]] = {
    "adamw": {"betas": (0.9, 0.95)},
    "sgd": {"momentum": 0.8},
    "lion": {"betas": (0.9, 0.97)},
}
KINDS = list(itertools.product(OPTIMIZERS, MOMENTS))
QUICK = [("adamw", "int8"), ("sgd", "fp32"), ("lion", "bf16")]
LONG = [pytest.param(*kind, marks=pytest.mark.slow) for kind in KINDS[1:] if kind not in QUICK]
kinds = pytest.mark.parametrize(("name", "moments"), QUICK + LONG)


def optimizer_with(name: str, moments: str = "fp32", **changes: Any) -> Optimizer:
    return OPTIMIZERS[name](**{**SHARED, **OWN[name], "moments": moments, **changes})


def plain_run(model, rows, optimizer: Optimizer, *, clip: float = 0.0):
    """Train in memory, in fp32, with torch's optimizer or the plain one."""
    model = copy.deepcopy(model)
    stepping = in_memory(optimizer, decay_groups(model, optimizer.weight_decay))
    losses = []
    for step, batch in enumerate(rows):
        loss = loss_of(model, batch)
        loss.backward()
        losses.append(loss.item())
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for group in stepping.param_groups:
            group["lr"] = optimizer.lr_at(step)
        stepping.step()
        stepping.zero_grad()
    return losses, {name: p.detach() for name, p in model.named_parameters()}


# -- right -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nesterov", "clip"), [(False, 0.0), (True, 0.1)])
def test_sgd_equals_torch(nesterov, clip, tmp_path):
    model, rows = small_model("llama"), batches(10, batch=3, seq=16)
    optimizer = optimizer_with("sgd", lr=lambda step: 0.02 * lr(step) / lr(0), nesterov=nesterov)
    expected_losses, expected = plain_run(model, rows, optimizer, clip=clip)
    losses, weights = lohan_run(model, rows, tmp_path, optimizer=optimizer, clip=clip)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_close(weights, expected, 1e-5)
    assert max(float((expected[n] - p).abs().max()) for n, p in start_of("llama").items()) > 1e-3


def start_of(kind: str) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in small_model(kind).named_parameters()}


def test_lion_equals_the_plain_form(tmp_path):
    """Lion equals its plain form, except for a few weights.

    A step goes one way or the other; where a momentum is nearly zero, rounding decides which.
    """
    model, rows = small_model("gpt2"), batches(10, batch=3, seq=16)
    optimizer = optimizer_with("lion")
    expected_losses, expected = plain_run(model, rows, optimizer)
    losses, weights = lohan_run(model, rows, tmp_path, optimizer=optimizer)
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    off = sum(int(((weights[n] - p).abs() > 1e-6).sum()) for n, p in expected.items())
    assert off < 2e-3 * sum(p.numel() for p in expected.values())
    way = max(float((expected[n] - p).abs().max()) for n, p in start_of("gpt2").items())
    assert way > sum(lr(step) for step in range(10)) * 0.9


@pytest.mark.parametrize(
    "name", ["adamw", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sgd", "lion"))]
)
def test_rounded_moments_learn_as_well(name, tmp_path):
    """Some steps over the same few batches: the loss falls as with fp32 moments."""
    rows = batches(4, batch=4, seq=16) * 5
    rate = {"adamw": 2e-3, "sgd": 0.1, "lion": 5e-4}[name]
    ends, way = {}, 0.0
    for moments in MOMENTS:
        optimizer = optimizer_with(name, moments, lr=rate)
        losses, _ = lohan_run(
            small_model("llama"),
            rows,
            tmp_path / moments,
            optimizer=optimizer,
            engine=memory_engine(),
        )
        ends[moments] = sum(losses[-4:]) / 4
        way = way or losses[0] - ends[moments]
    assert way > 0.3
    assert ends["bf16"] == pytest.approx(ends["fp32"], abs=0.01 * way)
    assert ends["int8"] == pytest.approx(ends["fp32"], abs=0.03 * way)
    assert len(set(ends.values())) == 3


# -- the same bits ---------------------------------------------------------------------------------


def run(
    name,
    moments,
    place,
    monkeypatch,
    *,
    mode="serial",
    tuning=None,
    clip=0.0,
    seed=None,
    dtype=torch.float32,
    kind="several",
    steps=4,
    **options,
):
    tune_plans(monkeypatch, tuning or PlanTuning())
    return train_with_delays(
        small_net(kind, dtype=dtype),
        net_batches(steps, kind=kind, dtype=dtype),
        place,
        seed=seed,
        clip=clip,
        optimizer=optimizer_with(name, moments),
        update_mode=mode,
        **options,
    )


def check(one: RunResult, other: RunResult) -> None:
    """Compare two results; without clipping, norms may be unknown."""
    replace(one, norms=[]).check(replace(other, norms=[]))


@kinds
def test_gradient_modes_and_memory_change_nothing(name, moments, tmp_path, monkeypatch):
    clip = 0.3 if moments == "bf16" else 0.0
    plain = run(name, moments, tmp_path / "plain", monkeypatch, overlap=False, clip=clip)
    for number, mode in enumerate(UPDATE_MODES):
        tuning = PlanTuning(window=2, ring=1 + number % 3, cached=0.3 * (number % 2), spilled=0.5)
        place, seed = tmp_path / mode, None if number % 2 else number
        more = {"mode": mode, "tuning": tuning, "clip": clip, "seed": seed}
        check(plain, run(name, moments, place, monkeypatch, **more))


@pytest.mark.parametrize(
    ("name", "moments", "dtype"),
    [
        ("adamw", "int8", torch.bfloat16),
        ("lion", "bf16", torch.bfloat16),
        ("sgd", "int8", torch.bfloat16),
        ("adamw", "bf16", torch.float16),
        ("lion", "int8", torch.float16),
    ],
)
def test_16_bit_weights(name, moments, dtype, tmp_path, monkeypatch):
    """Loss scaling is used if the type needs it."""
    more = {"dtype": dtype, "kind": "llama"}
    plain = run(name, moments, tmp_path / "plain", monkeypatch, overlap=False, **more)
    other = run(name, moments, tmp_path / "other", monkeypatch, mode="balanced", seed=1, **more)
    check(plain, other)
    assert plain.losses[-1] != plain.losses[0]


@pytest.mark.parametrize(("name", "moments"), [("adamw", "int8"), ("lion", "bf16")])
def test_threads_instructions_and_chunks_change_nothing(name, moments, tmp_path, monkeypatch):
    """Rounding by chance goes by the tensor, the element and the step, by nothing else."""
    rows, collected = batches(3, batch=2, seq=12), []
    isa, threads = _core.isa(), _core.threads()
    sizes = set()
    try:
        for number in range(3):
            _core.set_isa(_core.supported_isas()[-1 if number else 0])
            _core.set_threads(1 + number)
            if number == 2:
                tune_plans(monkeypatch, PlanTuning())
            model, place = small_model("llama"), tmp_path / str(number)
            with attached(model, place, optimizer=optimizer_with(name, moments)) as session:
                sizes.add(session.plan.chunk_params)
                for row in rows:
                    loss_of(model, row).backward()
                collected.append(master_weights(session))
    finally:
        _core.set_isa(isa)
        _core.set_threads(threads)
    assert len(sizes) == 2
    for other in collected[1:]:
        assert [n for n in other if not torch.equal(other[n], collected[0][n])] == []


@kinds
def test_resume_goes_on_with_the_same_bits(name, moments, tmp_path):
    rows, optimizer = batches(4, batch=2, seq=12), optimizer_with(name, moments)
    _, expected = lohan_run(small_model("llama"), rows, tmp_path / "whole", optimizer=optimizer)
    for resume, part in ((False, rows[:2]), (True, rows[2:])):
        model = small_model("llama")
        with attached(model, tmp_path / "cut", optimizer=optimizer, resume=resume) as session:
            for row in part:
                loss_of(model, row).backward()
            weights = master_weights(session)
    assert [n for n in expected if not torch.equal(weights[n], expected[n])] == []


def test_a_tensor_without_a_gradient_stays_as_it_is(tmp_path, monkeypatch):
    """Its state too: it misses the update, and its next one counts as the one it missed."""
    tune_plans(monkeypatch, PlanTuning())
    rows = net_batches(4, kind="plain", still={1: 2})
    results = [
        train_with_delays(
            small_net("plain"),
            rows,
            tmp_path / mode,
            optimizer=optimizer_with("adamw", "int8"),
            update_mode=mode,
        )
        for mode in ("serial", "balanced")
    ]
    check(*results)


# -- the store -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", STATE_FORMATS)
@pytest.mark.parametrize(("name", "moments"), KINDS)
def test_state_arrays_are_aligned_and_have_the_stated_size(name, moments, mode):
    """Arrays are aligned for the kernels, fill whole pages, and have the stated size."""
    kept = state_format_of(mode, optimizer_with(name, moments).kind)
    each = {"fp32": 4, "bf16": 2, "int8": 1 + 4 / 32}[moments]
    other_bytes = {"fp32": 0, "bf16": 2, "fp16": 4}[mode]
    assert kept.state_bytes == each * len(OPTIMIZERS[name].moment_specs) + other_bytes
    for count in (2048, 6144, 2**17, 2**17 + 2048):
        at = 0
        for array in kept.arrays:
            assert at % 64 == 0
            at += array.size(count)
        assert at == count * kept.state_bytes <= kept.state_size(count) < at + 4096
        assert kept.state_size(count) % 4096 == 0
    total = kept.state_total(5 * 2048, 4096)
    assert total == 2 * kept.state_size(4096) + kept.state_size(2048)


def test_default_optimizer_has_the_documented_arrays():
    """The arrays of AdamW define the format of the state in a store."""
    names = {mode: [array.name for array in kept.arrays] for mode, kept in STATE_FORMATS.items()}
    assert names == {
        "fp32": ["m", "v"],
        "bf16": ["m", "v", "remainder"],
        "fp16": ["master", "m", "v"],
    }
    assert {kept.state_bytes for kept in STATE_FORMATS.values()} == {8, 10, 12}


def test_resume_refuses_another_optimizer_or_moment_format(tmp_path):
    rows = batches(1, batch=2, seq=12)
    lohan_run(small_model("llama"), rows, tmp_path, optimizer=optimizer_with("lion", "int8"))
    for other in (
        optimizer_with("lion"),
        optimizer_with("adamw", "int8"),
        optimizer_with("sgd", "int8"),
    ):
        message = re.escape(
            f"was made for lion with int8 moments, this run is for {other.kind}; resume it with "
            "optimizer=lohan.Lion(moments='int8')"
        )
        with pytest.raises(StoreError, match=message):
            attached(small_model("llama"), tmp_path, optimizer=other, resume=True)
    changed = replace(optimizer_with("lion", "int8"), betas=(0.8, 0.9))  # numbers may change
    attached(small_model("llama"), tmp_path, optimizer=changed, resume=True).close()


def test_plan_counts_every_byte_of_state(tmp_path):
    """The ledger of drives and memory equals the bytes of store and pool."""
    for name, moments in (KINDS[0], *QUICK):
        model = small_model("llama", dtype=torch.bfloat16)
        with attached(
            model,
            tmp_path / f"{name}-{moments}",
            optimizer=optimizer_with(name, moments),
            engine=memory_engine(),
        ) as session:
            stored = sum(sum(r.chunks) for r in session.store.layout.regions if not r.scratch)
            entry = next(e for e in session.plan.ledger if e.owner == "weights and state x2")
            assert entry.bytes == 2 * stored
            planned = {e.owner: e.bytes for e in session.plan.ledger if e.tier == "host"}
            held = session.executor.runner.host_cache._ring._buffers
            assert sum(len(buffer.bytes) for buffer in held) == sum(
                planned.get(owner, 0)
                for owner in ("optimizer state ring", "cached optimizer state")
            )


# -- what is asked for -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lohan.SGD(momentum=1.0), r"SGD momentum is 1.0; it must lie in \[0, 1\)"),
        (lambda: lohan.Lion(betas=(0.9, 1.0)), r"Lion betas\[1\] is 1.0; it must lie in"),
        (lambda: lohan.AdamW(moments="fp8"), "AdamW moments is 'fp8'; it must be one of fp32, bf"),
        (lambda: lohan.Lion(weight_decay=-1.0), "Lion weight_decay is -1.0; it must be >= 0"),
        (lambda: lohan.Lion(lr="x"), "Lion lr is 'x'; it must be >= 0, or a function of the step"),
        (lambda: lohan.AdamW(lr="1e-4"), "AdamW lr is '1e-4'; it must be >= 0"),
        (lambda: lohan.AdamW(lr=None), "AdamW lr is None; it must be >= 0"),
        (lambda: lohan.SGD(lr=float("nan")), "SGD lr is nan; it must be >= 0"),
        (lambda: lohan.SGD(weight_decay="a"), "SGD weight_decay is 'a'; it must be >= 0"),
        (lambda: lohan.SGD(ema=[0.9]), r"SGD ema is \[0.9\]; it must lie in \[0, 1\)"),
        (lambda: lohan.SGD(momentum=True), r"SGD momentum is True; it must lie in \[0, 1\)"),
        (lambda: lohan.SGD(nesterov="no"), "SGD nesterov is 'no'; it must be True or False"),
        (lambda: lohan.AdamW(eps=None), "AdamW eps is None; it must be positive"),
        (lambda: lohan.AdamW(betas=0.9), "AdamW betas is 0.9; it must be two numbers"),
        (lambda: lohan.Lion(betas=(0.9,)), r"Lion betas is \(0.9,\); it must be two numbers"),
        (lambda: lohan.Lion(betas=("a", 1)), r"Lion betas\[0\] is 'a'; it must lie in"),
        (lambda: lohan.AdamW(moments=8), "AdamW moments is 8; it must be one of fp32"),
    ],
)
def test_refuses_settings_out_of_range(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_numbers_of_other_kinds_and_functions():
    """Other kinds of numbers are accepted, and a function is called for every step."""
    assert lohan.AdamW(lr=torch.tensor(0.5)).lr_at(0) == 0.5
    assert lohan.Lion(lr=lambda step: np.float32(step)).lr_at(3) == 3.0
    with pytest.raises(ConfigError, match=r"Lion lr\(2\) is 'fast'; it must be a number"):
        lohan.Lion(lr=lambda step: "fast").lr_at(2)
