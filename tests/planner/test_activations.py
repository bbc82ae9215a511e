"""T_iter is convex in the bytes kept, Algorithm 1 finds its minimum, and rivals stop as defined."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan.errors import ConfigError
from lohan.planner import activations as acts
from lohan.planner.activations import Step
from tests.support.generated_cases import SHAPE_DRIVE, machine_profile, model_shape

rates = st.floats(1e9, 1e12)
sizes = st.floats(0.0, 1e11)
seconds = st.floats(0.01, 30.0)
classes = st.lists(
    st.tuples(st.floats(10.0, 1e4), st.floats(1e3, 1e9)), min_size=1, max_size=5
).map(tuple)


@st.composite
def steps(draw) -> Step:
    drive = replace(SHAPE_DRIVE, read=draw(rates), write=draw(rates))
    profile = machine_profile(
        drives=(drive,),
        h2d=draw(rates),
        d2h=draw(rates),
        device_rate=draw(rates),
        compute=((1024.0, draw(st.floats(1e12, 1e14))),),
        gpus=draw(st.integers(1, 4)),
    )
    return Step(
        profile=profile,
        forward_s=draw(seconds),
        backward_s=draw(seconds),
        weights=draw(sizes),
        gradients=draw(sizes),
        weights_read=draw(sizes),
        state_read=draw(sizes),
        state_written=draw(sizes),
        room=draw(sizes),
    )


@given(steps(), classes)
@settings(max_examples=200, deadline=None)
def test_t_iter_is_convex_in_the_bytes_kept(step, kinds):
    points = acts.curve(step, model_shape(classes=kinds), tokens=4096, seq=1024)
    slopes = [(t1 - t0) / (a1 - a0) for (a0, t0), (a1, t1) in pairwise(points)]
    scale = max(t for _, t in points) / points[0][0]
    for before, after in pairwise(slopes):
        assert after >= before - 1e-6 * scale


@given(steps(), classes)
@settings(max_examples=100, deadline=None)
def test_algorithm_1_equals_brute_force(step, kinds):
    shape = model_shape(layers=2, classes=kinds[:4])
    chosen = acts.algorithm1(step, shape, tokens=4096, seq=1024)
    actual = acts.candidates(step, shape, tokens=4096, seq=1024)
    inputs = acts.input_bytes(shape, 4096)
    # Whole candidates cannot be mixed better than by benefit, save for rounding at the bottom:
    # one candidate's worth of T_iter.
    best = min(
        step.iteration_s(
            inputs + sum(one.bytes for one, taken in zip(actual, choice, strict=True) if taken),
            sum(one.recompute_s for one, taken in zip(actual, choice, strict=True) if not taken),
        )
        for choice in product((False, True), repeat=len(actual))
    )
    by_benefit = min(t for _, t in acts.curve(step, shape, tokens=4096, seq=1024))
    assert chosen.iteration_s == pytest.approx(by_benefit, rel=1e-9)
    assert chosen.iteration_s <= best + max(one.recompute_s for one in actual) + 1e-9
    assert best <= chosen.iteration_s + 1e-9


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_algorithm_1_is_exact_for_equal_blocks(layers):
    """With one class, all candidates are equal, so brute force over their number is exact."""
    shape = model_shape(layers=layers, classes=((500.0, 5e8),))
    step = Step(
        profile=machine_profile(),
        forward_s=0.01,
        backward_s=0.02,
        weights=1e7,
        gradients=1e7,
        weights_read=1e7,
        state_read=1e8,
        state_written=1e8,
        room=1e12,
    )
    chosen = acts.algorithm1(step, shape, tokens=4096, seq=1024)
    actual = acts.candidates(step, shape, tokens=4096, seq=1024)
    inputs = acts.input_bytes(shape, 4096)
    times = [
        step.iteration_s(inputs + n * actual[0].bytes, (layers - n) * actual[0].recompute_s)
        for n in range(layers + 1)
    ]
    assert chosen.iteration_s == pytest.approx(min(times))


def base(**changes) -> Step:
    given = dict(
        profile=machine_profile(),
        forward_s=1.0,
        backward_s=2.0,
        weights=0.0,
        gradients=0.0,
        weights_read=0.0,
        state_read=0.0,
        state_written=0.0,
        room=1e12,
    )
    return Step(**{**given, **changes})


def test_three_cases_of_the_paper():
    shape = model_shape(layers=4, classes=((400.0, 8e8), (400.0, 1e3)))
    inputs = acts.input_bytes(shape, 4096)

    # Bound by the drives: nothing is gained, block inputs only.
    rising = acts.algorithm1(base(state_read=1e12), shape, tokens=4096, seq=1024)
    assert rising.bytes == inputs and rising.classes == (frozenset(),) * 4

    # Bound by compute: what saves work is kept.
    falling = acts.algorithm1(base(), shape, tokens=4096, seq=1024)
    assert all("a0" in names for names in falling.classes)

    # The link in between: it turns where the link becomes the limit in forward.
    middle = acts.algorithm1(base(forward_s=0.0009), shape, tokens=4096, seq=1024)
    assert inputs < middle.bytes < falling.bytes


def test_block_inputs_are_always_kept():
    """The loop as printed in the paper may stop before all block inputs are kept."""
    shape = model_shape()
    slow_link = base(profile=machine_profile(d2h=1e3, h2d=1e3))
    assert acts.algorithm1(slow_link, shape, tokens=64, seq=64).bytes == acts.input_bytes(shape, 64)


def test_rival_policies_stop_by_their_criterion():
    shape = model_shape(layers=4, classes=((400.0, 8e6), (100.0, 1e5)))
    inputs, whole = acts.input_bytes(shape, 4096), acts.g10(base(), shape, tokens=4096, seq=1024)
    assert whole.bytes == pytest.approx(2 * 4096 * 4 * 600)
    assert acts.static(base(), shape, tokens=4096, seq=1024).bytes == inputs

    half = base(room=whole.bytes / 2)
    mate = acts.checkmate(half, shape, tokens=4096, seq=1024)
    assert inputs < mate.bytes <= half.room and "a0" in mate.classes[-1]

    capuchin = acts.capuchin(half, shape, tokens=4096, seq=1024)
    assert capuchin.classes[0] == {"a0", "a1"} and capuchin.classes[-1] == frozenset()
    few = acts.capuchin(base(forward_s=1e-9), shape, tokens=4096, seq=1024)
    assert few.bytes == inputs


def test_an_unknown_activation_policy_is_refused():
    with pytest.raises(ConfigError, match=r"'best' is not an activation policy; they are holistic"):
        acts.choose_by_policy("best", base(), model_shape(), tokens=64, seq=64)
