"""SGD and Lion, and moments in 16 and 8 bits: against torch and numpy, and the same bits always."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from lohan import _core
from tests.support.update_kernels import (
    CHECKSUM_ELEMENTS,
    HYPERPARAMETERS,
    MASTERS,
    KernelState,
    ReferenceUpdate,
    aligned,
    bf16_bits,
    from_bf16,
    from_int8,
    rules_and_moments,
    to_bf16,
    to_int8,
)

pytestmark = pytest.mark.usefixtures("native_settings")


# -- checksums, taken in the pass of the update ----------------------------------------------------


@pytest.mark.parametrize("master", MASTERS)
@rules_and_moments
def test_checksums_are_those_of_what_was_written(rule: str, moments: str, master: str) -> None:
    """Around the sizes that a thread updates and checksums at once, and no bit changes by it."""
    for isa, threads in itertools.product(_core.supported_isas(), (1, 3)):
        _core.set_isa(isa)
        _core.set_threads(threads)
        for count in (
            1,
            31,
            33,
            CHECKSUM_ELEMENTS,
            CHECKSUM_ELEMENTS + 1,
            2 * CHECKSUM_ELEMENTS,
            7 * CHECKSUM_ELEMENTS + 77,
        ):
            state, plain = (KernelState(rule, moments, count, master) for _ in range(2))
            sums = state.step(1, checksums=True)
            assert plain.step(1) is None and plain.bits() == state.bits()
            masters = {"fp32": [state.p], "bf16": [state.w, state.r], "fp16": [state.w, state.p]}
            written = [*masters[master], *state.m, *state.scales]
            assert sums == [_core.crc32c(a) for a in written], (isa, threads, count)


# -- the arithmetic --------------------------------------------------------------------------------


@rules_and_moments
@pytest.mark.parametrize("isa", _core.supported_isas())
def test_equals_numpy_bit_for_bit(rule: str, moments: str, isa: str) -> None:
    _core.set_isa(isa)
    state = KernelState(rule, moments, 10_007)
    reference = ReferenceUpdate(rule, moments, state.p)
    for t in range(1, 6):
        state.step(t)
        reference.step(state.gradient(t), t, seed=77 + t)
        for stored, wanted in zip(state.m, reference.stored, strict=True):
            assert stored.tobytes() == wanted.tobytes(), t
        for stored, wanted in zip(state.scales, reference.scales, strict=False):
            assert stored.tobytes() == wanted.tobytes(), t
        assert state.p.tobytes() == reference.p.tobytes(), t


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("master", MASTERS)
def test_sgd_equals_torch(master: str, nesterov: bool) -> None:
    state = KernelState("sgd", "fp32", 5_003, master)
    p = torch.nn.Parameter(torch.from_numpy(state.p.copy()))
    optimizer = torch.optim.SGD([p], **HYPERPARAMETERS["sgd"] | {"nesterov": nesterov})
    for t in range(1, 21):
        p.grad = torch.from_numpy(state.gradient(t)) * 0.5
        optimizer.step()
        state.step(t, nesterov=nesterov, grad_scale=0.5)
    master_now = state.p
    if master == "bf16":
        _core.join_bf16(state.w, state.r, master_now)
    np.testing.assert_allclose(master_now, p.detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize("rule", ["sgd", "lion"])
def test_compute_weights_are_the_rounded_master(rule: str, master: str) -> None:
    wide, state = KernelState(rule, "fp32", 5_001), KernelState(rule, "fp32", 5_001, master)
    for t in (1, 2, 3):
        wide.step(t)
        state.step(t)
    if master == "fp16":
        assert np.array_equal(state.w.view(np.float16), state.p.astype(np.float16))
    if master == "bf16":
        _core.join_bf16(state.w, state.r, state.p)
    assert state.p.tobytes() == wide.p.tobytes()


# -- the same bits, whatever runs meanwhile --------------------------------------------------------


@rules_and_moments
@pytest.mark.parametrize("master", MASTERS)
def test_instruction_sets_give_the_same_bits(rule: str, moments: str, master: str) -> None:
    results = []
    for isa in _core.supported_isas():
        _core.set_isa(isa)
        state = KernelState(rule, moments, 70_003, master)
        for t in (1, 2, 3):
            state.step(t, grad_scale=0.7)
        results.append(state.bits())
    assert all(result == results[0] for result in results)


@rules_and_moments
def test_threads_and_segments_give_the_same_bits(rule: str, moments: str) -> None:
    count = 100_001
    whole = KernelState(rule, moments, count)
    whole.step(1)
    for threads in (1, 3):
        _core.set_threads(threads)
        state = KernelState(rule, moments, count)
        state.step(1)
        assert state.bits() == whole.bits()
    pieces = KernelState(rule, moments, count)
    cuts = [0, 64, 32_768, 32_832, 65_536, count // 64 * 64, count]
    for a, b in itertools.pairwise(cuts):
        pieces.step(1, a, b)
    assert pieces.bits() == whole.bits()


@rules_and_moments
def test_every_size_and_tail(rule: str, moments: str) -> None:
    """Nothing behind the end moves, and what is in whole blocks does not depend on it."""
    for isa in _core.supported_isas():
        _core.set_isa(isa)
        whole = KernelState(rule, moments, 128)
        before = whole.bits()
        whole.step(1)
        for count in range(0, 101, 3):
            state = KernelState(rule, moments, 128)
            state.step(1, 0, count)
            sure = count // 32 * 32
            for got, expected, untouched in zip(state.bits(), whole.bits(), before, strict=True):
                each = len(got) / 128  # bytes per parameter
                assert got[: int(sure * each)] == expected[: int(sure * each)]
                end = int((-(-count // 32) * 32 if each < 1 else count) * each)
                assert got[end:] == untouched[end:]


# -- rounding --------------------------------------------------------------------------------------


def test_stochastic_rounding_is_unbiased() -> None:
    """Stochastic rounding is right on average.

    A second moment that should lose a thousandth in every step does lose it; rounded to the
    nearest bf16 or code it would never change.
    """
    count, steps = 4096, 200
    for moments, tolerance in (("bf16", 0.01), ("int8", 0.02)):
        kind = {"bf16": "u2", "int8": "u1"}[moments]
        p, m, v = aligned(count, "f4"), aligned(count, "u2" if moments == "bf16" else "i1"), None
        v = aligned(count, kind)
        scales = [aligned(count // 32, "f4") for _ in range(2)] if moments == "int8" else []
        g = np.ones(count, np.float32)
        hyper = HYPERPARAMETERS["adamw"] | {"beta2": 0.999, "lr": 0.0}
        _core.adamw_fp32(p, m, v, g, step=1, seed=0, scales=scales, **hyper)
        first = from_bf16(v) if moments == "bf16" else from_int8(v, scales[1])
        keep = np.arange(count) % 32 == 0  # one in a block goes on, and holds the scale
        g[~keep] = 0
        g[keep] = np.sqrt(first[0])
        for t in range(2, steps + 2):
            _core.adamw_fp32(p, m, v, g, step=t, seed=t, scales=scales, **hyper)
        now = from_bf16(v) if moments == "bf16" else from_int8(v, scales[1])
        assert now[~keep].mean() / first.mean() == pytest.approx(0.999**steps, rel=tolerance)


def test_int8_codes_cover_orders_of_magnitude() -> None:
    x = np.geomspace(1e-8, 1, 32).astype(np.float32)
    up = np.full(32, 0x8000, np.uint32)  # as if to the nearest
    m, scale = to_int8(x, up, signed=True)
    assert (np.abs(from_int8(m, scale) / x - 1)[x > 1e-2] < 0.1).all()
    v, scale = to_int8(x, up, signed=False)
    assert (np.abs(from_int8(v, scale) / x - 1)[x > 1e-4] < 0.1).all()
    assert (v > 0).all()


@pytest.mark.parametrize("isa", _core.supported_isas())
def test_keeps_nan_and_infinity_in_moments(isa: str) -> None:
    _core.set_isa(isa)
    for moments in ("bf16", "int8"):
        state = KernelState("adamw", moments, 64)
        g = state.gradient(1)
        g[3], g[40] = np.nan, np.inf
        numbers = HYPERPARAMETERS["adamw"] | {"step": 1, "scales": state.scales}
        _core.adamw_fp32(state.p, *state.m, g, **numbers)
        _core.adamw_fp32(state.p, *state.m, np.zeros(64, np.float32), **numbers | {"step": 2})
        assert not np.isfinite(state.p[[3, 40]]).any()
    for up in (0, 0xFFFF):
        odd = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0], np.float32)
        stored = from_bf16(to_bf16(odd, np.full(5, up, np.uint32)))
        assert np.array_equal(stored[:3], odd[:3], equal_nan=True) and not stored[3:].any()


def test_lion_keeps_weights_with_zero_momentum() -> None:
    p, m, g = (aligned(64, "f4") for _ in range(3))
    p[:] = 1
    _core.lion_fp32(p, m, g, **HYPERPARAMETERS["lion"] | {"weight_decay": 0.0})
    assert (p == 1).all()
    g[0] = np.nan
    _core.lion_fp32(p, m, g, **HYPERPARAMETERS["lion"] | {"weight_decay": 0.0})
    assert np.isnan(p[0]) and (p[1:] == 1).all()


# -- arguments -------------------------------------------------------------------------------------


def test_torch_moments_are_written_in_place() -> None:
    p, g = torch.zeros(64), torch.ones(64)
    m, v = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.bfloat16)
    _core.adamw_fp32(p, m, v, g, step=1, **HYPERPARAMETERS["adamw"])
    assert torch.allclose(m.float(), torch.full((64,), 0.1), rtol=0.01) and (v > 0).all()
    codes, scale = torch.zeros(64, dtype=torch.int8), torch.zeros(2)
    _core.lion_fp32(p, codes, g, scales=[scale], **HYPERPARAMETERS["lion"])
    assert (codes == 127).all() and (scale > 0).all()
    assert bf16_bits(np.ones(1, np.float32))[0] == 0x3F80


def test_unfit_moments_are_refused() -> None:
    p, g = aligned(64, "f4"), aligned(64, "f4")
    m, v, scales = aligned(64, "i1"), aligned(64, "u1"), [aligned(2, "f4"), aligned(2, "f4")]
    call, numbers = _core.adamw_fp32, HYPERPARAMETERS["adamw"] | {"step": 1}
    with pytest.raises(ValueError, match="scales must be 2 arrays, got 0"):
        call(p, m, v, g, **numbers)
    with pytest.raises(ValueError, match="scales must be 0 arrays, got 2"):
        call(p, aligned(64, "f4"), aligned(64, "f4"), g, scales=scales, **numbers)
    with pytest.raises(ValueError, match="scales have 3 elements, 64 parameters have 2 blocks"):
        call(p, m, v, g, scales=[scales[0], aligned(3, "f4")], **numbers)
    with pytest.raises(TypeError, match="v must have dtype float32, bfloat16, uint16 or uint8"):
        call(p, m, aligned(64, "i1"), g, scales=scales, **numbers)
    with pytest.raises(TypeError, match="v must be stored as m is"):
        call(p, m, aligned(64, "f4"), g, scales=scales, **numbers)
    with pytest.raises(ValueError, match="m must be aligned to 32 bytes"):
        call(p, aligned(64, "i1", offset=16), v, g, scales=scales, **numbers)
    with pytest.raises(ValueError, match="scales overlaps scales, which is written"):
        call(p, m, v, g, scales=[scales[0], scales[0]], **numbers)
    assert not any(a.any() for a in (p, m, v, *scales))


@pytest.mark.parametrize(
    ("rule", "changes", "message"),
    [
        ("sgd", {"momentum": 1.0}, r"momentum must be in \[0, 1\)"),
        ("sgd", {"lr": -1.0}, "lr must be finite"),
        ("lion", {"beta2": 1.0}, r"beta2 must be in \[0, 1\)"),
        ("lion", {"weight_decay": -1.0}, "weight_decay must be"),
    ],
)
def test_refuses_numbers_out_of_range(rule: str, changes: dict[str, Any], message: str) -> None:
    arrays = [aligned(64, "f4") for _ in range(3)]
    with pytest.raises(ValueError, match=message):
        getattr(_core, f"{rule}_fp32")(*arrays, **HYPERPARAMETERS[rule] | changes)
