"""Inject calls of the C library that fail, are short or are late.

A run ends with the same bits, or with one message and can be resumed to the same bits.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import io_faults
from tests.support.forked_commands import Ended, Forge
from tests.support.io_faults import Fault, seen_and_fired
from tests.support.setting_grids import thinned
from tests.support.tiny_run import Result, arguments, result, write_inputs

pytestmark = pytest.mark.skipif(io_faults.compiler() is None, reason="needs a C compiler (cc)")

LIMIT_S = 150.0  # a drive that does not answer is given up after 60 s
HARMLESS = ("short", "delay", "EINTR", "EAGAIN")  # what a kernel may do at any time
THREADS = ("pread", "pwrite")  # calls of that engine
KINDS = {
    "pread": ("EIO", "short", "delay"),
    "pwrite": ("EIO", "ENOSPC", "short", "delay"),
    "write": ("EIO", "ENOSPC", "short"),
    "fsync": ("EIO", "ENOSPC"),
    "fdatasync": ("EIO", "ENOSPC"),
    "fallocate": ("EIO", "ENOSPC", "EINTR"),
    "rename": ("EIO", "ENOSPC"),
    "io_uring_enter": ("EIO", "EINTR", "EAGAIN"),
}


@pytest.fixture(scope="module")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    result = Forge(tmp_path_factory.mktemp("forge"), env=io_faults.preloaded())
    yield result
    result.close()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def run(forge: Forge, fault: Fault, out: Path, *words: object) -> tuple[Ended, int, int]:
    """Return the outcome, the number of calls, and the number of faults."""
    tally = out.with_name(f"{out.name}-tally")
    tally.unlink(missing_ok=True)
    env = fault.env(out, tally)
    ended = forge.start(*words, before="io_faults:arm", env=env).wait(LIMIT_S)
    assert ended.code != -signal.SIGKILL, f"{fault}: it hung\n{ended.out}\n{ended.err}"
    return ended, *seen_and_fired(tally)


@pytest.fixture(scope="module")
def whole(forge: Forge, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    out = tmp_path_factory.mktemp("whole") / "run"
    ended, seen, fired = run(
        forge, Fault("pwrite", 10**9, "EIO", "threads"), out, "train", *arguments(inputs, out)
    )
    assert ended.code == 0, ended.err
    assert seen > 20 and fired == 0, "the library sees the calls"
    return result(out)


def one_message(fault: Fault, ended: Ended) -> None:
    assert ended.code == 2, f"{fault}: {ended.code}\n{ended.out}\n{ended.err}"
    assert "Traceback" not in ended.err, f"{fault}\n{ended.err}"
    assert ended.err.count("lohan: ") == 1, f"{fault}\n{ended.err}"


def with_fault(forge: Forge, fault: Fault, inputs: Path, whole: Result, out: Path) -> str:
    """Run with a fault and return the outcome.

    "same" means the same bits at once, "told" an error message and then a resumed run, and ""
    that the run has fewer such calls.
    """
    ended, _, fired = run(forge, fault, out, "train", *arguments(inputs, out))
    if not fired:
        return ""
    if ended.code == 0:
        assert result(out) == whole, str(fault)
        return "same"
    assert fault.kind not in HARMLESS, f"{fault}\n{ended.err}"
    one_message(fault, ended)
    again = forge.start("train", *arguments(inputs, out)).wait(LIMIT_S)
    if again.code == 2 and f"lohan resume {out}" in again.err:
        again = forge.start("resume", out).wait(LIMIT_S)
    assert again.code == 0, f"after {fault}: {ended.err}\n{again.err}"
    assert result(out) == whole, str(fault)
    return "told"


def engine_of(call: str) -> str:
    return "threads" if call in THREADS else "auto"


QUICK = [
    Fault("pread", 9, "EIO", "threads"),
    Fault("pread", 1, "short", "threads", every=True),
    Fault("pwrite", 25, "EIO", "threads"),
    Fault("pwrite", 60, "ENOSPC", "threads", every=True),
    Fault("pwrite", 1, "short", "threads", every=True),
    Fault("write", 4, "ENOSPC"),
    Fault("fsync", 12, "EIO"),
    Fault("fdatasync", 3, "EIO"),
    Fault("fallocate", 1, "ENOSPC"),
    Fault("rename", 5, "EIO"),
    Fault("io_uring_enter", 2, "EIO"),
    Fault("io_uring_enter", 20, "EAGAIN"),
]


@pytest.mark.parametrize("fault", thinned(QUICK, 0, 3, 4, 6, 9, 10), ids=str)
def test_fault(fault: Fault, forge: Forge, inputs: Path, whole: Result, tmp_path: Path) -> None:
    outcome = with_fault(forge, fault, inputs, whole, tmp_path / "run")
    if not outcome and fault.call == "io_uring_enter":
        pytest.skip("no io_uring here")
    assert outcome == ("same" if fault.kind in HARMLESS else "told")


@pytest.mark.slow
@pytest.mark.parametrize(("call", "kind"), [(c, k) for c, kinds in KINDS.items() for k in kinds])
def test_faults_at_calls_spread_over_a_whole_run(
    call: str, kind: str, forge: Forge, inputs: Path, whole: Result, tmp_path: Path
) -> None:
    """The first calls one by one, then further and further apart, until a run has no more."""
    at, tally = 1, Counter[str]()
    while outcome := with_fault(
        forge, Fault(call, at, kind, engine_of(call)), inputs, whole, tmp_path / str(at)
    ):
        at += 1 + at // 6
        tally[outcome] += 1
    if call == "io_uring_enter" and not tally:
        pytest.skip("no io_uring here")
    assert tally
    print(f"{call} {kind}: {dict(tally)} of less than {at} calls")
