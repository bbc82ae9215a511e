"""Kept results change what backward recomputes, but no bit of the result."""

from __future__ import annotations

import gc
import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lohan.capture.blocks import cut
from lohan.capture.recompute import no_saved_tensors
from lohan.capture.saved_call import SavedCall
from lohan.capture.selective_checkpoint import (
    SavedOps,
    SavePlan,
    SkipUnneededOps,
    recompute_with,
    run_and_save,
)
from lohan.capture.tracing import Inventory, SavePlans, inventory
from lohan.errors import LohanError
from tests.support.architectures import BLOCK_CONFIGS, BLOCK_SEQ, block_call, small_block
from tests.support.models import attached, batches, loss_of, small_model, stored_bytes

BATCH = 4


@dataclass
class CallResult:
    gradients: list[torch.Tensor]
    random: torch.Tensor  # state behind the last recomputation
    kept_bytes: int


def forward_and_backward(
    block: nn.Module,
    call: SavedCall,
    *,
    micro_batch: int,
    save_plan: Callable[[int], SavePlan | None],
    between: Callable[[SavedOps], None] = lambda kept: None,
    counting: Any = None,
) -> CallResult:
    """Run a call as the executor does: forward of all slices, then recomputation and backward.

    `save_plan` returns the plan for a slice of that many samples; None recomputes everything.
    """
    torch.manual_seed(5)
    block.zero_grad()
    slices, left = call.slices(micro_batch), []
    with torch.no_grad():
        for part in slices:
            _, args, kwargs = call.restore(part, grad=False)
            state, wanted = torch.get_rng_state(), save_plan(part.stop - part.start)
            if wanted is None:
                left.append((state, None))
                block(*args, **kwargs)
            else:
                _, kept = run_and_save(lambda a=args, k=kwargs: block(*a, **k), wanted)
                left.append((state, kept))
    held = sum(t.nbytes for _, kept in left if kept is not None for t in kept.tensors)
    gradients: list[torch.Tensor] = []
    for part, (state, kept) in zip(slices, left, strict=True):
        torch.set_rng_state(state)
        tensors, args, kwargs = call.restore(part, grad=True)
        with counting or nullcontext():
            if kept is None:
                out = block(*args, **kwargs)
                out = out[0] if isinstance(out, tuple) else out
            else:
                between(kept)
                out = recompute_with(lambda a=args, k=kwargs: block(*a, **k), kept)[0]
        after = torch.get_rng_state()
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=out.dtype)
        out.backward(grad)
        gradients += [tensor.grad for tensor in tensors if tensor.grad is not None]
    gradients += [p.grad.clone() for p in block.parameters() if p.grad is not None]
    return CallResult(gradients, after, held)


def assert_same(one: CallResult, other: CallResult) -> None:
    """Bit for bit, the random state included."""
    assert len(one.gradients) == len(other.gradients) > 1
    assert all(map(torch.equal, one.gradients, other.gradients))
    assert torch.equal(one.random, other.random)


@cache
def call_of(kind):
    return small_block(kind, batch=BATCH)


@cache
def inventory_of(kind, samples) -> Inventory:
    block, call = call_of(kind)
    _, args, kwargs = call.restore(slice(0, samples), grad=True)
    return inventory(block, args, kwargs)


def plain(kind, micro_batch=BATCH, **options):
    options["save_plan"] = lambda samples: None
    return forward_and_backward(*call_of(kind), micro_batch=micro_batch, **options)


def keeping(kind, choose, micro_batch=BATCH, **options):
    """Keep the classes for which `choose(name)` is true; recomputing in full is an error."""

    def save_plan(samples):
        actual = inventory_of(kind, samples)
        return actual.save_plan([part.name for part in actual.classes if choose(part.name)])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return forward_and_backward(
            *call_of(kind), micro_batch=micro_batch, save_plan=save_plan, **options
        )


def moved(kept: SavedOps) -> None:
    """Move kept tensors to another tier and back, overwriting their memory in between."""
    kept.adopt(
        [torch.cat([torch.ones_like(flat), flat])[flat.numel() :] for flat in kept.hand_over()]
    )


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", BLOCK_CONFIGS)
def test_every_choice_of_classes_gives_the_same_bits(kind, micro_batch):
    expected = plain(kind, micro_batch)
    draw = random.Random(micro_batch)
    assert_same(keeping(kind, lambda _: False, micro_batch), expected)
    for _ in range(5):
        chosen = {part.name: draw.random() < 0.5 for part in inventory_of(kind, BATCH).classes}
        actual = keeping(kind, lambda name: chosen.get(name, True), micro_batch, between=moved)  # noqa: B023
        assert_same(actual, expected)
    assert_same(keeping(kind, lambda _: True, micro_batch), expected)


@pytest.mark.parametrize("kind", BLOCK_CONFIGS)
def test_bytes_and_flops_are_those_of_the_inventory(kind):
    actual = inventory_of(kind, BATCH)
    names = [part.name for part in actual.classes]
    products = [node for node in actual.graph.nodes if node.flops > node.context_flops]
    for count in range(len(names) + 1):
        chosen = names[:count]
        save_plan = actual.save_plan(chosen)
        again = [n for n in products if n.key not in save_plan.keep and n.key not in save_plan.skip]
        with FlopCounterMode(display=False) as counter:
            plain(kind)
        whole = counter.get_total_flops()
        counter = FlopCounterMode(display=False)
        outcome = keeping(kind, chosen.__contains__, counting=counter)
        assert counter.get_total_flops() == sum(node.flops for node in again)
        assert outcome.kept_bytes == actual.kept_bytes(chosen)
        assert counter.get_total_flops() < whole
    assert again == []  # everything kept


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_wrong_save_plan_never_changes_a_result(kind):
    """Operations are kept and skipped at random."""
    expected, draw = plain(kind), random.Random(0)
    nodes = inventory_of(kind, BATCH).graph.nodes
    fell_back = 0
    for turn in range(60):
        lots = {node: draw.random() for node in nodes}
        limit = 0.7 if turn % 2 else 0.98
        save_plan = SavePlan(
            keep=frozenset(n.key for n, lot in lots.items() if lot < 0.4 and n.storable),
            skip=frozenset(n.key for n, lot in lots.items() if lot > limit and not n.must_run),
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            actual = forward_and_backward(
                *call_of(kind), micro_batch=BATCH, save_plan=lambda _, it=save_plan: it
            )
        fell_back += bool(caught)
        assert_same(actual, expected)
    assert 0 < fell_back < 60


def test_kept_memory_is_free_after_backward():
    block, call = call_of("llama")
    actual = inventory_of("llama", BATCH)
    save_plan = actual.save_plan([part.name for part in actual.classes])
    _, args, kwargs = call.restore(slice(0, BATCH), grad=False)
    with torch.no_grad():
        _, kept = run_and_save(lambda: block(*args, **kwargs), save_plan)
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in kept.tensors]
    assert len(storages) > 10 and not any(ref.expired() for ref in storages)
    gc.disable()  # by reference counts alone
    try:
        tensors, args, kwargs = call.restore(slice(0, BATCH), grad=True)
        (out,) = recompute_with(lambda: block(*args, **kwargs), kept)
        assert not kept.tensors
        assert not all(ref.expired() for ref in storages)  # autograd has what it needs
        out.backward(torch.ones_like(out))
        assert tensors[0].grad is not None
        assert all(ref.expired() for ref in storages)
    finally:
        gc.enable()


def test_a_step_leaves_nothing_behind():
    """The output of a block is a saved result and part of the graph that leads back to it."""
    block, call = nn.Linear(8, 8, bias=False), torch.ones(4, 8)
    with torch.no_grad():
        out, kept = run_and_save(lambda: block(call), SavePlan(frozenset({("aten.mm.default", 0)})))
    assert kept.tensors[0].untyped_storage()._cdata == out.untyped_storage()._cdata
    assert kept.tensors[0].grad_fn is None and kept.tensors[0] is not out


class Changing(nn.Module):
    """A block whose results are changed in place after they were computed."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x):
        inner = self.one(x)
        inner[:, :4] *= 2
        return self.two(torch.relu_(inner)).add_(x)


def compared(block, save_plan, *, change=lambda out: None):
    """Compare the gradients with and without kept results."""
    collected = []
    for kept_ops in (None, save_plan):
        block.zero_grad()
        torch.manual_seed(1)
        x = torch.randn(6, 8)
        run = lambda y: block(y)  # noqa: E731
        if kept_ops is not None:
            with torch.no_grad():
                out, kept = run_and_save(lambda: run(x), kept_ops)  # noqa: B023
            change(out)
        y = x.clone().requires_grad_()
        torch.manual_seed(2)
        leaf = run(y) if kept_ops is None else recompute_with(lambda: run(y), kept)[0]  # noqa: B023
        leaf.backward(torch.ones_like(leaf))
        collected.append([y.grad, *(p.grad.clone() for p in block.parameters())])
    assert all(map(torch.equal, *collected))


@pytest.mark.filterwarnings("error")
def test_results_that_are_changed_in_place():
    torch.manual_seed(0)
    block = Changing()
    first = SavePlan(frozenset({("aten.mm.default", 0)}))
    compared(block, first)
    compared(block, SavePlan(frozenset({("aten.relu_.default", 0), ("aten.mm.default", 1)})))
    actual = inventory(block, (torch.empty(6, 8),))
    names = [part.name for part in actual.classes]
    compared(block, actual.save_plan(names))
    # The value of `inner` behind the relu is what backward needs, so nothing before it runs.
    save_plan = actual.save_plan(names)
    assert ("aten.relu_.default", 0) in save_plan.keep
    assert {("aten.mm.default", 0), ("aten.mm.default", 1)} <= save_plan.skip


def test_a_result_changed_behind_the_block_is_not_used():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Sigmoid())
    save_plan = SavePlan(frozenset({("aten.sigmoid.default", 0)}))
    compared(block, save_plan)
    with pytest.warns(RuntimeWarning, match="changed in place after the block had returned it"):
        compared(block, save_plan, change=lambda out: out.mul_(3))


class Capricious(nn.Module):
    """A block that computes something else in every second call."""

    def __init__(self, other) -> None:
        super().__init__()
        self.linear, self.other, self.calls = nn.Linear(8, 8, bias=False), other, 0

    def forward(self, x):
        self.calls += 1
        x = self.linear(x)
        return self.other(x) if self.calls % 2 else torch.exp(torch.tanh(x))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda x: torch.exp(torch.sin(x)), "runs aten.tanh.default where forward ran aten.sin"),
        (torch.tanh, "runs aten.exp.default where forward ran nothing more"),
        (lambda x: torch.exp(torch.tanh(x)) * 2, "ends where forward ran aten.mul.Tensor"),
        (lambda x: torch.exp(torch.tanh(x[:3])), "calls aten.tanh.default with other arguments"),
    ],
)
def test_a_block_that_does_something_else_is_recomputed_in_full(other, message):
    block = Capricious(other)
    save_plan = SavePlan(frozenset({("aten.tanh.default", 0), ("aten.mm.default", 0)}))
    x = torch.randn(6, 8)
    with torch.no_grad():
        _, kept = run_and_save(lambda: block(x), save_plan)

    def again():
        block.calls = 1
        return block(x)

    with pytest.warns(RuntimeWarning, match=message):
        (out,) = recompute_with(again, kept)
    assert torch.equal(out, torch.exp(torch.tanh(block.linear(x))))
    assert not kept.tensors


def test_a_call_that_the_save_plan_does_not_fit_keeps_nothing():
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    actual = inventory(block, (torch.empty(6, 8),))
    save_plan = actual.save_plan([part.name for part in actual.classes])
    x = torch.ones(6, 8)
    for other, message in (
        (nn.Sequential(*block, nn.Tanh()), "runs aten.tanh.default where nothing more was planned"),
        (block[0], "ends where aten.tanh.default was planned for"),
        (nn.Sequential(block[0], nn.Sigmoid()), "runs aten.sigmoid.default where aten.tanh.def"),
    ):
        with torch.no_grad():
            _, kept = run_and_save(lambda it=other: it(x), save_plan)
        assert kept.hand_over() == []
        kept.adopt([])
        with pytest.warns(RuntimeWarning, match=message):
            (out,) = recompute_with(lambda it=other: it(x), kept)
        assert torch.equal(out, other(x))


class ActivationHooks(torch.autograd.Function):
    """Keeps a tensor for backward without autograd seeing it."""

    @staticmethod
    def forward(ctx, x):
        ctx.hidden = x * 3
        return ctx.hidden.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.hidden


class Hiding(nn.Module):
    def __init__(self, where) -> None:
        super().__init__()
        self.linear, self.where = nn.Linear(8, 8, bias=False), where

    def forward(self, x):
        x = self.linear(x)
        if self.where == "function":
            return ActivationHooks.apply(x)
        self.seen = x + 1
        return x * 2


@pytest.mark.parametrize("where", ["function", "module"])
def test_result_that_is_referenced_elsewhere_is_computed(where):
    block = Hiding(where)
    save_plan = inventory(block, (torch.empty(6, 8),)).save_plan([])
    assert save_plan.skip  # as far as autograd shows, nothing needs it
    with pytest.warns(RuntimeWarning, match="is needed after all"):
        compared(block, save_plan)
    if where == "module":
        torch.manual_seed(1)
        assert torch.equal(block.seen, block.linear(torch.randn(6, 8)) + 1)


@pytest.mark.filterwarnings("error")
def test_an_output_without_values_that_autograd_saves_is_noticed():
    block = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Sigmoid())
    skip = frozenset({("aten.sigmoid.default", 0), ("aten.mm.default", 0)})
    with pytest.raises(RuntimeWarning, match=r"aten\.sigmoid\.default is needed after all"):
        compared(block, SavePlan(frozenset(), skip))


def test_offloaded_tensors_must_be_returned_before_backward():
    block = nn.Linear(8, 8, bias=False)
    save_plan = SavePlan(frozenset({("aten.mm.default", 0)}))
    with torch.no_grad():
        _, kept = run_and_save(lambda: block(torch.ones(4, 8)), save_plan)
    taken = kept.hand_over()
    assert [tensor.shape for tensor in taken] == [(32,)]
    with pytest.raises(LohanError, match="needs 1 saved results and has 0"):
        recompute_with(lambda: block(torch.ones(4, 8)), kept)
    with pytest.raises(LohanError, match="return what export gave, in its order"):
        kept.adopt([taken[0][:-1]])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_training_ends_with_the_same_bytes(kind, tmp_path):
    """The executor in slices of two samples and one, with nothing, half and everything kept."""
    data, collected = batches(3, batch=3, seq=16), []
    for choice in (slice(0, 0), slice(0, None, 2), slice(None)):
        model = small_model(kind)
        names = kept_names(model, data[0], choice)
        with attached(model, tmp_path / str(len(collected)), micro_batch=2) as session:
            session.executor.block_runner.compute.save_plans = SavePlans(names, {})
            for batch in data:
                loss_of(model, batch).backward()
            collected.append(stored_bytes(session))
    assert collected[1:] == collected[:1] * 2


def kept_names(model, batch, choice):
    """Return the kept classes by number of site, for the model's repeated blocks."""
    names = {}
    for number, site in enumerate(cut(model).sites):
        if site.name.rpartition(".")[2].isdigit():
            module = model.get_submodule(site.name)
            _, args, kwargs = block_call(model, module, batch).restore(slice(0, 2), grad=True)
            actual = inventory(module, args, kwargs).classes
            names[number] = frozenset(part.name for part in actual[choice])
    return names


# -- calls that keep nothing ----------------------------------------------------------------------


def early_stopped(block, call, part, stop, *, counting=None):
    """Return the gradients of one slice, recomputed as in backward."""
    state, (tensors, args, kwargs) = torch.get_rng_state(), call.restore(part, grad=True)
    block.zero_grad()

    def run():
        return block(*args, **kwargs)

    with counting or nullcontext():
        if stop is None:
            out = run()
            out = out[0] if isinstance(out, tuple) else out
        else:
            out = stop.run("block", block, run, lambda: torch.set_rng_state(state))[0]
    after = torch.get_rng_state()
    out.backward(torch.ones_like(out))
    created = [t.grad for t in tensors if t.grad is not None]
    return [*created, *(p.grad.clone() for p in block.parameters()), after]


@pytest.mark.parametrize("kind", BLOCK_CONFIGS)
def test_recomputation_ends_where_backward_begins(kind):
    """The first one shows what is not needed; later ones leave it out. Bits stay."""
    block, call = call_of(kind)
    full, less, stop = (
        FlopCounterMode(display=False),
        FlopCounterMode(display=False),
        SkipUnneededOps(),
    )
    torch.manual_seed(3)
    expected = early_stopped(block, call, slice(0, 2), None, counting=full)
    for counting in (FlopCounterMode(display=False), less):
        torch.manual_seed(3)
        actual = early_stopped(block, call, slice(0, 2), stop, counting=counting)
        assert all(map(torch.equal, actual, expected)) and len(actual) == len(expected)
    saved = full.get_total_flops() - less.get_total_flops()
    assert saved == 2 * 2 * BLOCK_SEQ * 32 * (128 if kind == "gpt2" else 80)  # the last projection


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_recomputes_tensors_whose_values_python_reads(dtype):
    """`tolist` and `numpy` are no operations, and split sizes of a stand-in would be any bytes."""
    ends, stop, collected = torch.tensor([0, 1, 3, 7], dtype=dtype), SkipUnneededOps(), []

    def run() -> torch.Tensor:
        lengths = ends[1:] - ends[:-1]
        collected.append((lengths.tolist(), (ends[1:] + 1).numpy().tolist()))
        return torch.ones(3, requires_grad=True) * 2 @ torch.ones(3)

    for _ in range(3):
        stop.run("kind", nn.Module(), run, lambda: None)
    assert len(collected) >= 3 and all(one == ([1, 2, 4], [2, 4, 8]) for one in collected)


class Fickle(nn.Module):
    """A block whose operations depend on the values of its input.

    The result of its projection is needed in only one of the two cases.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x)
        return out * out.exp() if x[0, 0] > 0 else out + x


@pytest.mark.parametrize("first", [1.0, -1.0])
def test_a_call_that_runs_something_else_is_recomputed_in_full(first):
    torch.manual_seed(0)
    block, stop = Fickle(), SkipUnneededOps()
    for sign in (first, -first, first, -first):
        created = []
        for early in (False, True):
            x = torch.full((3, 4), sign, requires_grad=True)
            block.zero_grad()
            if early:
                out = stop.run("block", block, lambda x=x: block(x), lambda: None)[0]
            else:
                out = block(x)
            out.sum().backward()
            created.append([x.grad, block.linear.weight.grad.clone()])
        assert all(map(torch.equal, *created))


class Twice(nn.Module):
    """A block that calls one layer before another and after it, without using the last result."""

    def __init__(self, around: Callable[[], Any] = nullcontext) -> None:
        super().__init__()
        self.linear, self.other, self.around = nn.Linear(4, 4), nn.Linear(4, 4), around
        self.last = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.other(torch.tanh(self.linear(x)))
        with self.around():
            return (self.linear(torch.tanh(result)) if self.last else torch.exp(result)) + x


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def gradients_of(block: nn.Module, run: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    block.zero_grad()
    run().sum().backward()
    return [p.grad.clone() for p in block.parameters()]


@pytest.mark.parametrize(("around", "begins", "ops"), [(nullcontext, 1, 2), (Seen, 0, 4)])
def test_operations_are_seen_from_the_last_submodule_before_those_left_out(around, begins, ops):
    """The dispatch mode starts at the last submodule before the first skipped operation.

    Python sees no operation before it. A mode inside the block ends before the block does, so
    ours does not begin inside it.
    """
    torch.manual_seed(0)
    block, stop, x = Twice(around), SkipUnneededOps(), torch.randn(2, 4)
    expected = gradients_of(block, lambda: block(x))
    run = partial(stop.run, "block", block, lambda: block(x), lambda: None)
    for _ in range(3):
        assert all(map(torch.equal, gradients_of(block, lambda: run()[0]), expected))
    ending = stop._endings["block"]
    called = {0: block.other, 1: block.linear}[begins]
    assert ending is not None and ending.begins == (called, begins) and len(ending.ops) == ops
    assert not any(child._forward_pre_hooks for child in block.modules())


def test_a_call_without_that_submodule_is_recomputed_in_full():
    torch.manual_seed(0)
    block, stop, x = Twice(), SkipUnneededOps(), torch.randn(2, 4)
    run = partial(stop.run, "block", block, lambda: block(x), lambda: None)
    for last in (True, True, False, True):
        block.last = last
        expected = gradients_of(block, lambda: block(x))
        assert all(map(torch.equal, gradients_of(block, lambda: run()[0]), expected))
    assert stop._endings["block"] is None


def test_a_run_leaves_the_last_projection_out(tmp_path):
    model = small_model("llama")
    with attached(model, tmp_path, activations="recompute") as session:
        endings = session.executor.block_runner.compute._skip_unneeded._endings
        for batch in batches(3, batch=2, seq=8):
            loss_of(model, batch).backward()
        blocks = [n for n, s in enumerate(session.executor.blocks.sites) if "layers" in s.name]
        left_out = {kind[0]: one and len(one.results) for kind, one in endings.items()}
        assert blocks and all(left_out[number] for number in blocks)


class Scaled(nn.Module):
    """A block whose calls differ in a number and in their operations."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.factor, self.more = 2.0, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = torch.tanh(self.linear(x)) * self.factor
        return torch.sigmoid(result) if self.more else result


def test_reuses_analysis_of_a_call_only_while_its_attributes_are_unchanged():
    block, x = Scaled(), torch.randn(4, 8)
    save_plan = SavePlan(frozenset({("aten.tanh.default", 0), ("aten.mul.Tensor", 0)}))

    def kept(**changed: object) -> SavedOps:
        for name, value in changed.items():
            setattr(block, name, value)
        _, result = run_and_save(lambda: no_saved_tensors(lambda: block(x), "block"), save_plan)
        return result

    first, second = kept(), kept()
    assert [operation.quick for operation in save_plan.earlier] == [True] * 3
    assert second.results.keys() == first.results.keys() == {1, 2}
    assert all(second.results[n] is first.results[n] for n in (1, 2))  # nothing was looked at again
    other = kept(factor=3.0)
    assert other.results[1] is first.results[1] and other.results[2] is not first.results[2]
    assert other.results[2].called_with.leaves[-1] == 3.0
    for factor in (3.0, 5.0):  # as in the call before, and not
        result = kept(factor=factor)
        block.factor = 4.0
        with pytest.warns(RuntimeWarning, match="with other arguments than forward"):
            recompute_with(lambda: block(x), result)
    longer = kept(factor=3.0, more=True)
    assert len(longer.ops) == 4 and len(save_plan.earlier) == 4
    assert len(kept(more=False).ops) == 3 and len(save_plan.earlier) == 3
