"""Ranks in custom loops: modules with their own loss, devices, errors on one rank."""

from __future__ import annotations

import time

import pytest
import torch

from lohan.train.run_folder import read_mark
from tests.support import HANG_S, ranks
from tests.support.architectures import Plain
from tests.support.forked_commands import Forge
from tests.support.generated_cases import thinned
from tests.support.models import decay_groups, lr


def load_trainers(forge: Forge) -> None:
    """Import Trainer once, instead of once in each rank of each test."""
    pytest.importorskip("accelerate", reason="Trainer needs the extra: pip install 'lohan[hf]'")
    forge.load("transformers.trainer", "lohan.hf.mixin")


@pytest.mark.parametrize("name", ["plain_module", "emulated"])
def test_ranks_equal_the_run_of_one_rank(name, forge, tmp_path):
    worlds = {}
    for world in (1, 2):
        ended = ranks.run_case(forge, world, name, tmp_path / str(world))
        assert [e.code for e in ended] == [0] * world, ranks.errors_of_ranks(ended)
        worlds[world] = ranks.case_results(tmp_path / str(world), world)
    (alone,), both = worlds[1], worlds[2]
    if name == "emulated":  # the loss of a language model is that of all ranks
        assert both[0]["losses"] == both[1]["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    else:
        means = [sum(pair) / 2 for pair in zip(*(r["losses"] for r in both), strict=True)]
        assert means == pytest.approx(alone["losses"], rel=1e-5)
    assert both[0]["norm"] == both[1]["norm"] == pytest.approx(alone["norm"], rel=1e-5)
    actual, expected = ranks.assembled_parameters(both), ranks.assembled_parameters([alone])
    assert actual.keys() == expected.keys()
    for tensor, values in expected.items():
        assert actual[tensor] == pytest.approx(values, abs=2e-6), tensor


def test_a_gradient_on_one_rank_only(forge, tmp_path):
    """Counts as zero where there is none; a parameter without any on all ranks stays as it is."""
    ended = ranks.run_case(forge, 2, "partly_used", tmp_path)
    assert [e.code for e in ended] == [0, 0], ranks.errors_of_ranks(ended)
    actual = ranks.assembled_parameters(ranks.case_results(tmp_path, 2))
    torch.manual_seed(0)
    model = ranks.PartlyUsedModel()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    groups = decay_groups(model, 0.1)
    adamw = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=ranks.CASE_EPS)
    for step, batch in enumerate(Plain.data(ranks.CASE_STEPS, samples=4)):
        for rank, rows in enumerate(batch["x"].split(2)):
            (model(rows, rank == 0) / 2).backward()
        for group in adamw.param_groups:
            group["lr"] = lr(step)
        adamw.step()
        adamw.zero_grad()
    for name, tensor in model.named_parameters():
        assert actual[name] == pytest.approx(tensor.flatten().tolist(), abs=2e-6), name
        assert ("never" in name) == torch.equal(tensor, start[name])


def test_another_order_of_blocks_is_refused(forge, tmp_path):
    ended = ranks.run_case(forge, 2, "another_order", tmp_path)
    assert [e.code for e in ended] == [3, 3], ranks.errors_of_ranks(ended)
    assert "called the blocks of the model in another order than rank 0" in ended[0].err


def test_an_error_in_the_loop_of_one_rank_stops_the_others(forge, tmp_path):
    start_s = time.monotonic()
    ended = ranks.run_case(forge, 2, "an_error_in_the_loop", tmp_path)
    assert time.monotonic() - start_s < HANG_S
    assert ended[0].code != 0 and "rank 1 (process" in ended[0].err, ranks.errors_of_ranks(ended)
    assert ended[1].code != 0 and "Error" in ended[1].err


@pytest.mark.parametrize(
    "case", thinned(["trainers", "trainers_with_a_loss", "trainers_with_means"], 2)
)
def test_a_trainer_script_under_torchrun(case, forge, tmp_path):
    """The results are those of transformers' own Trainer with DDP."""
    load_trainers(forge)
    from tests.support.trainer_scripts import saved_weights

    ended = ranks.run_case(forge, 2, case, tmp_path)
    assert [e.code for e in ended] == [0, 0], ranks.errors_of_ranks(ended)
    first, second = ranks.case_results(tmp_path, 2)
    assert first["lohan"] == second["lohan"]
    for name, expected in first["transformers"].items():
        assert expected and first["lohan"][name] == pytest.approx(expected, rel=1e-4), name
    actual, reference = saved_weights(tmp_path / "lohan"), saved_weights(tmp_path / "transformers")
    assert max((actual[n] - reference[n]).abs().max().item() for n in reference) < 2e-5
    kept = sorted(p.name for p in (tmp_path / "lohan" / "checkpoint-3").glob("lohan-state*"))
    assert len(kept) == 2


def test_a_chat_script_under_torchrun(forge, tmp_path):
    """Losses and metrics are those of all processes, also after the best model has come back."""
    load_trainers(forge)
    pytest.importorskip("trl", reason="SFTTrainer needs the extra: pip install 'lohan[trl]'")
    ended = ranks.run_case(forge, 2, "chat_trainers", tmp_path)
    assert [e.code for e in ended] == [0, 0], ranks.errors_of_ranks(ended)
    first, second = ranks.case_results(tmp_path, 2)
    assert first["lohan"] == second["lohan"]
    for name, expected in first["trl"].items():
        assert expected and first["lohan"][name] == pytest.approx(expected, rel=1e-4), name


def test_a_trainer_under_torchrun_with_a_drive_of_its_own(forge, tmp_path):
    """All ranks use one store name, which the output folder records."""
    load_trainers(forge)
    ended = ranks.run_case(forge, 2, "trainers_with_a_drive", tmp_path)
    assert [e.code for e in ended] == [0, 0], ranks.errors_of_ranks(ended)
    for item in ranks.case_results(tmp_path, 2):
        assert len(item["whole 0"]) == 3
        assert item["parts 0"] + item["parts 1"] == item["whole 0"]
    names = {path.name.partition("-rank")[0] for path in (tmp_path / "drive").iterdir()}
    assert names == {read_mark(tmp_path / out).store for out in ("whole", "parts")}


@pytest.mark.slow
def test_trainers_of_preferences_under_torchrun(forge, tmp_path):
    pytest.importorskip("trl", reason="they need the extra: pip install 'lohan[trl]'")
    collected = {}
    for world in (1, 2):
        ended = ranks.run_case(forge, world, "preference_trainers", tmp_path / str(world))
        assert [e.code for e in ended] == [0] * world, ranks.errors_of_ranks(ended)
        collected[world] = ranks.case_results(tmp_path / str(world), world)
    for name, expected in collected[1][0].items():
        for actual, reference in zip(collected[2][0][name], expected, strict=True):
            assert actual == pytest.approx(reference, rel=1e-4), name
