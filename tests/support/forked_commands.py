"""The command line in processes of its own, and a run of one second to interrupt there.

A `Forge` is one Python process that has imported everything and started nothing. Each run is a fork
of it: a real process with a pid, which can be killed at a chosen boundary between two operations
on files, or by a signal from outside. Run as a script, this file is that process. It imports no
large library before that.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# -- processes -------------------------------------------------------------------------------------

READY = "ready"
# As numbered by a trace of the same run; or its name and how many of that name come before it; or
# so many boundaries behind that one.
Boundary = int | tuple[str, int] | tuple[str, int, int]


@dataclass(frozen=True)
class Ended:
    """`code` is negative for a signal, as in subprocess."""

    code: int
    out: str
    err: str


class Run:
    def __init__(self, forge: Forge, pid: int, place: Path) -> None:
        self._forge, self.pid, self._place = forge, pid, place

    def output(self, name: str = "out") -> str:
        """Also "err". A process that was killed at once has none."""
        file = self._place / name
        return file.read_text() if file.exists() else ""

    def wait(self, limit_s: float | None = None) -> Ended:
        """Wait for the process to end; kill it after `limit_s` seconds."""
        timer = threading.Timer(limit_s or 0.0, os.kill, (self.pid, signal.SIGKILL))
        if limit_s is not None:
            timer.start()
        code = self._forge.ask({"wait": self.pid})
        timer.cancel()
        return Ended(code, self.output(), self.output("err"))


class Forge:
    def __init__(self, folder: Path, *, env: Mapping[str, str] | None = None) -> None:
        """`env`: variables for all of its processes."""
        self._folder, self._runs = folder, 0
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        assert self._answer() == READY

    def start(
        self,
        *args: object,
        kill_at: Boundary | None = None,
        trace: Path | None = None,
        before: str = "",
        env: Mapping[str, str] | None = None,
    ) -> Run:
        """Run `lohan ARGS`, killed at a boundary if `kill_at` is given.

        `trace` is a file for the names of the boundaries that it crosses, `before` a
        function, `module:name`, to call in the process first, and `env` are variables of
        its environment.
        """
        self._runs += 1
        place = self._folder / f"process-{self._runs}"
        place.mkdir()
        request = {
            "argv": ["lohan", *map(str, args)],
            "place": str(place),
            "kill_at": kill_at,
            "trace": str(trace) if trace else None,
            "before": before,
            "env": dict(env or {}),
        }
        return Run(self, self.ask(request), place)

    def run(self, *args: object, **options: Any) -> Ended:
        return self.start(*args, **options).wait()

    def load(self, *modules: str) -> None:
        """Import modules, so that later runs need not import them one by one."""
        self.ask({"load": modules})

    def ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


# -- a run of one second ---------------------------------------------------------------------------

TINY_STEPS = 6
# The exported weights, and step, loss and rate of every step. It must not depend on how often the
# run was interrupted.
TinyResult = tuple[bytes, list[tuple[int, float, float]]]


def write_tiny_inputs(folder: Path, *, vocab_size: int = 64) -> Path:
    """Write a tiny Llama with dropout, and tokenised data of different lengths."""
    from transformers import LlamaConfig

    from tests.support.model_folders import write_random_checkpoint

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attention_dropout=0.1,
        bos_token_id=1,
        eos_token_id=2,
    )
    write_random_checkpoint(folder / "model", config)
    rows = [{"input_ids": [(i * j) % 64 for j in range(1, 6 + i % 11)]} for i in range(20)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def tiny_arguments(inputs: Path, out: Path, *more: object) -> list[object]:
    """Return the command line of the run.

    The activations are given, so that the run does not replan by the clock and its writes come
    in the same order each time.
    """
    return [
        "--model",
        inputs / "model",
        "--data",
        inputs / "data.jsonl",
        "--out",
        out,
        "--host",
        "400KiB",
        "--steps",
        TINY_STEPS,
        "--batch",
        2,
        "--micro-batch",
        1,
        "--seq",
        16,
        "--lr",
        "1e-3",
        "--weight-decay",
        "0.1",
        "--activations",
        "recompute",
        *more,
    ]


def tiny_result(out: Path) -> TinyResult:
    """Return the exported weights and the rows of all steps, without those of evaluations."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    weights = (out / "model" / "model.safetensors").read_bytes()
    return weights, [(row["step"], row["loss"], row["lr"]) for row in rows if "loss" in row]


def metrics_rows(out: Path) -> list[dict[str, Any]]:
    """Return the log of a run."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


# -- in the forge's process -----------------------------------------------------------------------


class Boundaries:
    """Counts the operations on files; two boundaries each, before and after."""

    def __init__(self, kill_at: int | list[Any] | None) -> None:
        self.names: list[str] = []
        self._kill_at = kill_at

    def cross(self, name: str) -> None:
        here, at = [name, self.names.count(name)], self._kill_at
        if isinstance(at, list) and at[:2] == here:
            self._kill_at = len(self.names) + sum(at[2:])
        if self._kill_at == len(self.names):
            os.kill(os.getpid(), signal.SIGKILL)
        self.names.append(name)

    def watch(self, owner: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.cross(name)
            result = original(*args, **kwargs)
            self.cross(f"{name} done")
            return result

        setattr(owner, name, watched)


boundaries = Boundaries(None)  # of a child


def child(request: dict[str, Any]) -> int:
    global boundaries
    import traceback

    import torch

    from lohan.__main__ import main
    from lohan.store.io_engine import Volume

    place = Path(request["place"])
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(place / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
    boundaries = Boundaries(request["kill_at"])
    for owner, name in (
        (os, "fsync"),
        (os, "replace"),
        (os, "rename"),
        (os, "mkdir"),
        (Volume, "write"),
        (Volume, "wait"),
        (Volume, "sync"),
    ):
        boundaries.watch(owner, name)
    sys.argv = request["argv"]
    os.environ.update(request["env"])
    if request["env"]:
        torch.set_num_threads(1)  # processes that work side by side
    if request["before"]:
        module, name = request["before"].split(":")
        getattr(importlib.import_module(module), name)()
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if request["trace"]:
        Path(request["trace"]).write_text(json.dumps(boundaries.names))
    return code


def warm_up() -> None:
    """Plan a tiny run, so that every fork starts with modules and caches loaded.

    This includes what torch caches about operations on fake tensors. No thread is started,
    since forks would lack it.
    """
    from contextlib import redirect_stdout, suppress
    from tempfile import TemporaryDirectory

    from lohan.__main__ import main

    sys.path.insert(0, str(Path(__file__).parents[2]))
    pass

    sys.path.insert(0, str(Path(__file__).parents[2]))
    with TemporaryDirectory() as place, open(os.devnull, "w") as nothing, redirect_stdout(nothing):
        model = write_tiny_inputs(Path(place)) / "model"
        words = ("--model", model, "--host", "400KiB", "--batch", 2, "--seq", 16)
        sys.argv = ["lohan", "plan", *map(str, words)]
        with suppress(SystemExit):
            main()
    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1, "a thread would be missing in every fork"


def serve() -> None:
    import transformers.models.auto.modeling_auto
    import transformers.models.llama.modeling_llama  # noqa: F401

    import lohan.train.trainer  # noqa: F401

    warm_up()
    gc.collect()
    gc.freeze()  # or collections in a fork would copy, page by page, what they only look at
    print(json.dumps(READY), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        elif "load" in request:
            answer = [importlib.import_module(name).__name__ for name in request["load"]]
            gc.collect()
            gc.freeze()
        else:
            answer = os.fork()
            if answer == 0:
                os._exit(child(request))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose modules would hide installed ones of the same name
    serve()
