"""Blocks are compiled where that is allowed, on devices whose bits need not be the CPU's."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

from lohan.device.choose import LIMITS, Compiled
from lohan.device.emulated import EmulatedDevice
from lohan.errors import ConfigError
from lohan.util.units import MiB
from tests.support.models import attached, batches, plain_run, small_model

STEPS = 3


class Compiling(EmulatedDevice):
    """A device that compiles, like an accelerator.

    Its operations are not observed, since compiled ones cannot be seen one by one.
    """

    compiles = True

    def __init__(self) -> None:
        super().__init__(64 * MiB)

    def computing(self):
        return nullcontext()


@pytest.fixture
def backend():
    torch._dynamo.reset()
    yield CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()


def run(model, train_batches, place, **options):
    with attached(model, place, batch=train_batches[0], **options) as session:
        losses = []
        for batch in train_batches:
            loss = model(**batch).loss
            loss.backward()
            losses.append(loss.item())
        session.flush()
        compiled, sites = (
            session.executor.block_runner.compute.compiled,
            session.executor.blocks.sites,
        )
        return losses, [site.name for n, site in enumerate(sites) if compiled.forward(n)]


def test_blocks_are_compiled_and_learn_the_same(tmp_path, backend):
    model, train_batches = small_model("llama"), batches(STEPS, batch=2, seq=16)
    expected, _ = plain_run(model, train_batches)
    losses, compiled = run(
        model,
        train_batches,
        tmp_path,
        device=Compiling(),
        compile=backend,
        activations="recompute",
        micro_batch=1,
    )
    assert losses == pytest.approx(expected, rel=1e-4)
    assert backend.frame_count > 1  # forward and recomputation, at the least
    assert {"model.layers.0", "model.layers.1"} <= set(compiled)


@pytest.mark.parametrize("lengths", [(16, 16), (16, 24, 20)], ids=["one length", "lengths"])
def test_recomputation_ends_where_backward_begins(lengths, tmp_path):
    """The last projection of a block, whose result only the next block needs, is not recomputed.

    Gradients are those of plain torch nevertheless.
    """
    torch._dynamo.reset()
    products: list[int] = []  # of each compiled forward
    backwards: list[int] = []

    def counting(graphs):
        def compiler(graph, _):
            count = sum("mm.default" in str(node.target) for node in graph.graph.nodes)
            graphs.extend([count] if count else [])  # the embedding has none
            return make_boxed_func(graph.forward)

        return compiler

    backend = aot_autograd(
        fw_compiler=counting(products),
        bw_compiler=counting(backwards),
        inference_compiler=counting([]),
    )
    model, train_batches = small_model("llama"), batches(len(lengths), batch=2, seq=max(lengths))
    train_batches = [
        {k: v[:, :n] for k, v in b.items()} for b, n in zip(train_batches, lengths, strict=True)
    ]
    expected, _ = plain_run(model, train_batches)
    losses, compiled = run(
        model,
        train_batches,
        tmp_path,
        device=Compiling(),
        compile=backend,
        activations="recompute",
        micro_batch=1,
    )
    torch._dynamo.reset()
    assert losses == pytest.approx(expected, rel=1e-4)
    assert "model.layers.1" in compiled
    projections = sum(isinstance(m, torch.nn.Linear) for m in model.model.layers[0].modules())
    assert projections == 7 and set(products) == {projections - 1}, products
    assert set(backwards) == {2 * projections}, backwards


def test_other_lengths_are_compiled_once_more_and_not_one_by_one(tmp_path, backend):
    """Padded batches have many lengths: the second makes a form for all."""
    model, train_batches = small_model("llama"), batches(8, batch=2, seq=32)
    lengths = (32, 16, 20, 24, 28, 18, 22, 30)
    train_batches = [
        {k: v[:, :n] for k, v in b.items()} for b, n in zip(train_batches, lengths, strict=True)
    ]
    counts = []
    with attached(
        model,
        tmp_path,
        batch=train_batches[0],
        device=Compiling(),
        compile=backend,
        activations="recompute",
        micro_batch=1,
    ) as session:
        for batch in train_batches:
            session.model(**batch).loss.backward()
            counts.append(backend.frame_count)
    assert counts[0] < counts[3] == counts[-1], counts


def test_kept_activations_stay_outside(tmp_path, backend):
    """Results are taken from operations one by one, so such a block is not compiled."""
    model, train_batches = small_model("llama"), batches(STEPS, batch=2, seq=16)
    expected, _ = plain_run(model, train_batches)
    losses, compiled = run(
        model, train_batches, tmp_path, device=Compiling(), compile=backend, activations="all"
    )
    assert losses == pytest.approx(expected, rel=1e-4)
    assert not any("layers" in name for name in compiled)


def test_random_numbers_stay_those_of_forward(tmp_path, backend):
    """A block with dropout runs as it is."""
    model = small_model("gpt2")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.2
    train_batches = batches(2, batch=2, seq=16)
    _, compiled = run(
        model, train_batches, tmp_path, device=Compiling(), compile=backend, activations="recompute"
    )
    assert compiled and not any(".h." in name for name in compiled)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_compilation_is_refused_where_bits_must_match(device, tmp_path):
    place = EmulatedDevice(64 * MiB) if device == "emulated" else device
    with pytest.raises(ConfigError, match=rf"compile: .* computes on {device}.*leave --compile"):
        attached(
            small_model("llama"),
            tmp_path,
            batch=batches(1, batch=2, seq=8)[0],
            device=place,
            compile=True,
        )
    assert list(tmp_path.iterdir()) == []


def test_raises_every_limit_of_dynamo_for_models_of_many_blocks():
    """A model of 126 blocks has 252 forms of one function, and dynamo's total is 256."""
    config = torch._dynamo.config
    names = [next(name for name in limit if hasattr(config, name)) for limit in LIMITS]
    with config.patch({name: getattr(config, name) for name in names}):
        Compiled("eager", sites=200)
        assert all(getattr(config, name) >= 2 * 200 for name in names)
    assert len(names) == 2 and all(getattr(config, name) < 2 * 200 for name in names)
