"""`clip_by="block"`: each block by its own norm, as a plain PyTorch loop that does the same, with
the same bits in every mode; another algorithm than clipping by the norm of all gradients."""

from __future__ import annotations

import copy
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import nn

import lohan
from lohan.device.emulated import EmulatedDevice
from lohan.errors import ConfigError, LohanError
from lohan.schedule.actions import ScheduleSpec, empty_buffers, from_text
from lohan.schedule.check import validate
from lohan.util.units import MiB
from tests import ranked
from tests.grids import thinned
from tests.models import (
    assert_close,
    attached,
    decay_groups,
    loss_of,
    lr,
    master_weights,
    stored_bytes,
)
from tests.overlapping import Tuning, data, memory_engine, net, train, tuned
from tests.test_speculation import exported
from tests.tiny_run import arguments, write_inputs

STEPS = 5
ADAMW = lohan.AdamW(lr=lr, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1)  # a wrong factor shows


def plain_loop(
    model: nn.Module, rows: list[dict[str, torch.Tensor]], blocks: list[list[str]], limit: float
) -> tuple[list[float], list[list[float]], dict[str, torch.Tensor]]:
    """Losses, the norms of every block before clipping, and the weights."""
    model = copy.deepcopy(model)
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1), lr=1.0, betas=(0.9, 0.95), eps=1e-3)
    losses, norms = [], []
    for step, row in enumerate(rows):
        optimizer.zero_grad()
        loss = loss_of(model, row)
        loss.backward()
        losses.append(loss.item())
        norms.append([
            nn.utils.clip_grad_norm_([named[name] for name in block], limit).item()
            for block in blocks
        ])  # fmt: skip
        for group in optimizer.param_groups:
            group["lr"] = lr(step)
        optimizer.step()
    return losses, norms, {name: p.detach() for name, p in named.items()}


@pytest.mark.parametrize("kind", ["plain", "tied", "several", "llama", "gpt2"])
def test_equals_a_plain_loop(kind, tmp_path, monkeypatch):
    tuned(monkeypatch, Tuning(cached=0.3, deferred=0.5))
    model, rows = net(kind), data(STEPS, kind=kind)
    with attached(copy.deepcopy(model), tmp_path / "cut", clip=1.0) as session:
        blocks = [[t.name for t in group.tensors] for group in session.executor.blocks.groups]
    _, free, unclipped = plain_loop(model, rows, blocks, 1e9)
    limit = 1.01 * sorted(norm for step in free for norm in step)[STEPS * len(blocks) // 2]
    expected_losses, norms, expected = plain_loop(model, rows, blocks, limit)
    # What clipping by the norm of all of them would give is far away.
    _, _, by_all = plain_loop(model, rows, [[name for b in blocks for name in b]], limit)
    for other in (unclipped, by_all):
        assert max(float((expected[n] - other[n]).abs().max()) for n in expected) > 2e-5
    losses, counts = [], []
    with attached(
        model, tmp_path / "run", optimizer=ADAMW, clip=limit, clip_by="block",
        engine=memory_engine(),
    ) as session:  # fmt: skip
        for row in rows:
            loss = loss_of(model, row)
            loss.backward()
            losses.append(loss.item())
            counts.append(session.executor.clipping.counts["clipped_blocks"])
            whole = sum(norm**2 for norm in norms[len(losses) - 1]) ** 0.5
            assert session.executor.grad_norm == pytest.approx(whole, rel=1e-5)
        assert_close(master_weights(session), expected, 2e-6)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert counts == [sum(norm > limit for norm in step) for step in norms]
    assert 0 < sum(counts) < STEPS * len(blocks)


# -- the same bits --------------------------------------------------------------------------------


def plain_path(kind: str, rows, **options):
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as place:
        tuned(patch, Tuning())
        return train(net(kind), rows, Path(place), overlap=False, clip_by="block", **options)


@pytest.mark.parametrize(
    ("kind", "mode", "tuning"),
    [
        ("tied", "serial", Tuning(cached=0.4)),
        ("plain", "naive", Tuning(cached=0.4, own_thread=True)),
        ("several", "optimized", Tuning(ring=3, grads=2)),
        ("tied", "balanced", Tuning(cached=0.4, deferred=0.5, own_thread=True)),
        ("llama", "balanced", Tuning(cached=1.0, deferred=0.7)),
    ],
)
def test_overlap_has_the_bits_of_one_after_the_other(kind, mode, tuning, tmp_path, monkeypatch):
    rows = data(STEPS, kind=kind)
    expected = plain_path(kind, rows, clip=0.05)
    tuned(monkeypatch, tuning)
    train(
        net(kind), rows, tmp_path, seed=4, update_mode=mode, clip=0.05, clip_by="block"
    ).check(expected)  # fmt: skip


def test_on_a_device(tmp_path, monkeypatch):
    rows = data(STEPS, kind="tied")
    expected = plain_path("tied", rows, clip=0.05)
    tuned(monkeypatch, Tuning(cached=0.4, deferred=0.5, device_slots=1))
    train(
        net("tied"), rows, tmp_path, seed=4, clip=0.05, clip_by="block",
        device=EmulatedDevice(64 * MiB),
    ).check(expected)  # fmt: skip


def test_fp16_waits_for_overflows_only(tmp_path, monkeypatch):
    def scale(step: int) -> float:
        return 1e9 if step == 2 else 1.0

    made = {}
    for overlap in (False, True):
        tuned(monkeypatch, Tuning(cached=0.4, spilled=0.0))
        made[overlap] = train(
            net("gpt2", dtype=torch.float16), data(STEPS, kind="gpt2"), tmp_path / str(overlap),
            scale=scale, overlap=overlap, clip=0.05, clip_by="block",
        )  # fmt: skip
    made[True].check(made[False])
    assert made[True].progress.skipped_steps == 1


def test_several_backward_calls_of_a_step(tmp_path, monkeypatch):
    """The sums are clipped, not what they are made of."""
    tuned(monkeypatch, Tuning(cached=0.4))
    rows, stored = data(4), []
    for overlap in (True, False):
        model = net()
        with attached(
            model, tmp_path / str(overlap), clip=0.05, clip_by="block", overlap=overlap
        ) as session:
            for pair in (rows[:2], rows[2:]):
                with session.accumulate():
                    for row in pair:
                        model(**row).backward()
                assert session.executor.clipping.counts["clipped_blocks"] > 0
            stored.append(stored_bytes(session))
    assert stored[0] == stored[1]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.parametrize(
    ("world", "more"), thinned([(1, ("--lora", 4, "--host", "2MiB")), (2, ("--host", "3MiB"))], 1)
)
def test_adapters_and_ranks(world, more, forge, inputs, tmp_path):
    """Ranks clip by the norm of a block, not of their shard of it: as many as one rank does."""
    made = {}
    ways = ((world, "--overlap"), (world, "--no-overlap"), (1, "--no-overlap"))
    for count, way in dict.fromkeys(ways):
        out = tmp_path / f"{count}{way}"
        given = ("--steps", 4, "--lr", "1e-2", "--clip", 0.3, "--clip-by", "block", *more, way)
        ended = ranked.run(forge, count, "train", *arguments(inputs, out, *given))
        assert [one.code for one in ended] == [0] * count, ranked.said(ended)
        made[count, way] = ranked.rows(out), exported(out)
    rows, weights = made[world, "--overlap"]
    plain, expected = made[world, "--no-overlap"]
    assert weights == expected
    for name in ("loss", "grad_norm", "clipped_blocks"):
        assert [row[name] for row in rows] == [row[name] for row in plain]
    alone, _ = made[1, "--no-overlap"]
    assert [row["clipped_blocks"] for row in rows] == [row["clipped_blocks"] for row in alone]
    assert sum(row["clipped_blocks"] for row in rows) > 0


# -- what is refused ------------------------------------------------------------------------------


def test_refusals(tmp_path):
    with pytest.raises(ConfigError, match="clip is 0, which turns clipping off; give clip a limit"):
        attached(net(), tmp_path, clip_by="block")
    with pytest.raises(ConfigError, match="'layer'; choose global, block"):
        attached(net(), tmp_path, clip=1.0, clip_by="layer")


def test_the_check_finds_an_update_without_its_norm():
    spec = ScheduleSpec(
        sites=((0,),), chunks=(1,), slots=1, ring=1, window=0, grads=1, clips_groups=True
    )
    text = "R0@0 F0@0(R0) B0@0(R0) {}S0.0@0 U0.0@0,0(B0,R0,S0.0) W0.0@0,0(U0.0) E C(E)"
    validate(from_text(text.format("H0(B0) ")), spec, empty_buffers(spec), whole=True)
    with pytest.raises(LohanError, match="the norm of its gradients is not taken"):
        validate(from_text(text.format("")), spec, empty_buffers(spec), whole=True)
