"""Custom loops may do what PyTorch allows between forward and backward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config

import lohan
from lohan.errors import LohanError, StorageIOError
from lohan.store.io_engine import open_engine
from tests.support.models import (
    assert_close,
    assert_same,
    attached,
    batches,
    decay_groups,
    lohan_run,
    lr,
    master_weights,
    plain_run,
    small_model,
    stored_bytes,
)
from tests.support.stores import MemoryEngine


def custom_run(model, loop):
    """Run `loop(model, step)` with in-memory AdamW of the same settings; `step()` updates."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1), lr=1.0, betas=(0.9, 0.95))
    done = 0

    def step():
        nonlocal done
        for group in optimizer.param_groups:
            group["lr"] = lr(done)
        optimizer.step()
        optimizer.zero_grad()
        done += 1

    loop(model, step)
    return {name: p.detach() for name, p in model.named_parameters()}


def check_loop(kind, loop, tmp_path):
    model = small_model(kind)
    expected = custom_run(model, loop)
    with attached(model, tmp_path) as session:
        loop(model, lambda: None)
        assert_close(master_weights(session), expected)
    return session


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_loss_scaled_by_the_user(kind, tmp_path):
    """A large eps makes Adam depend on the size of the gradient."""
    data = batches(3, batch=2, seq=16)
    model = small_model(kind)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, eps=1e-2, weight_decay=0.0)
    for batch in data:
        (reference(**batch).loss * 0.125).backward()
        optimizer.step()
        optimizer.zero_grad()
    adamw = lohan.AdamW(lr=1e-3, eps=1e-2)
    with attached(model, tmp_path, optimizer=adamw) as session:
        for batch in data:
            (model(**batch).loss * 0.125).backward()
        assert_close(master_weights(session), dict(reference.named_parameters()), 1e-6)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_forward_without_backward(kind, tmp_path):
    """A loss that is thrown away leaves no trace in the next step."""
    data = batches(4, batch=2, seq=16)

    def loop(model, step):
        for number, batch in enumerate(data):
            if number % 2:
                model(**data[number - 1]).loss.item()
            model(**batch).loss.backward()
            step()

    assert check_loop(kind, loop, tmp_path).step == 4


def test_forward_whose_loss_stays_alive(tmp_path):
    data = batches(3, batch=2, seq=16)

    def loop(model, step):
        for number, batch in enumerate(data):
            kept = model(**data[number - 1]).loss
            model(**batch).loss.backward()
            step()
            del kept

    assert check_loop("gpt2", loop, tmp_path).step == 3


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_two_losses_in_one_backward(kind, tmp_path):
    data = batches(6, batch=2, seq=16)

    def loop(model, step):
        for first, second in zip(data[::2], data[1::2], strict=True):
            (0.75 * model(**first).loss + 0.25 * model(**second).loss).backward()
            step()

    assert check_loop(kind, loop, tmp_path).step == 3


def test_stale_loss_is_refused(tmp_path):
    """Its blocks would be recomputed with weights that have moved on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))  # nothing resident
    x = torch.randn(4, 8)
    with attached(model, tmp_path) as session:
        stale = model(x).square().mean()
        model(x).square().mean().backward()
        after = stored_bytes(session)
        with pytest.raises(LohanError, match="weights have changed since; run forward again"):
            stale.backward()
        assert session.step == 1
        assert stored_bytes(session) == after


def test_backward_twice_is_refused(tmp_path):
    first, second = batches(2, batch=2, seq=16)
    model = small_model("llama")
    _, expected = plain_run(model, [first, second])
    with attached(model, tmp_path) as session:
        loss = model(**first).loss
        loss.backward()
        with pytest.raises((LohanError, RuntimeError)):
            loss.backward()
        assert session.step == 1
        model(**second).loss.backward()
        assert_close(master_weights(session), expected)


def test_error_in_the_users_code_gives_up_the_step(tmp_path):
    """Half of backward has run: nothing of it may count."""
    first, second = batches(2, batch=2, seq=16)
    model = small_model("llama")
    _, expected = plain_run(model, [first, second])
    with attached(model, tmp_path) as session:
        model(**first).loss.backward()
        session.flush()  # a step that is not committed yet goes with the one that fails
        embeddings = model.model.layers[1].register_forward_hook(
            lambda module, args, out: out.register_hook(lambda grad: 1 / 0) and None
        )
        with pytest.raises(ZeroDivisionError):
            model(**second).loss.backward()
        embeddings.remove()
        assert session.step == 1
        model(**second).loss.backward()
        assert session.step == 2
        assert_close(master_weights(session), expected)


def dropout_model():
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=64,
        n_layer=3,
        n_head=4,
        vocab_size=131,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
        resid_pdrop=0.2,
        embd_pdrop=0.2,
        attn_pdrop=0.2,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(config).train()


def sliced(forward, micro_batch):
    """Return a forward that takes its batch in slices and draws random numbers in that order."""

    def run(x, *args, **kwargs):
        return torch.cat([forward(part, *args, **kwargs) for part in x.split(micro_batch)])

    return run


@pytest.mark.parametrize("micro_batch", [None, 2])
def test_dropout_repeats_in_recomputation(micro_batch, tmp_path):
    """Forward draws the random numbers of an in-memory run, and recomputation draws them again.

    Different masks would give other gradients than the in-memory run has.
    """
    model = dropout_model()
    data = batches(4, batch=4, seq=16)
    expected = copy.deepcopy(model)

    def loop(reference, step):
        if micro_batch:
            for block in reference.transformer.h:
                block.forward = sliced(block.forward, micro_batch)
        torch.manual_seed(11)
        for batch in data:
            expected_losses.append(reference(**batch).loss)
            expected_losses[-1].backward()
            step()

    expected_losses = []
    expected = custom_run(model, loop)
    with attached(model, tmp_path, micro_batch=micro_batch) as session:
        torch.manual_seed(11)
        losses = []
        for batch in data:
            losses.append(model(**batch).loss)
            losses[-1].backward()
        weights = master_weights(session)
    wanted = [loss.item() for loss in expected_losses]
    assert [loss.item() for loss in losses] == pytest.approx(wanted, rel=1e-5)
    assert_close(weights, expected)


def test_dropout_goes_on_after_a_resume(tmp_path):
    """The random state is part of what is committed."""
    data = batches(4, batch=2, seq=16)
    torch.manual_seed(11)
    losses, expected = lohan_run(dropout_model(), data, tmp_path / "whole")
    model = dropout_model()
    with attached(model, tmp_path / "parts"):
        torch.random.manual_seed(0)
        dropout_model()
        for batch in data[:2]:
            model(**batch).loss.backward()
    torch.manual_seed(99)
    model = dropout_model()
    torch.manual_seed(98)
    with attached(model, tmp_path / "parts", resume=True) as session:
        again = []
        for batch in data[2:]:
            loss = model(**batch).loss
            loss.backward()
            again.append(loss.item())
        assert again == losses[2:]
        assert_same(master_weights(session), expected)


@pytest.mark.parametrize("where", ["in the head", "after some blocks were updated"])
def test_fp16_overflow_skips_the_step(where, tmp_path):
    data = batches(4, batch=2, seq=16)
    model = small_model("llama", dtype=torch.float16)
    with attached(model, tmp_path, optimizer=lohan.AdamW(lr=1e-3)) as session:
        model(**data[0]).loss.backward()
        before, scale = stored_bytes(session), session.executor.record.train_state.loss_scale
        with torch.no_grad():
            wanted = model(**data[1]).loss.item()
        if where == "in the head":
            (model(**data[1]).loss * 1e9).backward()
        else:
            handle = model.model.layers[0].register_forward_hook(
                lambda module, args, out: out.register_hook(lambda grad: grad * 1e9) and None
            )
            model(**data[1]).loss.backward()
            handle.remove()
        progress = session.executor.record.train_state
        assert (progress.step, progress.updates, progress.skipped_steps) == (2, 1, 1)
        assert progress.loss_scale == scale / 2
        assert stored_bytes(session) == before
        loss = model(**data[1]).loss
        assert loss.item() == wanted
        loss.backward()
        progress = session.executor.record.train_state
        assert (progress.step, progress.updates, progress.skipped_steps) == (3, 2, 1)
        after = stored_bytes(session)
        assert all(after[key] != before[key] for key in before)
    again = small_model("llama", dtype=torch.float16)
    with attached(again, tmp_path, resume=True) as session:  # the counters are committed too
        assert session.executor.record.train_state == progress
        assert stored_bytes(session) == after


def test_fp16_overflow_only_costs_its_step(tmp_path):
    """The updates after it are those of a run without it, but for the loss scale's rounding."""
    data = batches(4, batch=2, seq=16)
    adamw = lohan.AdamW(lr=1e-4)
    plain = small_model("llama", dtype=torch.float16)
    losses, expected = lohan_run(plain, data, tmp_path / "plain", optimizer=adamw)
    model = small_model("llama", dtype=torch.float16)
    with attached(model, tmp_path / "skipped", optimizer=adamw) as session:
        again = []
        for number, batch in enumerate(data):
            if number == 2:
                (model(**batch).loss * 1e9).backward()
            loss = model(**batch).loss
            loss.backward()
            again.append(loss.item())
        assert session.step == 5
        assert again == pytest.approx(losses, rel=1e-3)
        assert_close(master_weights(session), expected, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_identical_runs_and_engines_are_identical(dtype, tmp_path):
    """Bit for bit, losses and weights, whichever engine moves the bytes."""
    data = batches(4, batch=3, seq=16)
    kinds = ["auto", "auto", "threads", MemoryEngine()]
    try:
        open_engine("uring").close()
        kinds.append("uring")
    except StorageIOError:
        pass
    results = []
    for number, engine in enumerate(kinds):
        model = small_model("gpt2", dtype=dtype)
        place = tmp_path / str(number)
        results.append(lohan_run(model, data, place, micro_batch=2, engine=engine))
    for losses, weights in results[1:]:
        assert losses == results[0][0]
        assert_same(weights, results[0][1])


def test_several_directories_change_nothing(tmp_path):
    data = batches(2, batch=2, seq=16)
    losses, expected = lohan_run(small_model("llama"), data, tmp_path / "one")
    places = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    budget = lohan.Budget(host="256MiB", ssd=places)
    again, weights = lohan_run(small_model("llama"), data, tmp_path, budget=budget)
    assert again == losses
    assert_same(weights, expected)
    sizes = [sum(f.stat().st_size for f in p.rglob("slot-*.bin")) for p in places]
    assert min(sizes) > 0
