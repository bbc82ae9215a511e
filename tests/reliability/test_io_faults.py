"""Inject calls of the C library that fail, are short or are late.

A run ends with the same bits, or with one message and can be resumed to the same bits.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import faults
from tests.support.faults import CallFault, counted_calls
from tests.support.forked_commands import (
    Ended,
    Forge,
    TinyResult,
    tiny_arguments,
    tiny_result,
    write_tiny_inputs,
)
from tests.support.generated_cases import thinned

pytestmark = pytest.mark.skipif(faults.c_compiler() is None, reason="needs a C compiler (cc)")

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
    result = Forge(tmp_path_factory.mktemp("forge"), env=faults.preload_environment())
    yield result
    result.close()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_inputs(tmp_path_factory.mktemp("inputs"))


def run(forge: Forge, fault: CallFault, out: Path, *words: object) -> tuple[Ended, int, int]:
    """Return the outcome, the number of calls, and the number of faults."""
    tally = out.with_name(f"{out.name}-tally")
    tally.unlink(missing_ok=True)
    env = fault.env(out, tally)
    ended = forge.start(*words, before="tests.support.faults:arm_call_fault", env=env).wait(LIMIT_S)
    assert ended.code != -signal.SIGKILL, f"{fault}: it hung\n{ended.out}\n{ended.err}"
    return ended, *counted_calls(tally)


@pytest.fixture(scope="module")
def whole(forge: Forge, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> TinyResult:
    out = tmp_path_factory.mktemp("whole") / "run"
    ended, seen, fired = run(
        forge,
        CallFault("pwrite", 10**9, "EIO", "threads"),
        out,
        "train",
        *tiny_arguments(inputs, out),
    )
    assert ended.code == 0, ended.err
    assert seen > 20 and fired == 0, "the library sees the calls"
    return tiny_result(out)


def one_message(fault: CallFault, ended: Ended) -> None:
    assert ended.code == 2, f"{fault}: {ended.code}\n{ended.out}\n{ended.err}"
    assert "Traceback" not in ended.err, f"{fault}\n{ended.err}"
    assert ended.err.count("lohan: ") == 1, f"{fault}\n{ended.err}"


def with_fault(forge: Forge, fault: CallFault, inputs: Path, whole: TinyResult, out: Path) -> str:
    """Run with a fault and return the outcome.

    "same" means the same bits at once, "told" an error message and then a resumed run, and ""
    that the run has fewer such calls.
    """
    ended, _, fired = run(forge, fault, out, "train", *tiny_arguments(inputs, out))
    if not fired:
        return ""
    if ended.code == 0:
        assert tiny_result(out) == whole, str(fault)
        return "same"
    assert fault.kind not in HARMLESS, f"{fault}\n{ended.err}"
    one_message(fault, ended)
    again = forge.start("train", *tiny_arguments(inputs, out)).wait(LIMIT_S)
    if again.code == 2 and f"lohan resume {out}" in again.err:
        again = forge.start("resume", out).wait(LIMIT_S)
    assert again.code == 0, f"after {fault}: {ended.err}\n{again.err}"
    assert tiny_result(out) == whole, str(fault)
    return "told"


def engine_of(call: str) -> str:
    return "threads" if call in THREADS else "auto"


QUICK = [
    CallFault("pread", 9, "EIO", "threads"),
    CallFault("pread", 1, "short", "threads", every=True),
    CallFault("pwrite", 25, "EIO", "threads"),
    CallFault("pwrite", 60, "ENOSPC", "threads", every=True),
    CallFault("pwrite", 1, "short", "threads", every=True),
    CallFault("write", 4, "ENOSPC"),
    CallFault("fsync", 12, "EIO"),
    CallFault("fdatasync", 3, "EIO"),
    CallFault("fallocate", 1, "ENOSPC"),
    CallFault("rename", 5, "EIO"),
    CallFault("io_uring_enter", 2, "EIO"),
    CallFault("io_uring_enter", 20, "EAGAIN"),
]


@pytest.mark.parametrize("fault", thinned(QUICK, 0, 3, 4, 6, 9, 10), ids=str)
def test_fault(
    fault: CallFault, forge: Forge, inputs: Path, whole: TinyResult, tmp_path: Path
) -> None:
    outcome = with_fault(forge, fault, inputs, whole, tmp_path / "run")
    if not outcome and fault.call == "io_uring_enter":
        pytest.skip("no io_uring here")
    assert outcome == ("same" if fault.kind in HARMLESS else "told")


@pytest.mark.slow
@pytest.mark.parametrize(("call", "kind"), [(c, k) for c, kinds in KINDS.items() for k in kinds])
def test_faults_at_calls_spread_over_a_whole_run(
    call: str, kind: str, forge: Forge, inputs: Path, whole: TinyResult, tmp_path: Path
) -> None:
    """The first calls one by one, then further and further apart, until a run has no more."""
    at, tally = 1, Counter[str]()
    while outcome := with_fault(
        forge, CallFault(call, at, kind, engine_of(call)), inputs, whole, tmp_path / str(at)
    ):
        at += 1 + at // 6
        tally[outcome] += 1
    if call == "io_uring_enter" and not tally:
        pytest.skip("no io_uring here")
    assert tally
    print(f"{call} {kind}: {dict(tally)} of less than {at} calls")
