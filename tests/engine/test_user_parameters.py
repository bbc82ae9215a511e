"""User code around an attached model works as in PyTorch, or is refused by name.

It reads, freezes, hooks, replaces and clips parameters.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import lohan
from lohan.engine import user_code
from lohan.errors import ConfigError, LohanError, ModelError
from tests.support.architectures import MODULE_WIDTH, Plain
from tests.support.models import (
    assert_close,
    attached,
    batches,
    decay_groups,
    loss_of,
    lr,
    master_weights,
    small_model,
)

DATA = Plain.data(4)


class Gained(Plain):
    """A model with a parameter at its root, which stays in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((MODULE_WIDTH,), 1.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.gain)


def new_model() -> Gained:
    torch.manual_seed(5)
    return Gained()


class Around:
    """The parts of a loop besides forward and backward; the code runs with and without LoHan."""

    def start(self, model: nn.Module) -> None: ...

    def loss(self, model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def after(self, model: nn.Module, step: int) -> None: ...


def in_memory(model: nn.Module, around: Around, data: Any = DATA, clip: float = 0.0) -> Any:
    """Run the loop with torch.optim."""
    model = copy.deepcopy(model)
    around.start(model)
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1), lr=1.0, betas=(0.9, 0.95))
    for step, batch in enumerate(data):
        for group in optimizer.param_groups:
            group["lr"] = lr(step)
        around.loss(model, loss_of(model, batch)).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        around.after(model, step)
    return {name: p.detach() for name, p in model.named_parameters()}


def out_of_core(
    model: nn.Module, around: Around, place: Path, data: Any = DATA, **options: Any
) -> Any:
    around.start(model)
    with attached(model, place, **options) as session:
        for step, batch in enumerate(data):
            around.loss(model, loss_of(model, batch)).backward()
            around.after(model, step)
        assert session.step == len(data)
        return master_weights(session)


# -- reading and writing values --------------------------------------------------------------------


class Reads(Around):
    """Logs weights of blocks and resident weights after every step."""

    def __init__(self) -> None:
        self.log: list[float] = []

    def after(self, model: nn.Module, step: int) -> None:
        for parameter in model.parameters():
            self.log.append(parameter.norm().item())
        self.log.append(model.get_parameter("blocks.1.linear.weight").clone()[0, 1].item())


@pytest.mark.parametrize("overlap", [True, False])
def test_values_read_after_every_step_are_current(overlap, tmp_path):
    reference, actual = Reads(), Reads()
    expected = in_memory(new_model(), reference)
    assert_close(out_of_core(new_model(), actual, tmp_path, overlap=overlap), expected)
    assert actual.log == pytest.approx(reference.log, rel=1e-5)


class Penalty(Around):
    """Adds a loss that depends on a weight, which is read after the forward."""

    def loss(self, model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
        return loss + 0.5 * model.get_parameter("exit.weight").square().sum()


@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"device": "emulated"}])
def test_a_loss_may_depend_on_a_weight(options, tmp_path):
    if "device" in options:
        budget = lohan.Budget(host="256MiB", device="64MiB", ssd=[tmp_path])
        options = {**options, "budget": budget, "batch": DATA[0]}
    expected = in_memory(new_model(), Penalty())
    assert_close(out_of_core(new_model(), Penalty(), tmp_path, **options), expected)


def test_a_loss_that_depends_on_a_weight_read_too_early_is_refused(tmp_path):
    model = new_model()
    with attached(model, tmp_path) as session:
        penalty = model.exit.weight.square().sum()
        with pytest.raises(ModelError, match=r"depends on exit\.weight, which was read before"):
            (loss_of(model, DATA[0]) + penalty).backward()
        loss_of(model, DATA[0]).backward()  # the session goes on
        assert session.step == 1


def test_reading_large_weights_warns_and_names_them(monkeypatch, tmp_path):
    monkeypatch.setattr(user_code, "READ_WARNING_BYTES", 16)
    model = new_model()
    before = model.entry.weight.detach().clone()
    streamed = pytest.warns(UserWarning, match=r"entry\.weight is read outside .* are streamed")
    with attached(model, tmp_path) as session, streamed:
        assert torch.equal(session.weight("entry.weight"), before)


def test_reading_after_the_session_is_closed(tmp_path):
    model = new_model()
    before = model.entry.weight.detach().clone()
    attached(model, tmp_path).close()
    assert torch.equal(model.entry.weight, before)
    with pytest.raises(LohanError, match=r"entry\.weight, whose session is closed"):
        model.entry.weight.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("closed", [False, True])
def test_load_state_dict_writes_to_the_store(dtype, closed, tmp_path):
    """All values are loaded, then one by name; the steps around it belong to one session."""
    model, other = new_model().to(dtype), new_model().to(dtype)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    with attached(model, tmp_path) as session:
        loss_of(model, {"x": DATA[0]["x"].to(dtype)}).backward()
        if closed:
            session.close()
        assert not model.load_state_dict(other.state_dict()).missing_keys
        actual = model.state_dict()
        for name, value in other.state_dict().items():
            assert torch.equal(actual[name], value), name
            assert torch.equal(model.get_parameter(name), value), name
        model.load_state_dict({"entry.weight": torch.zeros(12, 12)}, strict=False)
        assert not model.entry.weight.any()
        with pytest.raises(RuntimeError, match=r"size mismatch for exit\.bias"):
            model.load_state_dict({"exit.bias": torch.zeros(3)}, strict=False)
        if not closed:
            with torch.no_grad():
                other.entry.weight.zero_()
                x = {"x": DATA[1]["x"].to(dtype)}
                assert loss_of(model, x).item() == pytest.approx(loss_of(other, x).item(), rel=1e-2)
            loss_of(model, x).backward()
            assert session.step == 2


class Clamps(Around):
    """Clamps a weight after every step, in a context without gradients."""

    def __init__(self, context: Any) -> None:
        self.context = context

    def after(self, model: nn.Module, step: int) -> None:
        with self.context():
            weight = model.get_parameter("blocks.1.linear.weight").detach()
            model.load_state_dict({"blocks.1.linear.weight": weight.clamp(-0.1, 0.1)}, strict=False)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_load_state_dict_where_gradients_are_disabled(context, tmp_path):
    expected = in_memory(new_model(), Clamps(torch.no_grad))
    assert_close(out_of_core(new_model(), Clamps(context), tmp_path), expected)


def test_frozen_weights_are_loaded_only_if_they_are_the_same(tmp_path):
    model = new_model()
    model.entry.requires_grad_(False)
    with attached(model, tmp_path):
        values = model.state_dict()
        model.load_state_dict(values)
        with pytest.raises(
            ModelError, match=r"entry\.weight is frozen, so its values in the store cannot change"
        ):
            model.load_state_dict({**values, "entry.weight": values["entry.weight"] + 1})


# -- parameters that are frozen, added or replaced -------------------------------------------------


class Freezes(Around):
    """Freezes and unfreezes a part of a block, a whole block and resident parameters."""

    def after(self, model: nn.Module, step: int) -> None:
        if step == 0:
            model.get_parameter("blocks.2.linear.weight").requires_grad_(False)
            model.get_submodule("entry").requires_grad_(False)
            model.get_parameter("exit.bias").requires_grad = False
            model.get_parameter("gain").requires_grad_(False)
        if step == 2:
            model.requires_grad_(True)


@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"clip": 0.05}])
def test_freezing_between_steps_is_honoured(options, tmp_path):
    clip = options.get("clip", 0.0)
    expected = in_memory(new_model(), Freezes(), clip=clip)
    assert_close(out_of_core(new_model(), Freezes(), tmp_path, **options), expected)


def test_freezing_the_head_of_a_language_model_is_honoured(tmp_path):
    class FreezesHead(Around):
        def after(self, model: nn.Module, step: int) -> None:
            model.get_parameter("lm_head.weight").requires_grad_(step == 1)
            model.get_parameter("model.norm.weight").requires_grad_(step == 1)

    data = batches(3, batch=2, seq=8)
    expected = in_memory(small_model("llama"), FreezesHead(), data)
    assert_close(out_of_core(small_model("llama"), FreezesHead(), tmp_path, data), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.entry.requires_grad_(True), r"entry\.weight was frozen .* takes gradients"),
        (lambda m: setattr(m, "exit", nn.Linear(12, 2)), r"exit\.weight was added or replaced"),
        (lambda m: setattr(m, "more", nn.Linear(2, 2)), r"more\.weight was added or replaced"),
        (lambda m: delattr(m.blocks[0], "linear"), r"blocks\.0\.linear\.weight was removed"),
        (lambda m: m.bfloat16(), r"is converted from torch.float32 to torch.bfloat16"),
        (lambda m: m.gain.data.mul_(2), r"gain is changed in memory"),
        (lambda m: setattr(m, "blocks", m.blocks[::-1]), "modules of Gained were reordered"),
        (
            lambda m: torch.utils.swap_tensors(m.exit.weight, nn.Parameter(torch.ones(2, 12))),
            r"exit\.weight was added or replaced",
        ),
    ],
)
def test_changes_without_optimizer_state_are_refused(change, message, tmp_path):
    model = new_model()
    model.entry.requires_grad_(False)
    with attached(model, tmp_path) as session:
        loss_of(model, DATA[0]).backward()
        with pytest.raises(ModelError, match=message):
            change(model)
            loss_of(model, DATA[1]).backward()
        assert session.step == 1


def test_writing_to_a_copy_that_state_dict_returned_warns(tmp_path):
    """In PyTorch, the copies share memory with the parameters."""
    model = new_model()
    with attached(model, tmp_path), warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(model, DATA[0]).backward()
        copies = model.state_dict()
        scaled = copies["exit.weight"] * 2
        model.load_state_dict({"exit.weight": scaled}, strict=False)
        loss_of(model, DATA[1]).backward()
        copies["blocks.1.linear.weight"].mul_(0.5)
        with pytest.raises(UserWarning, match=r"in place \(of blocks\.1\.linear\.weight\)"):
            loss_of(model, DATA[2])
        loss_of(model, DATA[2]).backward()


def test_freezing_between_forward_and_backward_is_refused(tmp_path):
    """PyTorch leaves the parameter without a gradient, which is honoured before the forward."""
    model = new_model()
    with attached(model, tmp_path) as session:
        loss = loss_of(model, DATA[0])
        model.blocks[1].requires_grad_(False)
        with pytest.raises(
            ModelError, match=r"blocks\.1\.linear\.weight was frozen between forward"
        ):
            loss.backward()
        model.blocks[1].requires_grad_(True)
        loss_of(model, DATA[0]).backward()
        assert session.step == 1


def test_moving_an_attached_model_changes_nothing(tmp_path):
    model = new_model()
    with attached(model, tmp_path):
        model.to("cpu").cpu().float()
        loss_of(model, DATA[0]).backward()


# -- gradient hooks, clipping and optimizers of torch ----------------------------------------------


class Hooks(Around):
    """Adds hooks of both kinds to parameters of blocks and resident ones, and removes some."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def start(self, model: nn.Module) -> None:
        self._first = model.get_parameter("blocks.0.linear.weight").register_hook(lambda g: g * 3)
        model.get_parameter("entry.weight").register_hook(self.record)
        model.get_parameter("gain").register_hook(lambda g: g * 0.5)
        model.get_parameter("exit.weight").register_post_accumulate_grad_hook(self.halve)
        model.get_parameter("blocks.1.linear.bias").register_post_accumulate_grad_hook(self.drop)

    def record(self, grad: torch.Tensor) -> None:
        self.norms.append(grad.norm().item())

    @staticmethod
    def halve(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(0.5)

    @staticmethod
    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    def after(self, model: nn.Module, step: int) -> None:
        if step == 1:
            self._first.remove()
            model.get_parameter("blocks.2.linear.weight").register_hook(lambda g: -g)


@pytest.mark.parametrize("options", [{}, {"clip": 0.05, "micro_batch": 3, "overlap": False}])
def test_gradient_hooks_run_over_complete_gradients(options, tmp_path):
    reference, actual = Hooks(), Hooks()
    expected = in_memory(new_model(), reference, clip=options.get("clip", 0.0))
    assert_close(out_of_core(new_model(), actual, tmp_path, **options), expected)
    assert len(actual.norms) == len(DATA)
    assert actual.norms == pytest.approx(reference.norms, rel=1e-4)


def test_hooks_survive_a_new_plan_and_see_each_added_batch(tmp_path):
    model, seen = new_model(), []
    with attached(model, tmp_path) as session:
        model.entry.weight.register_hook(lambda grad: seen.append(1))
        session.follow(session.plan)
        with session.accumulate():
            loss_of(model, DATA[0]).backward()
            loss_of(model, DATA[1]).backward()
        assert len(seen) == 2
        model.exit.weight.register_post_accumulate_grad_hook(print)
        refused = pytest.raises(ModelError, match=r"exit\.weight has a register_post_accumulate")
        with refused, session.accumulate():
            loss_of(model, DATA[0]).backward()


def test_a_hook_that_returns_another_shape_is_refused(tmp_path):
    model = new_model()
    with attached(model, tmp_path):
        model.entry.weight.register_hook(lambda grad: grad[0])
        with pytest.raises(ModelError, match=r"hook of entry\.weight returned .* \[12\]"):
            loss_of(model, DATA[0]).backward()


def test_gradients_that_are_gone_cannot_be_clipped_read_or_set(tmp_path):
    model = new_model()
    with attached(model, tmp_path, clip=1.0) as session:
        assert model.entry.weight.grad is None  # as in PyTorch, before any backward
        loss_of(model, DATA[0]).backward()
        assert session.grad_norm > 0
        with pytest.raises(ModelError, match=r"gain cannot be clipped .* attach\(clip="):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(ModelError, match=r"entry\.weight cannot be clipped"):
            torch.nn.utils.clip_grad_value_(model.entry.parameters(), 1.0)
        with pytest.raises(ModelError, match=r"gain is read after backward"):
            model.gain.grad.norm()
        with pytest.raises(ModelError, match=r"gradient of entry\.weight is set"):
            model.entry.weight.grad = torch.zeros(12, 12)
        with pytest.raises(ModelError, match="register_multi_grad_hook"):
            torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), print)
        model.zero_grad()
        assert model.entry.weight.grad is None  # as in PyTorch, after zero_grad


@pytest.mark.parametrize("when", ["before", "after", "closed"])
def test_a_torch_optimizer_over_the_model_is_refused(when, tmp_path):
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if when == "before" else None
    with attached(model, tmp_path) as session:
        if optimizer is None:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of(model, DATA[0]).backward()
        if when == "closed":
            session.close()
        with pytest.raises(ConfigError, match=r"SGD\.step\(\) would not update .*clip=\.\.\."):
            optimizer.step()
    plain = nn.Linear(2, 2)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()  # others are left alone


def test_backward_for_some_parameters_alone_is_refused(tmp_path):
    model = new_model()
    with attached(model, tmp_path) as session:
        message = r"backward\(inputs=\.\.\.\) for .*requires_grad_\(False\)"
        for inputs in ([model.gain], model.blocks[0].linear.weight):
            with pytest.raises(ConfigError, match=message):
                loss_of(model, DATA[0]).backward(inputs=inputs)
        assert session.step == 0
    plain = nn.Linear(2, 2)
    plain(torch.ones(2)).sum().backward(inputs=[plain.bias])  # others are left alone
    assert plain.weight.grad is None and plain.bias.grad is not None


@pytest.mark.parametrize("bias", [True, False])
def test_a_parameter_that_prune_has_renamed_is_refused(bias, tmp_path):
    model = new_model() if bias else small_model("llama")
    batch = DATA[0] if bias else batches(1, batch=2, seq=8)[0]
    layer = model.blocks[0].linear if bias else model.model.layers[0].mlp.up_proj
    with attached(model, tmp_path):
        prune.l1_unstructured(layer, "weight", 0.5)
        with pytest.raises(ModelError, match=r"renamed .*prune.* change the model first"):
            loss_of(model, batch)


def test_hidden_states_beside_a_loss_are_those_of_the_model(tmp_path):
    model, batch = small_model("llama"), batches(1, batch=2, seq=8)[0]
    expected = model(**batch, output_hidden_states=True).hidden_states
    with attached(model, tmp_path):
        hidden_states = model(**batch, output_hidden_states=True).hidden_states
    assert len(hidden_states) == len(expected) > 1
    for ours, theirs in zip(hidden_states, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_backward_without_updates_leaves_ordinary_gradients(tmp_path):
    model = new_model()
    plain = copy.deepcopy(model)
    for batch in DATA[:2]:
        loss_of(plain, batch).backward()
    with attached(model, tmp_path) as session:
        session.updates_in_backward = False
        for batch in DATA[:2]:
            loss_of(model, batch).backward()
        assert session.step == 0
        for actual, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(actual.grad, expected.grad, rtol=1e-4, atol=1e-7)
        session.updates_in_backward = True
        loss_of(model, DATA[0]).backward()
        assert session.step == 1


def test_gradients_of_inputs_alone_make_no_step(tmp_path):
    model = new_model()
    plain, x = copy.deepcopy(model), DATA[0]["x"].clone().requires_grad_()
    (expected,) = torch.autograd.grad(plain(x), x)
    with attached(model, tmp_path) as session:
        with session.accumulate():
            (actual,) = torch.autograd.grad(model(x), x)
            assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-8)
        assert session.step == 0
        (actual,) = torch.autograd.grad(model(x), x)
        assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-8)
        with pytest.raises(ModelError, match=r"entry\.weight has no node .*torch\.autograd\.grad"):
            torch.autograd.grad(model(x), [model.entry.weight], allow_unused=True)
        loss_of(model, DATA[0]).backward()
        assert session.step == 1


def test_hooks_of_blocks_see_what_they_see_in_memory(tmp_path):
    model, seen = new_model(), {"ours": [], "plain": []}
    plain = copy.deepcopy(model)
    for name, one in (("ours", model), ("plain", plain)):
        log = seen[name].append
        block = one.blocks[1]
        block.register_forward_hook(lambda module, args, out, log=log: log(out.detach()))
        block.register_full_backward_hook(lambda module, into, out, log=log: log(out[0]))
        one.blocks[0].linear.register_forward_hook(lambda module, args, out: 2 * out)
    loss_of(plain, DATA[0]).backward()
    with attached(model, tmp_path):
        loss_of(model, DATA[0]).backward()
    assert len(seen["ours"]) == len(seen["plain"]) == 2
    for actual, expected in zip(seen["ours"], seen["plain"], strict=True):
        assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-8)


# -- the example batch -----------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [DATA[0]["x"], (DATA[0]["x"],), DATA[0]])
def test_the_example_batch_is_what_the_model_is_called_with(batch, tmp_path):
    with attached(new_model(), tmp_path, batch=batch) as session:
        assert session.context.workload.batch == 4


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ("x", "batch is a str; give what"),
        ((1, 2), r"2 arguments, and Gained.forward takes 1 .*\(x"),
    ],
)
def test_an_example_batch_of_another_kind_is_refused(batch, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        attached(new_model(), tmp_path, batch=batch)
