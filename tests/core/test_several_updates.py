"""Several updates in one pass: the same bits as one call for each, for all formats and kernels."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from lohan import _core
from tests.support.update_kernels import (
    CHECKSUM_ELEMENTS,
    HYPERPARAMETERS,
    MASTERS,
    KernelState,
    rules_and_moments,
)

pytestmark = pytest.mark.usefixtures("native_settings")

TILE = 2 * 1024  # elements that take all updates before the next ones do


def gradient_of(state: KernelState, t: int) -> np.ndarray:
    """Return the gradient of update t: wide or, in every other update, in 16 bits."""
    wide = state.gradient(t)
    if t % 2 or state.master == "fp32":
        return wide
    if state.master == "fp16":
        return wide.astype(np.float16)
    return (wide.view(np.uint32) >> 16).astype(np.uint16)


def numbers(state: KernelState, t: int) -> dict[str, Any]:
    """Return the keywords of update t: every update has its own rate, factor and seed."""
    arguments = HYPERPARAMETERS[state.rule] | ({"step": t} if state.rule == "adamw" else {})
    return arguments | {"lr": 1e-3 * t, "grad_scale": 0.7 / t, "seed": 77 + t}


def arrays(state: KernelState) -> list[np.ndarray]:
    masters = {"fp32": [state.p], "bf16": [state.w, state.r], "fp16": [state.w, state.p]}
    return [*masters[state.master], *state.m]


def one_by_one(state: KernelState, count: int) -> Any:
    kernel, result = getattr(_core, f"{state.rule}_{state.master}"), None
    for t in range(1, count + 1):
        given = numbers(state, t)
        result = kernel(
            *arrays(state),
            gradient_of(state, t),
            scales=state.scales,
            first=3,
            checksums=True,
            **given,
        )
    return result


def in_one_pass(state: KernelState, count: int, **more: Any) -> Any:
    kernel = getattr(_core, f"{state.rule}_{state.master}_updates")
    steps = range(1, count + 1)
    return kernel(
        *arrays(state),
        [gradient_of(state, t) for t in steps],
        updates=[numbers(state, t) for t in steps],
        scales=state.scales,
        first=3,
        **more,
    )


@pytest.mark.parametrize("master", MASTERS)
@rules_and_moments
def test_one_pass_has_the_bits_of_one_call_for_each_update(
    rule: str, moments: str, master: str
) -> None:
    for isa, threads in itertools.product(_core.supported_isas(), (1, 3)):
        _core.set_isa(isa)
        _core.set_threads(threads)
        for count, size in (
            (1, 33),
            (2, TILE + 31),
            (3, TILE),
            (5, 1),
            (3, 2 * CHECKSUM_ELEMENTS + 77),
        ):
            expected, passed = (KernelState(rule, moments, size, master) for _ in range(2))
            checksums = one_by_one(expected, count)
            assert in_one_pass(passed, count, checksums=True) == checksums
            assert passed.bits() == expected.bits(), (isa, threads, count, size)


def test_nan_and_infinity_stay_what_they_are_from_update_to_update() -> None:
    for master, isa in itertools.product(MASTERS, _core.supported_isas()):
        _core.set_isa(isa)
        expected, passed = (KernelState("adamw", "fp32", 64, master) for _ in range(2))
        for state in (expected, passed):
            state.p[:3] = np.float32([np.nan, np.inf, 3.4e38])
            if master == "bf16":
                _core.split_bf16(state.p, state.w, state.r)
        one_by_one(expected, 3)
        in_one_pass(passed, 3)
        assert passed.bits() == expected.bits(), (master, isa)


def test_rejects_updates_that_do_not_fit_the_gradients() -> None:
    state = KernelState("adamw", "fp32", 64)
    one = numbers(state, 1)
    wrong = [
        ([], [], ValueError, "at least one"),
        ([state.gradient(1)] * 2, [one], ValueError, "1 for 2 gradients"),
        ([state.gradient(1)], [{**one, "momentum": 0.9}], TypeError, "9 keywords, 8 are known"),
        ([state.gradient(1)], [{k: v for k, v in one.items() if k != "eps"}], TypeError, "eps"),
        ([state.gradient(1)[:32]], [one], ValueError, "32 elements"),
        ([state.p], [one], ValueError, "overlaps"),
    ]
    before = state.bits()
    for gradients, updates, error, words in wrong:
        with pytest.raises(error, match=words):
            _core.adamw_fp32_updates(state.p, *state.m, gradients, updates=updates)
    assert state.bits() == before
