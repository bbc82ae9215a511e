"""Several ranks have the losses, weights and evaluations of one, also if one of them dies."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lohan.model.layout import RankInfo, groups_from_json
from lohan.store.manifest import read_manifest
from tests.support import HANG_S, forked_commands, ranks
from tests.support.forked_commands import Forge
from tests.support.model_folders import save_latents, save_pipeline
from tests.support.ranks import (
    RANK_STEPS,
    assert_equal_runs,
    exported_weights,
    rank_arguments,
    rank_inputs_fixture,  # noqa: F401 - a fixture
)

CLIPPED = ("--clip", 0.7)
FREE = ("--clip", 0)


@pytest.fixture(scope="module")
def alone(forge: Forge, inputs: Path, tmp_path_factory: pytest.TempPathFactory):
    """Return a function that runs one rank with some settings, once for each settings."""
    created: dict[tuple[object, ...], Path] = {}

    def run(*more: object) -> Path:
        if more not in created:
            out = tmp_path_factory.mktemp("alone") / "run"
            ended = forge.run(*rank_arguments(inputs, out, *more))
            assert ended.code == 0, ended.err
            created[more] = out
        return created[more]

    return run


@pytest.fixture(scope="module")
def together(forge: Forge, inputs: Path, tmp_path_factory: pytest.TempPathFactory):
    """Return a function that runs several ranks with some settings, once for each settings."""
    created: dict[tuple[object, ...], Path] = {}

    def run(world: int, *more: object) -> Path:
        if (world, *more) not in created:
            out = tmp_path_factory.mktemp("together") / "run"
            ended = ranks.run_ranks(forge, world, *rank_arguments(inputs, out, *more))
            assert [e.code for e in ended] == [0] * world, ranks.errors_of_ranks(ended)
            assert all(e.out == "" for e in ended[1:]), "one rank speaks"
            created[world, *more] = out
        return created[world, *more]

    return run


@pytest.mark.parametrize(
    ("world", "options", "more"),
    [
        pytest.param(2, FREE, ("--update-mode", "optimized"), marks=pytest.mark.slow),
        pytest.param(2, FREE, ("--update-mode", "naive"), marks=pytest.mark.slow),
        pytest.param(2, FREE, ("--update-mode", "serial"), marks=pytest.mark.slow),
        pytest.param(2, CLIPPED, ("--no-overlap",), marks=pytest.mark.slow),
        (2, CLIPPED, ("--update-mode", "optimized", "--host", "1200KiB")),
        pytest.param(2, FREE, ("--update-mode", "balanced"), marks=pytest.mark.slow),
        (3, CLIPPED, ("--update-mode", "balanced", "--activations", "all")),
    ],
)
def test_ranks_equal_the_run_of_one_rank(world, options, more, together, alone):
    """Five rows over two or three ranks: never the same number for each."""
    assert_equal_runs(together(world, *options, *more), alone(*options))


@pytest.mark.parametrize("dtype", [pytest.param("bf16", marks=pytest.mark.slow), "fp16"])
def test_ranks_equal_one_rank_in_16_bits(dtype, inputs, together, alone):
    """Ranks sum gradients in fp32, one rank rounds them once more: within a few roundoffs."""
    u, more = {"bf16": 2**-9, "fp16": 2**-12}[dtype], ("--dtype", dtype, *CLIPPED)
    out = together(2, *more)
    actual, wanted = (
        [row["loss"] for row in forked_commands.metrics_rows(o)] for o in (out, alone(*more))
    )
    assert actual == pytest.approx(wanted, rel=4 * u)
    start = load_file(inputs / "model" / "model.safetensors")
    lohan_result, expected = exported_weights(out), exported_weights(alone(*more))
    for name, tensor in expected.items():
        moved = (tensor.float() - start[name].float()).norm()
        assert (lohan_result[name].float() - tensor.float()).norm() < 0.1 * moved + 8 * u, name


def test_ranks_evaluate_and_export_the_best_as_one_rank(forge, inputs, alone, tmp_path):
    """Seven rows in batches of five: the last batch has fewer rows than there are ranks."""
    more = ("--eval-data", inputs / "held.jsonl", "--eval-every", 4, "--export-best", *FREE)
    out = tmp_path / "run"
    ended = ranks.run_ranks(forge, 3, *rank_arguments(inputs, out, *more, steps=8))
    assert [e.code for e in ended] == [0] * 3, ranks.errors_of_ranks(ended)
    single = tmp_path / "single"
    assert forge.run(*rank_arguments(inputs, single, *more, steps=8)).code == 0
    actual, wanted = (
        [
            (r["step"], r.get("eval_loss"), r.get("eval_tokens"))
            for r in forked_commands.metrics_rows(o)
        ]
        for o in (out, single)
    )
    assert [f[::2] for f in actual] == [w[::2] for w in wanted]
    losses = [[loss for _, loss, _ in rows if loss is not None] for rows in (actual, wanted)]
    assert len(losses[0]) == 2 and losses[0] == pytest.approx(losses[1], rel=2e-6)
    for name, tensor in exported_weights(single, "best").items():
        assert torch.allclose(exported_weights(out, "best")[name], tensor, rtol=2e-6, atol=2e-6)


@pytest.mark.slow
def test_ranks_equal_one_rank_in_diffusion(forge, tmp_path):
    """The loss is each rank's own mean, of three and of two rows; places of tokens are shared."""
    pytest.importorskip("diffusers")
    save_pipeline(tmp_path / "flux", "flux")
    save_latents(tmp_path / "data", "flux")
    for world in (1, 2):
        ended = ranks.run_ranks(
            forge,
            world,
            "train",
            "--model",
            tmp_path / "flux",
            "--data",
            tmp_path / "data",
            "--out",
            tmp_path / str(world),
            "--host",
            "64MiB",
            "--steps",
            4,
            "--batch",
            5,
            "--micro-batch",
            1,
            "--lr",
            "1e-3",
            "--eval-split",
            0.3,
            "--clip",
            0.5,
        )
        assert [e.code for e in ended] == [0] * world, ranks.errors_of_ranks(ended)
    actual, wanted = (forked_commands.metrics_rows(tmp_path / str(world)) for world in (2, 1))
    for key in ("loss", "grad_norm", "eval_loss"):
        values = [row[key] for row in wanted if key in row]
        assert values and [row[key] for row in actual if key in row] == pytest.approx(values, 1e-4)
    name = "diffusion_pytorch_model.safetensors"
    lohan_result, expected = (load_file(tmp_path / str(world) / "model" / name) for world in (2, 1))
    assert all(torch.allclose(lohan_result[key], expected[key], atol=1e-5) for key in expected)


def test_bytes_on_ssd_do_not_grow_with_the_ranks(together, alone):
    """Counted, in all: what is written of every step is the state once, padding aside."""
    out = together(2, *FREE, "--update-mode", "optimized")
    manifest = read_manifest(alone(*FREE) / "store")
    assert manifest is not None
    groups = groups_from_json(manifest.meta["layout"])
    padding = sum(map(RankInfo(world=2).padded, groups)) / sum(group.numel for group in groups)
    actual, expected = (
        sum(row["ssd_written_bytes"] for row in forked_commands.metrics_rows(o))
        for o in (out, alone(*FREE))
    )
    late = RANK_STEPS / (RANK_STEPS - 1)  # what the last step leaves to write is in no row
    assert 0 < actual <= expected * padding * late * 1.01


def test_each_machine_has_a_run_folder(forge, inputs, tmp_path):
    """Each has a run folder and stores of its own; the first has log and export."""
    boxes = [tmp_path / f"box{rank}" / "run" for rank in range(2)]

    def run(*args: object) -> None:
        port = ranks.free_port()
        processes = [
            forge.start(
                *(box if arg == "BOX" else arg for arg in args),
                before="tests.support.ranks:on_a_machine_of_its_own",
                env=ranks.rank_environment(rank, 2, port)
                | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank, box in enumerate(boxes)
        ]
        ended = [process.wait() for process in processes]
        assert [e.code for e in ended] == [0, 0], ranks.errors_of_ranks(ended)

    given = rank_arguments(inputs, tmp_path / "BOX", *FREE)
    run(*("BOX" if arg == tmp_path / "BOX" else 6 if arg == RANK_STEPS else arg for arg in given))
    assert (boxes[0] / "store-rank0of2").exists() and (boxes[1] / "store-rank1of2").exists()
    assert not (boxes[0] / "store-rank1of2").exists() and (boxes[1] / "data").exists()
    run("resume", "BOX", "--steps", RANK_STEPS)
    assert [row["step"] for row in forked_commands.metrics_rows(boxes[0])] == list(
        range(1, RANK_STEPS + 1)
    )
    assert not (boxes[1] / "metrics.jsonl").exists() and not (boxes[1] / "model").exists()
    assert (boxes[0] / "model" / "model.safetensors").is_file()
    assert all(f"steps = {RANK_STEPS}" in (box / "run.toml").read_text() for box in boxes)


# -- what is refused ------------------------------------------------------------------------------


def test_ranks_with_other_settings(forge, inputs, tmp_path):
    port = ranks.free_port()
    processes = [
        forge.start(
            *rank_arguments(inputs, tmp_path / "run", "--clip", rank),
            env=ranks.rank_environment(rank, 2, port),
        )
        for rank in range(2)
    ]
    ended = [process.wait() for process in processes]
    assert [e.code for e in ended] == [2, 2], ranks.errors_of_ranks(ended)
    assert "clip is 0.0 for rank 0 and 1.0 for rank 1" in ended[0].err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--batch", 1), "--batch 1 is less than one row for each of 2 ranks"),
    ],
)
def test_rejects_settings_that_ranks_cannot_share(more, message, forge, inputs, tmp_path):
    ended = ranks.run_ranks(forge, 2, *rank_arguments(inputs, tmp_path / "run", *more))
    assert [e.code for e in ended] == [2, 2], ranks.errors_of_ranks(ended)
    assert message in ended[0].err and "Traceback" not in ended[0].err + ended[1].err
    assert not (tmp_path / "run").exists()


# -- a rank that dies -----------------------------------------------------------------------------


def dying(inputs: Path, out: Path) -> list[object]:
    return rank_arguments(inputs, out, *CLIPPED, model="dropping", steps=6)


@pytest.fixture(scope="module")
def whole(forge: Forge, inputs: Path, tmp_path_factory: pytest.TempPathFactory):
    """Run two ranks without interruption; return the run and the file boundaries of each rank."""
    folder = tmp_path_factory.mktemp("whole")
    traces = {rank: folder / f"trace-{rank}" for rank in range(2)}
    ended = ranks.run_ranks(forge, 2, *dying(inputs, folder / "run"), trace=traces)
    assert [e.code for e in ended] == [0, 0], ranks.errors_of_ranks(ended)
    return folder / "run", [json.loads(path.read_text()) for path in traces.values()]


def kill_and_go_on(forge, inputs, whole, out: Path, *, rank: int, boundary: int) -> None:
    """Kill one rank; the other stops by itself with a message, and both resume together."""
    expected, names = whole
    where = f"rank {rank} killed at {boundary}, {names[rank][boundary]}"
    start_s = time.monotonic()
    ended = ranks.run_ranks(forge, 2, *dying(inputs, out), kill_at={rank: boundary})
    assert time.monotonic() - start_s < HANG_S, where
    assert ended[rank].code == -signal.SIGKILL, where
    other = ended[1 - rank]
    assert other.code == 2 and f"rank {rank} (process" in other.err, f"{where}\n{other.err}"
    ended = ranks.run_ranks(forge, 2, *dying(inputs, out))
    if f"lohan resume {out}" in ended[0].err:
        ended = ranks.run_ranks(forge, 2, "resume", out)
    assert [e.code for e in ended] == [0, 0], f"{where}\n{ranks.errors_of_ranks(ended)}"
    same_bits(out, expected, where)


def instants(names: list[list[str]], count: int, *, seed: int) -> list[tuple[int, int]]:
    """Draw ranks and boundaries at random, half of them around a commit."""
    draw = random.Random(seed)
    chosen = []
    for number in range(count):
        rank = number % 2
        rank_names = names[rank]
        commit = [
            i for i, name in enumerate(rank_names) if name.startswith(("replace", "sync", "fsync"))
        ]
        places = commit if number % 3 else list(range(len(rank_names)))
        chosen.append((rank, places[draw.randrange(len(places))]))
    return chosen


@pytest.mark.slow
def test_killed_rank_stops_the_others_and_both_resume(forge, inputs, whole, tmp_path):
    ((rank, boundary),) = instants(whole[1], 1, seed=3)
    kill_and_go_on(forge, inputs, whole, tmp_path / "run", rank=rank, boundary=boundary)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(10))
def test_kill_long_form(number, forge, inputs, whole, tmp_path):
    rank, boundary = instants(whole[1], 10, seed=4)[number]
    kill_and_go_on(forge, inputs, whole, tmp_path / "run", rank=rank, boundary=boundary)


def test_kill_between_prepared_and_committed(forge, inputs, whole, tmp_path):
    """A rank dies after preparing a step and before its rename; the other may have renamed."""
    names = whole[1][1]
    renames = [i for i, name in enumerate(names) if name == "replace"]
    middle = renames[len(renames) // 2 :]
    kill_and_go_on(forge, inputs, whole, tmp_path / "run", rank=1, boundary=middle[1])


def test_ctrl_c_stops_all_ranks_at_one_step(forge, inputs, whole, tmp_path):
    out = tmp_path / "run"
    processes = ranks.start_ranks(forge, 2, *dying(inputs, out))
    while "step 2/" not in processes[0].output():
        time.sleep(0.02)
    os.kill(processes[1].pid, signal.SIGINT)
    ended = [process.wait() for process in processes]
    assert [e.code for e in ended] == [130, 130], ranks.errors_of_ranks(ended)
    assert f"lohan resume {out}" in ended[0].out
    assert [e.code for e in ranks.run_ranks(forge, 2, "resume", out)] == [0, 0]
    assert [row["loss"] for row in forked_commands.metrics_rows(out)] == [
        r["loss"] for r in forked_commands.metrics_rows(whole[0])
    ]


@pytest.mark.slow
def test_hanging_rank_is_killed(forge, inputs, tmp_path):
    """A hanging rank closes no connection, so the others miss its heartbeat."""
    out = tmp_path / "run"
    processes = ranks.start_ranks(forge, 2, *dying(inputs, out))
    while "step 2/" not in processes[0].output():
        time.sleep(0.02)
    os.kill(processes[1].pid, signal.SIGSTOP)
    try:
        ended = processes[0].wait(HANG_S)
        assert ended.code == 2 and "rank 1 gave no sign of life" in ended.err
    finally:
        os.kill(processes[1].pid, signal.SIGKILL)
        processes[1].wait()
    assert [e.code for e in ranks.run_ranks(forge, 2, "resume", out)] == [0, 0]


# -- a new plan -----------------------------------------------------------------------------------


def replanning(inputs: Path, out: Path, *more: object) -> list[object]:
    how = ("--activations", "holistic", *CLIPPED, *more)
    return rank_arguments(inputs, out, *how, model="dropping", steps=6)


@pytest.fixture(scope="module")
def never_replanned(forge: Forge, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run two ranks without overlap and without a new plan."""
    out = tmp_path_factory.mktemp("never-replanned") / "run"
    ended = ranks.run_ranks(forge, 2, *replanning(inputs, out, "--no-overlap"))
    assert [e.code for e in ended] == [0, 0], ranks.errors_of_ranks(ended)
    return out


@pytest.fixture(scope="module")
def replanned(forge, inputs, never_replanned, tmp_path_factory) -> int:
    """Run two ranks that adopt a new plan; return the number of file boundaries of the second.

    The first rank measures and decides. The bits are those of a run without a new plan.
    """
    folder = tmp_path_factory.mktemp("replanned")
    traces = {rank: folder / f"trace-{rank}" for rank in range(2)}
    ended = ranks.run_ranks(
        forge, 2, *replanning(inputs, folder / "run"), trace=traces, before=AT_ONCE
    )
    assert [e.code for e in ended] == [0, 0], ranks.errors_of_ranks(ended)
    assert "after step 3: measured the first steps; a new plan should make" in ended[0].out
    assert ended[1].out == ""
    same_bits(folder / "run", never_replanned)
    return len(json.loads(traces[1].read_text()))


AT_ONCE = dict.fromkeys(range(2), "tests.support.process_hooks:replan_at_once")


def test_all_ranks_follow_a_new_plan(replanned):
    assert replanned > 0


@pytest.mark.slow
def test_kill_of_a_rank_around_a_new_plan(forge, inputs, never_replanned, replanned, tmp_path):
    out, boundary = tmp_path / "run", int(0.6 * replanned)
    ended = ranks.run_ranks(
        forge, 2, *replanning(inputs, out), kill_at={1: boundary}, before=AT_ONCE
    )
    assert [e.code for e in ended] == [2, -signal.SIGKILL], ranks.errors_of_ranks(ended)
    ended = ranks.run_ranks(forge, 2, "resume", out, before=AT_ONCE)
    assert [e.code for e in ended] == [0, 0], ranks.errors_of_ranks(ended)
    same_bits(out, never_replanned)


def test_a_rank_that_cannot_follow_a_new_plan(forge, inputs, never_replanned, tmp_path):
    """All ranks stop, earlier steps are committed, and the run can be resumed."""
    out = tmp_path / "run"
    before = {
        0: "tests.support.process_hooks:replan_at_once",
        1: "tests.support.process_hooks:fail_to_replan",
    }
    ended = ranks.run_ranks(forge, 2, *replanning(inputs, out), before=before)
    assert [e.code for e in ended] == [2, 2], ranks.errors_of_ranks(ended)
    assert "no space left for kept activations" in ended[1].err
    assert "rank 1 (process" in ended[0].err and "resume the run with all" in ended[0].err
    assert "Traceback" not in ended[0].err + ended[1].err
    ended = ranks.run_ranks(forge, 2, "resume", out)
    assert [e.code for e in ended] == [0, 0], ranks.errors_of_ranks(ended)
    assert [row["step"] for row in forked_commands.metrics_rows(out)] == list(range(1, 7))
    same_bits(out, never_replanned)


def test_a_trainer_that_cannot_follow_a_new_plan(forge, tmp_path):
    """Its process ends with what went wrong, and the other at once with it."""
    forge.load("transformers.trainer", "lohan.hf.mixin")
    ended = ranks.run_case(forge, 2, "trainers_that_cannot_follow", tmp_path)
    assert all(e.code for e in ended), ranks.errors_of_ranks(ended)
    assert "no space left for kept activations" in ended[1].err
    assert "collective mismatch" not in ended[0].err + ended[1].err
    # Rank 0 names rank 1 only if that process has ended within a moment.
    assert "so rank 0 stops too" in ended[0].err


def test_a_trainer_that_evaluates_first(forge, tmp_path):
    """Its store of the evaluation goes, and the processes stay."""
    forge.load("transformers.trainer", "lohan.hf.mixin")
    ended = ranks.run_case(forge, 2, "trainers_that_evaluate_first", tmp_path)
    assert [e.code for e in ended] == [0, 0], ranks.errors_of_ranks(ended)
    actual = ranks.case_results(tmp_path, 2)
    assert not any(rank["aborted"] for rank in actual)
    assert actual[0]["first"] == actual[1]["first"] and actual[0]["loss"] == actual[1]["loss"]
    assert [rank["again"] for rank in actual] == [rank["loss"] for rank in actual]
    assert not list((tmp_path / "out").glob("lohan-evaluation-*"))


def same_bits(out: Path, other: Path, where: str = "") -> None:
    actual, wanted = (
        [(row["step"], row["loss"]) for row in forked_commands.metrics_rows(o)]
        for o in (out, other)
    )
    assert actual == wanted, where
    lohan_result, expected = exported_weights(out), exported_weights(other)
    assert all(torch.equal(lohan_result[name], expected[name]) for name in expected), where
