"""Fused AdamW against torch, bit identity of its variants, refusal of unfit arrays."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan import _core
from tests.support import HANG_S
from tests.support.update_kernels import aligned, aligned_copy, bf16_bits

HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}


def bf16_floats(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


pytestmark = pytest.mark.usefixtures("native_settings")


@pytest.fixture(params=_core.supported_isas())
def each_isa(request: pytest.FixtureRequest) -> str:
    _core.set_isa(request.param)
    return str(request.param)


class State:
    """Arrays of one mode, filled from one seed; `step` updates them with gradient number t."""

    def __init__(self, mode: str, count: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        p = rng.standard_normal(count).astype(np.float32)
        self.mode, self.count, self.seed = mode, count, seed
        self.p, self.m, self.v = aligned_copy(p), aligned(count, "f4"), aligned(count, "f4")
        self.w, self.r = aligned(count, "u2"), aligned(count, "i2")
        if mode.startswith("bf16"):
            _core.split_bf16(self.p, self.w, self.r)

    def gradient(self, t: int) -> np.ndarray:
        g = np.random.default_rng([self.seed, t]).standard_normal(self.count)
        g = (g * 10.0 ** (t % 3 - 1)).astype(np.float32)
        if self.mode == "bf16":
            return bf16_bits(g)
        return g.astype(np.float16) if self.mode == "fp16" else g

    def step(self, t: int, part: slice = slice(None), **changes: Any) -> None:
        g, hyper = self.gradient(t)[part], HYPER | {"step": t} | changes
        moments = (self.m[part], self.v[part], g)
        if self.mode == "fp32":
            _core.adamw_fp32(self.p[part], *moments, **hyper)
        elif self.mode.startswith("bf16"):
            _core.adamw_bf16(self.w[part], self.r[part], *moments, **hyper)
        else:
            _core.adamw_fp16(self.w[part], self.p[part], *moments, **hyper)

    def master(self) -> np.ndarray:
        if not self.mode.startswith("bf16"):
            return self.p
        out = aligned(self.count, "f4")
        _core.join_bf16(self.w, self.r, out)
        return out

    def bits(self) -> list[bytes]:
        return [a.tobytes() for a in (self.p, self.w, self.r, self.m, self.v)]


MODES = ["fp32", "bf16", "bf16/fp32", "fp16", "fp16/fp32"]
modes = pytest.mark.parametrize("mode", MODES)


def torch_adamw(start: np.ndarray, gradients: list[np.ndarray], scale: float = 1.0) -> np.ndarray:
    p = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = torch.optim.AdamW(
        [p],
        lr=HYPER["lr"],
        betas=(HYPER["beta1"], HYPER["beta2"]),
        eps=HYPER["eps"],
        weight_decay=HYPER["weight_decay"],
        fused=True,
    )
    for g in gradients:
        p.grad = torch.from_numpy(g) * scale
        optimizer.step()
    return p.detach().numpy()


@modes
def test_equals_torch_over_many_steps(mode: str, each_isa: str) -> None:
    """The master of every mode follows torch's fp32 AdamW fed with the same gradients."""
    state = State(mode, 10_007)
    start, steps = state.master().copy(), range(1, 21)
    gradients = [state.gradient(t) for t in steps]
    if mode == "bf16":
        gradients = [bf16_floats(g) for g in gradients]
    expected = torch_adamw(start, [g.astype(np.float32) for g in gradients])
    for t in steps:
        state.step(t)
    np.testing.assert_allclose(state.master(), expected, rtol=1e-6, atol=1e-6)


def test_first_step_equals_torch_up_to_rounding() -> None:
    state = State("fp32", 4096)
    expected = torch_adamw(state.p, [state.gradient(1)])
    state.step(1)
    np.testing.assert_allclose(state.p, expected, rtol=3e-7, atol=1e-8)


def test_gradient_scale_multiplies_the_gradient() -> None:
    state = State("fp32", 1000)
    expected = torch_adamw(state.p, [state.gradient(t) for t in (1, 2, 3)], scale=0.125)
    for t in (1, 2, 3):
        state.step(t, grad_scale=0.125)
    np.testing.assert_allclose(state.p, expected, rtol=1e-6, atol=1e-7)


@modes
def test_compute_weights_are_the_rounded_master(mode: str, each_isa: str) -> None:
    state = State(mode, 5_001)
    for t in (1, 2, 3):
        state.step(t)
    master = state.master()
    if mode.startswith("fp16"):
        assert np.array_equal(state.w.view(np.float16), master.astype(np.float16))
    if mode.startswith("bf16"):
        exact = master.view(np.uint32) & 0xFFFF != 0x8000
        assert np.array_equal(state.w[exact], bf16_bits(master)[exact])
        assert exact.mean() > 0.99


@modes
def test_instruction_sets_give_the_same_bits(mode: str) -> None:
    results = []
    for isa in _core.supported_isas():
        _core.set_isa(isa)
        state = State(mode, 100_003)
        for t in (1, 2, 3):
            state.step(t, grad_scale=0.7)
        results.append(state.bits())
    assert all(result == results[0] for result in results)


@modes
def test_thread_counts_and_segments_give_the_same_bits(mode: str) -> None:
    count = 200_001
    whole = State(mode, count)
    whole.step(1)
    for threads in (1, 2, 3, 7):
        _core.set_threads(threads)
        state = State(mode, count)
        state.step(1)
        assert state.bits() == whole.bits()
    pieces = State(mode, count)
    cuts = [0, 64, 32_768, 32_832, 131_072, 200_000 // 64 * 64, count]
    for a, b in itertools.pairwise(cuts):
        pieces.step(1, slice(a, b))
    assert pieces.bits() == whole.bits()


@modes
def test_every_size_and_tail(mode: str) -> None:
    """A short array gets the bits that a long one gets there; nothing behind it moves."""
    for isa in _core.supported_isas():
        _core.set_isa(isa)
        for count in range(101):
            state = State(mode, 256)
            before = state.bits()
            state.step(1, slice(0, count))
            whole = State(mode, 256)
            whole.step(1)
            names = zip(state.bits(), whole.bits(), before, strict=True)
            for got, expected, untouched in names:
                split_at = count * len(got) // 256
                assert got[:split_at] == expected[:split_at]
                assert got[split_at:] == untouched[split_at:]


def test_flush_to_zero_of_the_caller_does_not_matter() -> None:
    """Denormal second moments survive if another library has changed the thread's mode."""
    results = []
    for flush in (False, True):
        v, g = aligned(64, "f4"), aligned(64, "f4")
        v[:], g[:] = 1e-40, 1e-22
        torch.set_flush_denormal(flush)
        try:
            _core.adamw_fp32(aligned(64, "f4"), aligned(64, "f4"), v, g, step=1, **HYPER)
        finally:
            torch.set_flush_denormal(False)
        results.append(v.view(np.uint32).copy())
    assert results[0].all() and np.array_equal(*results)


def test_several_python_threads_at_once() -> None:
    _core.set_threads(3)
    expected = State("bf16", 100_003)
    for t in (1, 2, 3):
        expected.step(t)
    states = [State("bf16", 100_003) for _ in range(6)]
    workers = [threading.Thread(target=lambda s=s: [s.step(t) for t in (1, 2, 3)]) for s in states]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert all(state.bits() == expected.bits() for state in states)


def test_pool_survives_fork_and_exit() -> None:
    code = (
        "import os, sys\nimport numpy as np\nfrom lohan import _core\n"
        "_core.set_threads(3)\n"
        "p, raw = np.ones(10**6, 'f4'), np.zeros(2 * 10**6 + 64, np.uint8)\n"
        "w = raw[-raw.ctypes.data % 64:][: 2 * 10**6].view('u2')\n"
        "_core.to_fp16(p, w)\n"
        "pid = os.fork()\n"
        "w[:] = 0\n"
        "_core.to_fp16(p, w)\n"
        "assert (w == 0x3C00).all()\n"
        "if pid == 0: sys.exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=HANG_S)
    assert (result.returncode, result.stderr) == (0, b"")


# -- bf16 split and fp16 conversion ----------------------------------------------------------------


def split_and_join(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    p = aligned_copy(bits).view(np.float32)
    w, r, back = aligned(bits.size, "u2"), aligned(bits.size, "i2"), aligned(bits.size, "f4")
    _core.split_bf16(p, w, r)
    _core.join_bf16(w, r, back)
    return w, r, back.view(np.uint32)


def check_split(bits: np.ndarray) -> None:
    w, r, back = split_and_join(bits)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    assert np.array_equal(back[~nan], bits[~nan])
    assert (back[nan] == 0x7FC00000).all() and (w[nan] == 0x7FC0).all()
    # The stated decoding, in plain arithmetic, and the nearest bf16: |remainder| <= half a step.
    decoded = (w.astype(np.int64) << 16) + r.astype(np.int64)
    assert np.array_equal(decoded[~nan] & 0xFFFFFFFF, bits[~nan].astype(np.int64))


@given(
    exponent=st.integers(0, 255),
    sign=st.integers(0, 1),
    mantissas=st.lists(
        st.integers(0, 2**23 - 1)
        | st.sampled_from([0, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x7F8000, 0x7F7FFF, 0x7FFFFF]),
        min_size=1,
        max_size=40,
    ),
)
@settings(max_examples=300, deadline=None)
def test_split_returns_every_pattern(exponent: int, sign: int, mantissas: list[int]) -> None:
    bits = [sign << 31 | exponent << 23 | mantissa for mantissa in mantissas]
    check_split(np.array(bits, np.uint32))


def test_split_over_the_whole_range(each_isa: str) -> None:
    """Covers all upper halves, with low halves around the rounding points and random ones."""
    rng = np.random.default_rng(0)
    upper = np.arange(2**16, dtype=np.uint32) << 16
    lows = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF, *rng.integers(0, 2**16, 25)]
    for low in lows:
        check_split(upper | np.uint32(low))
    check_split(np.arange(0, 2**32, 1021, dtype=np.uint64).astype(np.uint32))


@pytest.mark.slow
def test_split_of_all_patterns() -> None:
    for start in range(0, 2**32, 2**24):
        check_split(np.arange(start, start + 2**24, dtype=np.uint64).astype(np.uint32))


def test_split_rounds_like_torch_except_ties_upwards() -> None:
    bits = np.random.default_rng(1).integers(0, 2**32, 10**6, dtype=np.uint64).astype(np.uint32)
    bits[:1000] = bits[:1000] & 0xFFFF0000 | 0x8000
    w, _, _ = split_and_join(bits)
    expected = bf16_bits(bits.view(np.float32))
    finite, tie = (bits & 0x7F800000) != 0x7F800000, bits & 0xFFFF == 0x8000
    assert np.array_equal(w[finite & ~tie], expected[finite & ~tie])
    assert np.array_equal(w[finite & tie], (bits[finite & tie] >> 16).astype(np.uint16) + 1)


def test_split_of_named_values() -> None:
    largest = np.array([3.4028235e38], np.float32).view(np.uint32)
    w, r, back = split_and_join(largest)
    assert w[0] == 0x7F80 and r[0] == -1 and back[0] == largest[0]
    infinities = np.array([np.inf, -np.inf], np.float32).view(np.uint32)
    w, r, back = split_and_join(infinities)
    assert list(w) == [0x7F80, 0xFF80] and not r.any() and np.array_equal(back, infinities)


def test_fp16_equals_numpy_for_every_upper_half(each_isa: str) -> None:
    upper = np.arange(2**16, dtype=np.uint32) << 16
    for low in (0, 1, 0x0FFF, 0x1000, 0x1001, 0x2000, 0x3000, 0x8000, 0xF000, 0xFFFF):
        p = aligned_copy(upper | np.uint32(low)).view(np.float32)
        w = aligned(p.size, "u2")
        _core.to_fp16(p, w)
        nan = np.isnan(p)
        with np.errstate(over="ignore"):
            expected = p.astype(np.float16).view(np.uint16)
        assert np.array_equal(w[~nan], expected[~nan])
        assert np.isnan(w[nan].view(np.float16)).all()


def test_fp16_variants_give_the_same_bits_also_for_nan() -> None:
    p = aligned_copy(np.arange(0, 2**32, 2039, dtype=np.uint64).astype(np.uint32)).view(np.float32)
    results = []
    for isa in _core.supported_isas():
        _core.set_isa(isa)
        w = aligned(p.size, "f2")
        _core.to_fp16(p, w)
        results.append(w.tobytes())
    assert all(result == results[0] for result in results)


def test_fp16_gradients_are_read_exactly(each_isa: str) -> None:
    """With beta1 = 0, one step stores the gradient in m, for all 65,536 patterns."""
    g = aligned_copy(np.arange(2**16, dtype=np.uint16))
    w, p, m, v = aligned(2**16, "u2"), *(aligned(2**16, "f4") for _ in range(3))
    _core.adamw_fp16(w, p, m, v, g, step=1, **HYPER | {"beta1": 0.0})
    with np.errstate(all="ignore"):
        expected = g.view(np.float16).astype(np.float32)
    assert np.array_equal(m, expected, equal_nan=True)


# -- arguments -------------------------------------------------------------------------------------


def test_torch_tensors_are_written_in_place() -> None:
    count = 1000
    w = torch.zeros(count, dtype=torch.bfloat16)
    r = torch.zeros(count, dtype=torch.int16)
    m, v, g = torch.zeros(count), torch.zeros(count), torch.ones(count, dtype=torch.bfloat16)
    _core.adamw_bf16(w, r, m, v, g, step=1, **HYPER)
    assert torch.allclose(w.float(), torch.full((count,), -1e-2), rtol=1e-2)
    assert (m == m[0]).all() and m[0] > 0 and (v > 0).all() and (r != 0).all()
    half, p = torch.zeros(count, dtype=torch.float16), torch.zeros(count)
    _core.adamw_fp16(half, p, m, v, torch.ones(count, dtype=torch.float16), step=1, **HYPER)
    assert torch.equal(half, p.half()) and (half != 0).all()
    _core.adamw_fp32(p, m, v, torch.ones(count), step=2, **HYPER)


def bad_arrays(dtype: str) -> dict[str, tuple[Any, type[Exception], str]]:
    frozen = aligned(64, dtype)
    frozen.flags.writeable = False
    other = "f8" if dtype != "f8" else "f4"
    return {
        "dtype": (aligned(64, other), TypeError, "must have dtype"),
        "stride": (aligned(128, dtype)[::2], ValueError, "must be contiguous, got a stride of 2"),
        "reversed": (aligned(64, dtype)[::-1], ValueError, "must be contiguous"),
        "shape": (aligned(64, dtype).reshape(8, 8), ValueError, "must be one-dimensional"),
        "length": (aligned(63, dtype), ValueError, "elements, but .* has 6"),
        "alignment": (aligned(64, dtype, offset=32), ValueError, "must be aligned to 64 bytes"),
        "read-only": (frozen, ValueError, "is read-only but would be written"),
        "list": ([0.0] * 64, TypeError, "must be a numpy array or a CPU torch tensor"),
    }


CALLS: dict[str, tuple[Callable[..., None], list[tuple[str, str]], dict[str, Any]]] = {
    "adamw_fp32": (
        _core.adamw_fp32,
        [("p", "f4"), ("m", "f4"), ("v", "f4"), ("-g", "f4")],
        HYPER | {"step": 1},
    ),
    "adamw_bf16": (
        _core.adamw_bf16,
        [("w", "u2"), ("r", "i2"), ("m", "f4"), ("v", "f4"), ("-g", "u2")],
        HYPER | {"step": 1},
    ),
    "adamw_fp16": (
        _core.adamw_fp16,
        [("w", "f2"), ("p", "f4"), ("m", "f4"), ("v", "f4"), ("-g", "f2")],
        HYPER | {"step": 1},
    ),
    "split_bf16": (_core.split_bf16, [("-p", "f4"), ("w", "u2"), ("r", "i2")], {}),
    "join_bf16": (_core.join_bf16, [("-w", "u2"), ("-r", "i2"), ("p", "f4")], {}),
    "to_fp16": (_core.to_fp16, [("-p", "f4"), ("w", "f2")], {}),
}


@pytest.mark.parametrize("call", CALLS)
def test_unfit_arrays_are_refused_by_name(call: str) -> None:
    """A minus marks an argument that is only read: any alignment and read-only will do there."""
    function, arguments, keywords = CALLS[call]
    for index, (name, dtype) in enumerate(arguments):
        for what, (bad, error, message) in bad_arrays(dtype).items():
            if name.startswith("-") and what in ("alignment", "read-only"):
                continue
            arrays = [aligned(64, d) for _, d in arguments]
            arrays[index] = bad
            pattern = message if what == "length" else rf"^{name.lstrip('-')} {message}"
            with pytest.raises(error, match=pattern):
                function(*arrays, **keywords)
            good = [a for i, a in enumerate(arrays) if i != index]
            assert not any(a.any() for a in good), "a refused call wrote something"


def test_gradient_may_be_read_only_and_loosely_aligned() -> None:
    g = aligned(64, "f4", offset=4)
    g[:] = 1
    g.flags.writeable = False
    m = aligned(64, "f4")
    _core.adamw_fp32(aligned(64, "f4"), m, aligned(64, "f4"), g, step=1, **HYPER)
    assert (m > 0).all()
    odd = np.zeros(64 * 4 + 1, np.uint8)[1:].view("f4")
    with pytest.raises(ValueError, match="g must be aligned to 4 bytes"):
        _core.adamw_fp32(aligned(64, "f4"), m, aligned(64, "f4"), odd, step=1, **HYPER)


def test_overlapping_arrays_are_refused() -> None:
    both, v, g = aligned(128, "f4"), aligned(64, "f4"), aligned(64, "f4")
    with pytest.raises(ValueError, match="m overlaps p, which is written"):
        _core.adamw_fp32(both[:64], both[32:96], v, g, step=1, **HYPER)
    with pytest.raises(ValueError, match="g overlaps v, which is written"):
        _core.adamw_fp32(both[:64], both[64:], v, v, step=1, **HYPER)


def test_parameters_are_written_in_place() -> None:
    p = torch.nn.Parameter(torch.zeros(64))
    m, v, g = (aligned(64, "f4") for _ in range(3))
    g[:] = 1
    _core.adamw_fp32(p, m, v, g, step=1, **HYPER)
    assert (p != 0).all()


def test_other_devices_are_refused() -> None:
    meta = torch.zeros(64, device="meta")
    with pytest.raises((TypeError, ValueError), match=r"^p must be"):
        _core.adamw_fp32(meta, *(aligned(64, "f4") for _ in range(3)), step=1, **HYPER)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": 0}, "step counts from 1, got 0"),
        ({"lr": float("nan")}, "lr must be finite"),
        ({"beta1": 1.0}, r"beta1 must be in \[0, 1\)"),
        ({"beta2": -0.1}, r"beta2 must be in \[0, 1\)"),
        ({"eps": -1.0}, "eps must be"),
        ({"weight_decay": -1.0}, "weight_decay must be"),
        ({"grad_scale": float("inf")}, "grad_scale must be finite"),
    ],
)
def test_refuses_numbers_out_of_range(changes: dict[str, Any], message: str) -> None:
    arrays = [aligned(64, "f4") for _ in range(4)]
    with pytest.raises(ValueError, match=message):
        _core.adamw_fp32(*arrays, **HYPER | {"step": 1} | changes)


def test_settings_are_checked() -> None:
    assert _core.isa() in _core.supported_isas() and _core.supported_isas()[0] == "plain"
    with pytest.raises(ValueError, match="isa 'neon' is not supported here; choose one of: plain"):
        _core.set_isa("neon")
    with pytest.raises(ValueError, match="threads must be between 1 and 256, got 0"):
        _core.set_threads(0)
    assert 1 <= _core.threads() <= max(1, os.cpu_count() or 1)
