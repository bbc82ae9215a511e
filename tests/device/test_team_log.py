"""Several ranks that log gradients: the bits of a run without a log, also if a rank is killed."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pytest
import torch

from tests.support import forked_commands, ranks
from tests.support.forked_commands import Forge
from tests.support.ranks import (
    exported_weights,
    rank_arguments,
    rank_inputs_fixture,  # noqa: F401 - a fixture
)

LOGGED = ("--clip", 0.7, "--log-gradients", 3)
Boundaries = list[list[str]]  # the operations on files of each rank


@pytest.fixture(scope="module")
def plain(forge: Forge, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("plain") / "run"
    trained(forge, rank_arguments(inputs, out, "--clip", 0.7))
    return out


@pytest.fixture(scope="module")
def logged(
    forge: Forge, inputs: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Boundaries]:
    folder = tmp_path_factory.mktemp("logged")
    traces = {rank: folder / f"trace-{rank}" for rank in range(2)}
    trained(forge, rank_arguments(inputs, folder / "run", *LOGGED), trace=traces)
    return folder / "run", [json.loads(path.read_text()) for path in traces.values()]


def trained(forge: Forge, words: list[object], **options: object) -> None:
    ended = ranks.run_ranks(forge, 2, *words, **options)  # type: ignore[arg-type]
    assert [e.code for e in ended] == [0, 0], ranks.errors_of_ranks(ended)


def check_same_bits(out: Path, expected: Path) -> None:
    rows, wanted = forked_commands.metrics_rows(out), forked_commands.metrics_rows(expected)
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in rows] == [row[key] for row in wanted]
    actual, reference = exported_weights(out), exported_weights(expected)
    assert all(torch.equal(actual[name], tensor) for name, tensor in reference.items())


def test_has_the_bits_of_a_run_without_a_log(plain: Path, logged: tuple[Path, Boundaries]) -> None:
    check_same_bits(logged[0], plain)


@pytest.mark.slow
def test_weights_that_do_not_fit_in_memory(forge: Forge, inputs: Path, tmp_path: Path) -> None:
    """The memory also decides the slices of the head, so both runs have the same."""
    small = ("--clip", 0.7, "--host", "1280KiB")
    trained(forge, rank_arguments(inputs, tmp_path / "plain", *small, "--log-gradients", "off"))
    trained(forge, rank_arguments(inputs, tmp_path / "logged", *small, "--log-gradients", 3))
    check_same_bits(tmp_path / "logged", tmp_path / "plain")


def kill_and_resume(
    forge: Forge, inputs: Path, plain: Path, out: Path, *, rank: int, boundary: int
) -> None:
    words = rank_arguments(inputs, out, *LOGGED)
    ended = ranks.run_ranks(forge, 2, *words, kill_at={rank: boundary})
    assert ended[rank].code == -signal.SIGKILL
    assert ended[1 - rank].code == 2, ended[1 - rank].err
    ended = ranks.run_ranks(forge, 2, *words)
    if f"lohan resume {out}" in ended[0].err:
        ended = ranks.run_ranks(forge, 2, "resume", out)
    assert [e.code for e in ended] == [0, 0], ranks.errors_of_ranks(ended)
    check_same_bits(out, plain)


@pytest.mark.parametrize("later", [0, 1])
def test_kill_around_the_commit_of_a_logged_step(
    forge: Forge,
    inputs: Path,
    plain: Path,
    logged: tuple[Path, Boundaries],
    tmp_path: Path,
    later: int,
) -> None:
    """The rank has prepared the step and may have committed it; so may the other one."""
    replaced = [number for number, name in enumerate(logged[1][1]) if name == "replace"]
    boundary = replaced[2 * len(replaced) // 3 + later]
    kill_and_resume(forge, inputs, plain, tmp_path / "run", rank=1, boundary=boundary)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_kill_anywhere(
    forge: Forge,
    inputs: Path,
    plain: Path,
    logged: tuple[Path, Boundaries],
    tmp_path: Path,
    number: int,
) -> None:
    draw, rank = random.Random(number), number % 2
    boundary = draw.randrange(len(logged[1][rank]))
    kill_and_resume(forge, inputs, plain, tmp_path / "run", rank=rank, boundary=boundary)
