"""Start of several ranks on this machine, each in its own process, as torchrun does.

The starting process only waits. The ranks have their own process groups, so a Ctrl-C reaches only
the starting process, which forwards it to each rank once. If a rank fails, the others detect it and
stop. Ranks that do not stop in time are killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from lohan.errors import ConfigError
from lohan.model.layout import RankInfo

GRACE_S = 45.0  # time for the other ranks to stop after a rank has failed
POLL_S = 0.05
EXIT_ERROR, EXIT_INTERRUPTED = 2, 128 + signal.SIGINT
# names a folder in which ranks record the messages they have printed
MESSAGES_VARIABLE = "LOHAN_SAID"
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def is_rank(env: Mapping[str, str] | None = None) -> bool:
    """Return whether torchrun or `launch` started this process as one of several."""
    return "WORLD_SIZE" in (os.environ if env is None else env)


def as_ranks(world: int) -> None:
    """Run the command of this process as `world` ranks, and exit with their overall exit code.

    Do nothing if `world` is 1, or if this process is itself a rank.
    """
    if is_rank():
        started = os.environ["WORLD_SIZE"]
        if world > 1 and started != str(world):
            raise ConfigError(
                f"--gpus {world}, and this is one of {started} ranks that torchrun has started; "
                "leave --gpus out"
            )
    elif world > 1:
        arguments = ["-m", "lohan", *sys.argv[1:]]
        sys.exit(launch(world, arguments, note=lambda text: print(text, file=sys.stderr)))


def launch(
    world: int, arguments: Sequence[str], *, note: Callable[[str], None], grace_s: float = GRACE_S
) -> int:
    """Run Python with these arguments as `world` ranks, and return the overall exit code."""
    from tempfile import TemporaryDirectory

    port = _free_port()
    ranks: list[subprocess.Popen[bytes]] = []
    with _passing_on(ranks), TemporaryDirectory(prefix="lohan-ranks-") as messages:
        env = {**os.environ, MESSAGES_VARIABLE: messages}
        for rank_info in RankInfo(world=world).all():
            ranks.append(_start(arguments, environment(rank_info, port, env)))
        _wait(ranks, grace_s)
    return _outcome([rank.returncode for rank in ranks], note)


def environment(rank: RankInfo, port: int, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a rank, with the variables that torchrun sets.

    If OMP_NUM_THREADS is not set, the rank gets its share of the cores.
    """
    cores = max(1, len(os.sched_getaffinity(0)) // rank.world)
    variables = {
        "RANK": rank.rank,
        "LOCAL_RANK": rank.rank,
        "WORLD_SIZE": rank.world,
        "LOCAL_WORLD_SIZE": rank.world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    return {"OMP_NUM_THREADS": str(cores), **env, **{k: str(v) for k, v in variables.items()}}


def is_first_to_print(message: str, env: Mapping[str, str] | None = None) -> bool:
    """Return whether no other rank of this launch has printed the same message.

    It is always True for ranks started by torchrun, which do not share a folder of messages.
    """
    from hashlib import sha256

    folder = (os.environ if env is None else env).get(MESSAGES_VARIABLE)
    if folder is None:
        return True
    try:
        (Path(folder) / sha256(message.encode()).hexdigest()).touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # a repeated message is better than a lost one
        pass
    return True


def _start(arguments: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=env,
        process_group=0,
        stdin=subprocess.DEVNULL,
        preexec_fn=_end_with_parent,
    )


def _end_with_parent() -> None:
    """Send SIGTERM to this rank if its parent dies, so that it finishes its step."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _wait(ranks: Sequence[subprocess.Popen[bytes]], grace_s: float) -> None:
    """Wait until all ranks have ended; kill them `grace_s` seconds after the first failure."""
    end_s = float("inf")
    while None in (codes := [rank.poll() for rank in ranks]):
        if end_s == float("inf") and any(codes):
            end_s = time.monotonic() + grace_s
        if time.monotonic() > end_s:
            for rank in ranks:
                rank.kill()
        time.sleep(POLL_S)


def _outcome(codes: Sequence[int], note: Callable[[str], None]) -> int:
    """Return the overall exit code, and report ranks that were killed.

    A killed rank cannot report its own end. This includes a rank that a Ctrl-C killed before the
    rank was able to catch it.
    """
    if codes[0] == -signal.SIGINT:
        note("lohan: interrupted")
    codes = [EXIT_INTERRUPTED if code == -signal.SIGINT else code for code in codes]
    for rank, code in enumerate(codes):
        if code < 0:
            note(f"rank {rank} was ended by {signal.Signals(-code).name}")
    failed = [code for code in codes if code]
    if not failed:
        return 0
    return EXIT_ERROR if EXIT_ERROR in failed or min(failed) < 0 else failed[0]


@contextmanager
def _passing_on(ranks: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    def pass_on(number: int, frame: object) -> None:
        for rank in ranks:
            rank.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
