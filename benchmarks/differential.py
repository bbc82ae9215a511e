"""Random configurations of LoHan, each compared with the serial path and with plain PyTorch.

python benchmarks/differential.py --cases 2000 --seed 0 --minutes 60
python benchmarks/differential.py --seed 1234 --cases 1
python benchmarks/differential.py --case '{"model": "gpt2", "clip": 0.05}'

A case is a model, options, budgets, a device, and events between and inside of steps. Its run with
everything overlapped must have the bits of a run with `overlap=False` in ample memory and without
the events, and the values of PyTorch in memory. Where rounding decides about the difference, both
are compared with PyTorch in fp64. A LohanError is a legitimate outcome and is counted; any other
exception, a difference, a crash and a hang are findings. Findings are shrunk to a configuration
without what they do not need. Case number N is the same whenever it is drawn.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import pickle
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: threads would only wait
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

Case = dict[str, Any]

MOST_CPU_S = 100.0  # Of one process of a case; most take less than one second.
DEADLINE_S = 300.0  # for one process of a case, on a machine with other work
SHRINKING_TRIES, SHRINKING_S = 60, 120.0
DEFAULT_SHARE = 0.55  # The share of the draws of an axis that take its first, simplest value.
# The same for axes whose other values make the planner trace the model, which takes the most time.
COSTLY = {"known_batch": 0.75, "host": 0.8, "device_memory": 0.8}
KINDS = (88, 8, 4)  # weights of the kinds of case; one of `lohan train` costs as much as ten others
SLOW = {"llama", "gpt2", "tied", "moe", "t5", "bert"}  # Models that are slow to trace and to run.
TRACED_SHARE = 0.15  # The share of cases of slow models with a known batch that keep it.

# The axes of a case: values to draw, the simplest first. A value that is listed more than once is
# drawn more often.
AXES: dict[str, list[Any]] = {
    "kind": ["session", "ranks", "train"],
    "model": [
        "llama",
        "gpt2",
        "tied",
        "moe",
        "t5",
        "bert",
        "lstm",
        "conv",
        "batchnorm",
        "experts",
        "net",
        "net-tied",
        "net-shared",
        "streams",
        "counting",
        "centred",
        "outside",
    ],
    "dtype": ["fp32", "bf16", "bf16", "fp16", "fp16"],
    "cast": ["model", "attach"],
    "dropout": [0.0, 0.2],
    "frozen": ["none", "first", "vectors"],
    "lora": [0, 2, 3],
    "base": ["", "nf4", "int8", "fp8"],
    "optimizer": ["adamw", "sgd", "lion"],
    "moments": ["fp32", "bf16", "int8"],
    "ema": [0.0, 0.5],
    "clip": [0.0, 0.05, 1.0, 1000.0],
    "accumulate": [1, 2, 3],
    "loss_factor": [1.0, 0.5],
    "update_mode": ["balanced", "serial", "naive", "optimized"],
    "activations": ["recompute", "holistic", "all"],
    "micro_batch": [None, 1, 2, 3],
    "tiles": ["off", "auto", 3, 4],
    "run_again": [False, True],
    "batch": [2, 3, 4],
    "seq": [6, 9, 12],
    "steps": [3, 2, 4],
    "known_batch": [False, True],
    "host": ["large", 1.0, 1.0, 1.02, 1.2, 2.0, 0.97],
    "device": ["cpu", "emulated"],
    "device_memory": ["large", 1.0, 1.0, 1.02, 1.2, 2.0, 0.97],
    "commit_every": ["step", 2, "auto", "10min"],
    "delays": [0, 1, 2, 3],
    "events": [[]],
    "pack": [False, True],
    "eval_split": [0.0, 0.2],
    "kill": [0, 5, 12, 20, 30, 45],
}
EVENTS = [
    "eval",
    "inference",
    "forward",
    "state_dict",
    "deepcopy",
    "flush",
    "commit",
    "export",
    "resume",
    "replan",
    "forward_error",
    "backward_error",
    "out_of_memory",
    "oom_guard",
]
ERRORS = {"forward_error", "backward_error", "out_of_memory", "oom_guard"}
TRAIN_AXES = {"pack", "eval_split", "kill"}  # of `lohan train` alone
TRAIN_MODELS = ["llama", "gpt2", "tied", "moe"]
SIMPLEST: Case = {axis: values[0] for axis, values in AXES.items()}


# -- drawing --------------------------------------------------------------------------------------


def draw(number: int) -> Case:
    """Return case `number`: a random value for every axis, after resolving conflicts."""
    from benchmarks.differential_models import FAMILIES

    rng = random.Random(number)
    case = dict(SIMPLEST)
    case["kind"] = rng.choices(AXES["kind"], KINDS)[0]
    case["model"] = rng.choice(AXES["model"] if case["kind"] != "train" else TRAIN_MODELS)
    if case["kind"] != "train" and case["model"] in SLOW and rng.random() < 0.5:
        case["model"] = rng.choice([model for model in AXES["model"] if model not in SLOW])
    for axis, values in AXES.items():
        if axis in ("kind", "model", "events"):
            continue
        if len(values) > 1 and rng.random() > COSTLY.get(axis, DEFAULT_SHARE):
            case[axis] = rng.choice(values[1:])
    case["events"] = draw_events(case, rng)
    if not FAMILIES[case["model"]].adapters:
        case["lora"] = 0
    if rng.random() > 0.03:  # A few cases keep their conflicts and must be refused.
        mend(case, rng)
    if FAMILIES[case["model"]].stateful:  # a forward done twice counts twice, in PyTorch too
        twice = ERRORS | {"forward"}
        case["events"] = [event for event in case["events"] if event[1] not in twice]
        case["run_again"] = False
    if not case["known_batch"]:  # Then the plan leaves no room for activations.
        case["host"] = case["device_memory"] = "large"
    return case


def draw_events(case: Case, rng: random.Random) -> list[list[Any]]:
    if case["kind"] == "train":
        return []
    count = rng.choice((0, 0, 1, 1, 2, 3, 4))
    events = [[rng.randrange(case["steps"]), rng.choice(EVENTS)] for _ in range(count)]
    if case["kind"] == "ranks":  # an error on one rank ends all of them
        single = ERRORS | {"state_dict", "deepcopy"}
        events = [event for event in events if event[1] not in single]
    if any(event[1] in ("out_of_memory", "oom_guard") for event in events):
        case["device"] = "emulated"
    return sorted(events)


def mend(case: Case, rng: random.Random) -> None:
    """Change settings that LoHan would refuse for reasons that the case does not test."""
    from benchmarks.differential_models import FAMILIES

    family = FAMILIES[case["model"]]
    if case["lora"]:
        case["frozen"] = "none"
    else:
        case["base"] = ""
    if case["dtype"] == "fp16" and not family.causal:
        case["dtype"] = rng.choice(("fp32", "bf16"))
    if not family.dropout:
        case["dropout"] = 0.0
    if case["micro_batch"]:
        case["micro_batch"] = min(case["micro_batch"], case["batch"])
    if case["device"] == "cpu":
        case["device_memory"] = "large"
    near_least = case["host"] != "large" or case["device_memory"] != "large"
    if near_least:
        case["known_batch"] = True
    if case["model"] in SLOW and rng.random() > TRACED_SHARE:
        case["known_batch"] = False
    if not case["known_batch"]:  # Nothing is known of activations then.
        case["activations"], case["tiles"] = "recompute", "off"
        case["events"] = [e for e in case["events"] if e[1] not in ("replan", "oom_guard")]
    if case["accumulate"] > 1:
        case["run_again"] = False
    for event in case["events"]:  # The guard watches the first steps of a plan only.
        if event[1] == "oom_guard":
            event[0] = 0
    mend_kind(case, rng)


def mend_kind(case: Case, rng: random.Random) -> None:
    """Make a case consistent with what several ranks and `lohan train` support."""
    if case["kind"] != "train":
        for axis in TRAIN_AXES:
            case[axis] = SIMPLEST[axis]
    if case["kind"] == "ranks":
        case["run_again"] = False
        case["batch"] = rng.choice((2, 4))
        case["micro_batch"] = 1 if case["micro_batch"] else None
    if case["kind"] == "train":
        if case["device"] == "cpu" and rng.random() < 0.4:
            case["ranks"] = 2
        case["known_batch"], case["run_again"], case["accumulate"] = True, False, 1
        case["frozen"], case["loss_factor"], case["cast"], case["delays"] = "none", 1.0, "model", 0
        if case["model"] == "gpt2":
            case["pack"] = False


def only_changes(case: Mapping[str, Any]) -> Case:
    """Return the axes of a case that are not at their simplest value."""
    return {axis: value for axis, value in case.items() if value != SIMPLEST.get(axis)}


# -- one case -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The end of a case: "same", "refused" or the kind of finding, with a description."""

    status: str
    detail: str = ""
    seconds: float = 0.0

    @property
    def is_finding(self) -> bool:
        return self.status not in ("same", "refused")

    @property
    def signature(self) -> str:
        """The text that other cases with the same cause are expected to share."""
        first = self.detail.splitlines()[0] if self.detail else ""
        return f"{self.status}: {re.sub(r'[0-9.]+', '#', first)[:160]}"


class Found(Exception):
    """Ends a case with a finding. `status` is its kind."""

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class Refused(Exception):
    """Ends a case that LoHan has refused."""


def run_case(case: Case, work: Path) -> Outcome:
    """Run all sides of a case, each in a process of its own, and compare them."""
    folder = Path(tempfile.mkdtemp(prefix="case-", dir=work))
    start = time.monotonic()
    try:
        (compare_train if case["kind"] == "train" else compare_sessions)(case, folder)
        status, detail = "same", ""
    except Refused as refused:
        status, detail = "refused", str(refused)
    except Found as found:
        status, detail = found.status, str(found)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Outcome(status, detail, time.monotonic() - start)


def compare_sessions(case: Case, folder: Path) -> None:
    def side(group: Any) -> dict[str, Any]:
        compare_on_rank(case, folder, group)
        return {}

    in_processes(folder / "sessions", side, 2 if case["kind"] == "ranks" else 1)


def compare_on_rank(case: Case, folder: Path, group: Any) -> None:
    """Run all sides of a case one after the other in this process, or as one of its ranks."""
    from benchmarks.differential_runs import SessionRun, plain_run
    from lohan.errors import LohanError
    from lohan.model.plan import Plan

    result = SessionRun(case, folder / "overlapped", group=group).run()
    # Otherwise, a smaller plan was followed after running out of memory.
    if len(result["numerics"]) == 1:
        reference = Plan.from_json(result["plan"])
        try:
            serial = SessionRun(case, folder / "serial", reference=reference, group=group).run()
        except LohanError as error:
            raise Found("refused by the serial path alone", str(error)) from error
        check_bits(case, result, serial)
    if not group.ranks.first or not comparable_with_torch(case, result):
        return
    plain = plain_run(case, result)
    try:
        check_values(case, result, plain, None, ranks=group.world)
    except Found:
        if case["dropout"]:  # Dropout draws other numbers in fp64.
            raise
        wide = plain_run(case, result, wide=True)
        check_values(case, result, plain, wide, ranks=group.world)


def compare_train(case: Case, folder: Path) -> None:
    from benchmarks import differential_runs as runs

    world = case.get("ranks", 1)
    folder.mkdir(exist_ok=True)
    in_processes(folder / "inputs", lambda _: runs.write_inputs(case, folder) or {}, 1)

    def command(words: list[str], reference: Any = None, kill: int = 0) -> tuple[Any, Any, str]:
        place = folder / f"{words[0]}-{len(list(folder.iterdir()))}"

        def side(group: Any) -> dict[str, Any]:
            code, plan = runs.train_run(words, reference, kill=kill)
            return {"code": code, "plan": plan}

        ended = in_processes(place, side, world, join=False)
        output = "\n".join(file.read_text()[-3000:] for file in sorted(place.glob("said-*")))
        return [e["code"] for e in ended], ended[0].get("plan"), output

    train = runs.train_arguments(case, folder, serial=False)
    codes, plan, output = command(train, kill=case["kill"])
    if -signal.SIGKILL in codes:
        codes, later, output = command(["resume", str(folder / "run")])
        if "start it again with the same `lohan train` command" in output:
            codes, later, output = command(train)
        plan = later or plan
    check_codes(codes, output)
    codes, _, output = command(runs.train_arguments(case, folder, serial=True), plan)
    check_codes(codes, output)
    results = [runs.train_result(case, folder / name) for name in ("run", "serial")]
    for what in ("losses", "evals", "stored"):
        if repr(results[0][what]) != repr(results[1][what]):
            raise Found("bits", f"lohan train: other {what}\n{results[0]}\n{results[1]}")


def check_codes(codes: list[int], output: str) -> None:
    if set(codes) == {0}:
        return
    if set(codes) <= {0, 2} and "Traceback" not in output:
        raise Refused(output.strip().splitlines()[-1] if output.strip() else "exit code 2")
    lines = [line for line in output.strip().splitlines() if re.match(r"\w+(\.\w+)*: ", line)]
    raise Found("exception", f"{lines[-1] if lines else codes}\nlohan ended with {codes}\n{output}")


# -- processes ------------------------------------------------------------------------------------


def in_processes(
    folder: Path, side: Callable[[Any], dict[str, Any]], world: int, *, join: bool = True
) -> list[dict[str, Any]]:
    """Run `side` in a forked process, or in one per rank, and return the results.

    With `join`, each rank gets the process group and must succeed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environments: list[dict[str, str]] = [{}]
    if world > 1:
        from tests.support.ranks import free_port, rank_environment

        port = free_port()
        environments = [rank_environment(rank, world, port) for rank in range(world)]
    children = []
    for rank, environment_of_rank in enumerate(environments):
        pid = os.fork()
        if pid == 0:
            child(folder, rank, environment_of_rank, side, join=join)
        children.append(pid)
    codes = wait_for(children)
    results: list[dict[str, Any]] = []
    for rank, code in enumerate(codes):
        file = folder / f"result-{rank}.pkl"
        if code == 0 and file.exists():
            results.append(pickle.loads(file.read_bytes()))
        elif not join and code is not None:  # killed, or ended by its launcher's rules
            results.append({"code": code})
        else:
            output = (folder / f"said-{rank}").read_text()[-3000:]
            hung = code is None
            limits = f"{DEADLINE_S:.0f} s or {MOST_CPU_S:.0f} s of the processor"
            what = f"no result after {limits}" if hung else f"ended with {code}"
            raise Found("hang" if hung else "crash", f"{folder.name}: {what}\n{output}")
    raise_failures(results)
    return results


# Messages of a LohanError that indicate a defect of LoHan and not a request that it cannot fulfil.
DEFECTS = ("race on the emulated device", "a bug in LoHan", "hangs", "was written", "ChecksumError")


def raise_failures(results: list[dict[str, Any]]) -> None:
    """Raise the error of the rank that failed first; the loss of that rank is a consequence."""
    failed = [result for result in results if "failure" in result]
    failed.sort(key=lambda result: (result["status"] == "refused", "RankError" in result["trace"]))
    for result in failed:
        failure, trace = result["failure"], result["trace"]
        defect = any(word in failure for word in (*DEFECTS, "RankError"))
        if result["status"] != "refused" or defect:
            status = "exception" if result["status"] == "refused" else result["status"]
            raise Found(status, f"{failure}\n{trace}")
        raise Refused(failure)


def child(
    folder: Path, rank: int, environment: Mapping[str, str], side: Any, *, join: bool
) -> None:
    """Run one side in a fork, write its result and end the process."""
    code = 1
    try:
        os.setpgid(0, 0)
        text = os.open(folder / f"said-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(text, 1)
        os.dup2(text, 2)
        faulthandler.register(signal.SIGUSR2)  # a process that takes too long shows where it is
        os.environ.update(environment)
        result = guarded(side, join=join)
        (folder / f"result-{rank}.pkl").write_bytes(pickle.dumps(result))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def guarded(side: Any, *, join: bool) -> dict[str, Any]:
    """Return the result of a side, or how it failed."""
    import warnings

    from lohan.device.ranks import join as join_ranks
    from lohan.errors import LohanError

    warnings.simplefilter("ignore")
    group = None
    try:
        group = join_ranks() if join else None
        result: dict[str, Any] = side(group)
        if group is not None:
            group.close()
        return result
    except Found as found:
        return {"failure": str(found), "status": found.status, "trace": ""}
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lohan_frames = [f for f in frames if "/lohan/" in f.filename] or list(frames)
        where = (
            f"{Path(lohan_frames[-1].filename).name}:{lohan_frames[-1].name}"
            if lohan_frames
            else ""
        )
        return {
            "failure": f"{type(error).__name__} in {where}: {error}",
            "status": "refused" if isinstance(error, LohanError) else "exception",
            "trace": "".join(traceback.format_exception(error))[-4000:],
        }


def wait_for(children: Sequence[int]) -> list[int | None]:
    """Return the exit codes of processes; None for those that took too long and were killed."""
    codes: dict[int, int | None] = {}
    until = time.monotonic() + DEADLINE_S
    while len(codes) < len(children):
        for pid in children:
            if pid not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > until or cpu_seconds(pid) > MOST_CPU_S:
                    os.kill(pid, signal.SIGUSR2)
                    time.sleep(0.5)
                    os.killpg(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    codes[pid] = None
        time.sleep(0.005)
    return [codes[pid] for pid in children]


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- judging --------------------------------------------------------------------------------------


def check_bits(case: Case, result: Mapping[str, Any], serial: Mapping[str, Any]) -> None:
    """Compare a run with that of the serial path, bit by bit."""
    for what in ("losses", "norms", "evals", "updated", "progress"):
        one, two = result[what], serial[what]
        # The norm is known only where it is needed.
        if what == "norms" and (None in one or None in two):
            continue
        if repr(one) != repr(two):
            raise Found("bits", f"other {what}\noverlapped {one}\nserial     {two}")
    other = [k for k, digest in serial["stored"].items() if result["stored"].get(k) != digest]
    if other or result["stored"].keys() != serial["stored"].keys():
        raise Found("bits", f"other bytes in the store\n{', '.join(other)}")
    for name, buffer in serial["buffers"].items():
        if not buffer.equal(result["buffers"][name]):
            raise Found("bits", f"another buffer\n{name}")


def comparable_with_torch(case: Case, result: Mapping[str, Any]) -> bool:
    """Return whether PyTorch in memory computes the same values up to rounding."""
    from benchmarks.differential_models import FAMILIES

    family = FAMILIES[case["model"]]
    whole = [numbers[0] for numbers in result["numerics"]] == [case["batch"]]
    drawn_alike = whole and case["tiles"] == "off" and case["kind"] == "session"
    return (
        (not case["dropout"] or (drawn_alike and case["dtype"] == "fp32"))
        and not (family.routed and case["dtype"] != "fp32")
        and not (family.mixes_rows and case["kind"] == "ranks")
    )


def check_values(
    case: Case,
    result: Mapping[str, Any],
    plain: Mapping[str, Any],
    wide: Mapping[str, Any] | None,
    *,
    ranks: int,
) -> None:
    """Compare a run with PyTorch's."""
    from benchmarks.differential_models import DTYPES

    exact = case["dtype"] == "fp32" and case["moments"] == "fp32"
    limit = 2e-5 if exact else 0.05
    for what in ("losses", "evals"):
        if ranks > 1:  # Each rank has the loss of its own rows.
            break
        for number, (one, two) in enumerate(zip(result[what], plain[what], strict=True)):
            allowed = limit * abs(two) + 1e-6
            if wide is not None:
                allowed += 4 * abs(two - wide[what][number])
            if not abs(one - two) <= allowed:
                raise Found("values", f"other {what}\nlohan {result[what]}\ntorch {plain[what]}")
    if case["moments"] != "fp32":
        return
    for what in ("weights", "ema"):
        for name, value in result[what].items():
            wanted, finer = plain[what][name], None if wide is None else wide[what][name]
            if name not in plain["trained"]:  # It is only read, in the compute type.
                dtype = DTYPES[case["dtype"]]
                value, wanted = value.to(dtype), wanted.to(dtype).double()
            check_tensor(case, f"{what} {name}", value, wanted, finer)
    if ranks == 1:
        for name, value in plain["buffers"].items():
            if name in result["buffers"] and result["buffers"][name].is_floating_point():
                finer = None if wide is None else wide["buffers"][name]
                check_tensor(case, f"buffer {name}", result["buffers"][name], value, finer)


def check_tensor(case: Case, name: str, lohan_value: Any, plain: Any, wide: Any) -> None:
    """Compare one tensor with that of PyTorch.

    If they differ, the distances of both to PyTorch in fp64 are compared. A few weights may
    move the other way, since AdamW and Lion take the sign of gradients that are rounding noise.
    """
    from benchmarks.differential_runs import RATES

    apart = (lohan_value.double() - plain).abs()
    if not apart.numel() or float(apart.max()) < 1e-5:
        return
    if wide is None:
        raise Found("values", f"another {kind_of(name)}\n{name}: {float(apart.max()):.3g}")
    actual = (lohan_value.double() - wide).abs().flatten().sort().values
    expected = (plain - wide).abs().flatten().sort().values
    most_flips = max(3, len(actual) // 50)
    kept = max(1, len(actual) - most_flips)
    limit = 4 * float(expected.square().mean().sqrt()) + 2e-6
    most = 4 * case["steps"] * RATES[case["optimizer"]]
    rms, largest = float(actual[:kept].square().mean().sqrt()), float(actual[-1])
    if rms > limit or (largest > most and case["optimizer"] != "sgd"):
        raise Found(
            "values",
            f"another {kind_of(name)}\n{name}: {rms:.3g} from fp64, limit {limit:.3g}; "
            f"largest {largest:.3g}",
        )


def kind_of(name: str) -> str:
    return name.partition(" ")[0]


# -- shrinking ------------------------------------------------------------------------------------


def shrink(case: Case, outcome: Outcome, run: Callable[[Case], Outcome]) -> tuple[Case, Outcome]:
    """Return the simplest case near this one that ends with the same kind of finding."""
    kind, tries, until = finding_kind(outcome), 0, time.monotonic() + SHRINKING_S
    changed = True
    while changed:
        changed = False
        for simpler in simpler_cases(case):
            tries += 1
            if tries > SHRINKING_TRIES or time.monotonic() > until:
                return case, outcome
            other = run(simpler)
            if finding_kind(other) == kind:
                case, outcome, changed = simpler, other, True
                break
    return case, outcome


def finding_kind(outcome: Outcome) -> str:
    if outcome.status == "exception":
        return outcome.signature.partition(" in ")[0]
    return outcome.status


def simpler_cases(case: Case) -> Iterator[Case]:
    """Yield cases with one axis at its simplest value, an event less, or a step less."""
    for number in range(len(case["events"])):
        yield {**case, "events": case["events"][:number] + case["events"][number + 1 :]}
    for axis in only_changes(case):
        if axis not in ("events", "steps"):
            yield {**case, axis: SIMPLEST.get(axis, 1)}
    if case["steps"] > 1:
        last = case["steps"] - 1
        yield {**case, "steps": last, "events": [e for e in case["events"] if e[0] < last]}


# -- tally ----------------------------------------------------------------------------------------


@dataclass
class Tally:
    """Counts of how often each value of each axis was drawn, refused, compared and found wrong."""

    counts: dict[str, dict[str, Counter[str]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(Counter))
    )
    total: Counter[str] = field(default_factory=Counter)

    def add(self, case: Case, outcome: Outcome) -> None:
        status = outcome.status if not outcome.is_finding else "found"
        self.total["drawn"] += 1
        self.total[status] += 1
        for axis, value in case.items():
            values = [e[1] for e in value] if axis == "events" else [value]
            if axis in TRAIN_AXES and case["kind"] != "train":
                continue
            for each in dict.fromkeys(map(str, values)):
                self.counts[axis][each]["drawn"] += 1
                self.counts[axis][each][status] += 1

    def table(self) -> str:
        lines = [f"{'axis':14} {'value':16} {'drawn':>6} {'refused':>8} {'same':>6} {'found':>6}"]
        for axis, values in self.counts.items():
            for value, count in sorted(values.items(), key=lambda item: -item[1]["drawn"]):
                lines.append(
                    f"{axis:14} {value or '-':16} {count['drawn']:6} {count['refused']:8} "
                    f"{count['same']:6} {count['found']:6}"
                )
        return "\n".join(lines)


# -- campaigns ------------------------------------------------------------------------------------


def trace_once(family: str) -> None:
    """Trace a model, so that forks inherit what torch caches about its operations."""
    from benchmarks.differential_models import batches, build_model
    from lohan.engine.context import blocks_of, workload_of

    case = {**SIMPLEST, "model": family}
    batch = batches(case)[0][0][0]
    model = build_model(case)
    workload_of(model, blocks_of(model, batch), batch)


def prepare(families: Sequence[str] = ()) -> None:
    """Import everything that forks need, without starting a thread; trace some families."""
    import peft  # noqa: F401
    import transformers.models.auto.modeling_auto
    import transformers.models.bert.modeling_bert
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama
    import transformers.models.mixtral.modeling_mixtral
    import transformers.models.qwen2.modeling_qwen2
    import transformers.models.t5.modeling_t5

    from benchmarks import differential_runs  # noqa: F401
    from tests.support.forked_commands import warm_up

    transformers.logging.set_verbosity_error()
    arguments, sys.argv = sys.argv, list(sys.argv)
    warm_up()
    sys.argv = arguments
    for name in families:
        trace_once(name)
    gc.collect()
    gc.freeze()


def show(text: str) -> None:
    print(text, flush=True)


def campaign(
    numbers: Sequence[int],
    work: Path,
    *,
    minutes: float = 0.0,
    shrinks: bool = True,
    say: Callable[[str], None] | None = None,
) -> tuple[Tally, dict[str, list[int]]]:
    """Run cases by number; return the tally, and the numbers of findings by signature."""
    say = say or show
    tally, findings = Tally(), dict[str, list[int]]()
    start = time.monotonic()
    until = start + 60 * minutes if minutes else float("inf")
    refusals: Counter[str] = Counter()
    for done, number in enumerate(numbers):
        if time.monotonic() > until:
            say(f"stopped after {done} cases, by the clock")
            break
        case = draw(number)
        outcome = run_case(case, work)
        tally.add(case, outcome)
        if done % 50 == 49:
            say(f"{done + 1} cases in {time.monotonic() - start:.0f} s: {dict(tally.total)}")
        if outcome.status == "refused":
            refusals[outcome.signature] += 1
        if outcome.is_finding:
            report(number, case, outcome, findings, work, shrinks=shrinks, say=say)
    for signature, count in refusals.most_common(12):
        say(f"{count:5} x {signature}")
    return tally, findings


def report(
    number: int,
    case: Case,
    outcome: Outcome,
    findings: dict[str, list[int]],
    work: Path,
    *,
    shrinks: bool,
    say: Callable[[str], None],
) -> None:
    """Print a finding; the first of its signature is shrunk."""
    signature = outcome.signature
    findings.setdefault(signature, []).append(number)
    say(f"case {number}: {signature}\n  {json.dumps(only_changes(case))}")
    if len(findings[signature]) > 1:
        return
    if shrinks:
        small, outcome = shrink(case, outcome, lambda simpler: run_case(simpler, work))
        say(f"  python benchmarks/differential.py --case '{json.dumps(only_changes(small))}'")
    say("  " + outcome.detail.replace("\n", "\n  "))


@contextmanager
def work_folder(parent: Path | None) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="lohan-differential-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after so many; 0: never")
    parser.add_argument("--case", type=json.loads, help="one case as JSON: axes that are not plain")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--work", type=Path, help="folder for stores; default: a temporary one")
    options = parser.parse_args()
    prepare(AXES["model"] if options.cases >= 100 else ())
    with work_folder(options.work) as work:
        if options.case is not None:
            outcome = run_case({**SIMPLEST, **options.case}, work)
            print(f"{outcome.status} in {outcome.seconds:.1f} s\n{outcome.detail}")
            sys.exit(int(outcome.is_finding))
        start = time.monotonic()
        numbers = range(options.seed, options.seed + options.cases)
        tally, findings = campaign(
            numbers, work, minutes=options.minutes, shrinks=not options.no_shrink
        )
        print(tally.table())
        counts = ", ".join(f"{count:,} {status}" for status, count in tally.total.items())
        print(f"{counts}; {time.monotonic() - start:.0f} s")
        for signature, cases in sorted(findings.items(), key=lambda item: -len(item[1])):
            print(f"{len(cases):5} x {signature}\n        cases {', '.join(map(str, cases[:12]))}")
    sys.exit(int(bool(findings)))


if __name__ == "__main__":
    main()
