"""Runs that are killed again and again, and what became of them.

    python benchmarks/kills.py --kills 1000 --seed 0 --minutes 60

Every process of a run is killed (SIGKILL) until the run has come to its end: in a phase that is
drawn first (loading, resuming, a step, a commit, a snapshot, an export), there between
two operations on files or after a random time; one in five whenever a signal finds it. Kinds of
runs: `plain`, `balanced` (updates in the next forward), `replanned` (another plan after the third
step), `snapshots` (two steps between snapshots), `logged` (every step is committed by its
gradients), `streamed` (the same, with weights that do not fit in memory), `ranks` (two processes;
one is killed and the other must end by itself, or both at
once). A run that has ended is exported again, and those exports are killed
too. Counted as

* lost: after a kill the run goes on from an earlier step than its log or snapshot promised, or not;
* wrong: its exported weights or its losses differ by a bit from the uninterrupted run's, or a
  killed export has left a folder that is not whole;
* traceback: a process ended by itself with a stack trace, or with an undocumented exit code;
* hung: a process did not end within some minutes.

Exit code 1 if there is any of these.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from common import HERE, Report, note, parser_of, work_folder

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(HERE.parent))

from tests.support import process_hooks, ranks
from tests.support.forked_commands import (
    TINY_STEPS,
    Boundary,
    Ended,
    Forge,
    Run,
    TinyResult,
    tiny_arguments,
    tiny_result,
    write_tiny_inputs,
)
from tests.support.process_hooks import FIRST_PHASE

HANG_S = 300.0  # A process that takes longer counts as hung.
PATIENCE_S = 15.0  # Time for the other ranks to detect that one has ended.
MOST_KILLS = 25  # After this many kills of one run, the run may finish.
SNAPSHOT_EVERY = 2
# A process is killed within this many steps, so that the next process can be killed in later ones.
EARLY = 4
OUTSIDE = 0.2  # The share of kills by a signal at any instant.
EXIT_CODES = (0, 2, 130)  # documented ones of train, resume, export
NOT_BEGUN = "start it again"


@dataclass(frozen=True)
class Kind:
    name: str
    options: tuple[object, ...] = ()
    ranks: int = 1
    snapshots: bool = False
    commit_every: int = 1
    env: dict[str, str] = field(default_factory=dict)


KINDS = (
    Kind("plain"),
    Kind("balanced", ("--clip", 0, "--update-mode", "balanced", "--host", "500KiB")),
    Kind("replanned", ("--activations", "holistic", "--host", "450KiB"), env={"LOHAN_REPLAN": "1"}),
    Kind("snapshots", snapshots=True),
    Kind("interval", ("--commit-every", 3), commit_every=3),
    Kind("logged", ("--log-gradients", 3)),
    Kind("streamed", ("--log-gradients", 3, "--host", "340KiB")),
    Kind("ranks", ("--host", "3MiB"), ranks=2),
)


@dataclass
class Whole:
    """A run of a kind that nothing interrupts."""

    result: TinyResult
    seconds: float
    boundaries: dict[str, int]  # the largest number of boundaries in each phase
    spans_s: dict[str, float]  # the longest duration of each phase


class Tally:
    """Counts of events over all workers."""

    def __init__(self, wanted: int, until_s: float) -> None:
        self._lock = threading.Lock()
        self.kills: Counter[tuple[str, str]] = Counter()  # kind, phase
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self._wanted, self._until_s = wanted, until_s

    def killed(self, kind: str, phase: str) -> None:
        with self._lock:
            self.kills[kind, phase] += 1
            if (total := self.kills.total()) % 50 == 0:
                note(f"{total} kills, {self.counts['runs completed']} runs completed, {self.bad()}")

    def count(self, what: str, detail: str = "") -> None:
        with self._lock:
            self.counts[what] += 1
            if detail:
                self.failures.append(f"{what}: {detail}")
                note(self.failures[-1])

    def bad(self) -> str:
        return ", ".join(f"{self.counts[name]} {name}" for name in BAD)

    def stop(self) -> None:
        """Stop killing, so that every run finishes."""
        self._wanted = 0

    def enough(self) -> bool:
        return self.kills.total() >= self._wanted or time.monotonic() > self._until_s


BAD = ("lost", "wrong", "tracebacks", "hung")


class Series:
    """One run, and every process that worked on it."""

    def __init__(
        self,
        forge: Forge,
        inputs: Path,
        folder: Path,
        kind: Kind,
        tally: Tally,
        draw: random.Random,
        whole: Whole | None = None,
    ) -> None:
        self.forge, self.inputs, self.folder, self.kind = forge, inputs, folder, kind
        self.tally, self.draw, self.whole = tally, draw, whole
        self.out = folder / "run"
        self.promised = 0
        self.history: list[str] = []

    # -- processes ---------------------------------------------------------------------------

    def train_words(self) -> list[object]:
        words = ["train", *tiny_arguments(self.inputs, self.out, *self.kind.options)]
        if self.kind.snapshots:
            config = self.folder / "config.toml"
            config.write_text(f"[budget]\nsnapshot_every = {SNAPSHOT_EVERY}\n")
            words += ["--config", config]
        return words

    def start(
        self, words: list[object], world: int, killed: dict[int, Kill], trace: bool = False
    ) -> list[Run]:
        port = ranks.free_port()
        self.phase_files = [self.folder / f"phase-{rank}" for rank in range(world)]
        for file in self.phase_files:
            file.unlink(missing_ok=True)
        return [
            self.forge.start(
                *words,
                kill_at=killed[rank].boundary if rank in killed else None,
                before="tests.support.process_hooks:log_phases",
                trace=self.folder / f"trace-{rank}" if trace else None,
                env={
                    **self.kind.env,
                    "LOHAN_PHASE": str(self.phase_files[rank]),
                    **({"LOHAN_SPANS": str(self.folder / "spans")} if trace else {}),
                    **({"LOHAN_KILL": killed[rank].timer} if rank in killed else {}),
                    **(ranks.rank_environment(rank, world, port) if world > 1 else {}),
                },
            )
            for rank in range(world)
        ]

    def ended(self, words: list[object], *, kill: bool, world: int, share: float) -> list[Ended]:
        """Run the processes of one command, kill one or all or none, and return how they ended."""
        draw, victims = self.draw, [self.draw.randrange(world)]
        killed: dict[int, Kill] = {}
        at_s = None
        if kill:
            assert self.whole is not None
            if draw.random() < OUTSIDE:
                at_s = draw.random() * share * self.whole.seconds
                if draw.random() < 0.5:
                    victims = list(range(world))
            else:
                killed[victims[0]] = drawn(self.whole, self.phases_of(words), share, draw)
        runs = self.start(words, world, killed)
        if at_s is not None:
            time.sleep(at_s)
            for rank in victims:
                os.kill(runs[rank].pid, signal.SIGKILL)  # its pid is kept until it is waited for
        actual = self.wait(runs, victims if kill else [])
        output = " ".join(map(str, words[:2]))
        self.history.append(f"{output}: {[e.code for e in actual]} in {self.phase_of(victims[0])}")
        for rank, end in enumerate(actual):
            if end.code == -signal.SIGKILL and rank in victims:
                self.tally.killed(self.kind.name, self.phase_of(rank))
            elif "Traceback" in end.err or (end.code not in EXIT_CODES and end.code >= 0):
                self.fail("tracebacks", end.err)
        return actual

    def phases_of(self, words: list[object]) -> list[str]:
        """Return the phases of a command, from which the time of the kill is drawn."""
        first = FIRST_PHASE[str(words[0])]
        if first == "export":
            return [first]
        phases = [first, first, "step", "step", "commit", "commit", "export"]
        phases += ["snapshot", "snapshot"] if self.kind.snapshots else []
        return phases

    def phase_of(self, rank: int) -> str:
        return process_hooks.read_phase(self.phase_files[rank]) or "load"

    def wait(self, runs: list[Run], victims: list[int]) -> list[Ended]:
        """Wait for all ranks to end; kill the remaining ones if they do not end in time."""
        limit = time.monotonic() + HANG_S
        patience = float("inf")
        while not all(has_ended(run.pid) for run in runs):
            now = time.monotonic()
            if len(runs) > 1 and any(has_ended(runs[rank].pid) for rank in victims):
                patience = min(patience, now + PATIENCE_S)
            if now > min(limit, patience):
                self.tally.count(
                    "put down" if now < limit else "hung", "" if now < limit else "..."
                )
                for run in runs:
                    os.kill(run.pid, signal.SIGKILL)
                break
            time.sleep(0.002)
        return [run.wait() for run in runs]

    def fail(self, what: str, detail: str) -> None:
        self.tally.count(what, f"{self.kind.name}, {'; '.join(self.history)}\n{detail}")

    # -- the run -----------------------------------------------------------------------------

    def uninterrupted(self) -> Whole:
        start_s = time.monotonic()
        self.whole_process(self.train_words())
        seconds = time.monotonic() - start_s
        actual, names = tiny_result(self.out), self.names()
        shutil.rmtree(self.out)
        died = Kill(("step", SNAPSHOT_EVERY + 1, 9))
        self.wait(self.start(self.train_words(), self.kind.ranks, {0: died}), [0])
        self.whole_process(["resume", self.out])
        names += self.names()
        spans: dict[str, float] = {}
        for line in (self.folder / "spans").read_text().splitlines():
            phase, took_s = line.split()
            spans[phase] = max(spans.get(phase, 0.0), float(took_s))
        return Whole(actual, seconds, {phase: longest(names, phase) for phase in spans}, spans)

    def whole_process(self, words: list[object]) -> None:
        ends = [run.wait() for run in self.start(words, self.kind.ranks, {}, trace=True)]
        assert [e.code for e in ends] == [0] * len(ends), ranks.errors_of_ranks(ends)

    def names(self) -> list[str]:
        actual: list[str] = json.loads((self.folder / "trace-0").read_text())
        return actual

    def rows(self) -> int:
        log = self.out / "metrics.jsonl"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def note_promise(self) -> None:
        """Record the step that the log promises to be on disk.

        That is the step of the last row, or as many steps earlier as lie between two
        commits.
        """
        rows = max(self.rows() - (self.kind.commit_every - 1), 0)
        self.promised = max(self.promised, rows)

    def go(self) -> None:
        """Kill and continue the run until it has ended, then compare the result."""
        kills, words = 0, self.train_words()
        while True:
            kill = kills < MOST_KILLS and not self.tally.enough()
            left = 1 - self.promised / (TINY_STEPS + 1)
            ends = self.ended(words, kill=kill, world=self.kind.ranks, share=left)
            first, codes = ends[0], [end.code for end in ends]
            actual = re.search(r"resuming after step (\d+)|is at step (\d+)", first.out)
            if actual and int(actual[1] or actual[2]) < self.promised:
                return self.fail("lost", f"step {self.promised} was promised: {actual[0]}")
            self.note_promise()
            if set(codes) == {0}:
                break
            if -signal.SIGKILL in codes:
                kills += 1
            elif words[0] == "train" and f"lohan resume {self.out}" in first.err:
                words = ["resume", self.out]
                continue
            elif self.promised == 0 and NOT_BEGUN in first.err:
                words = self.train_words()
                continue
            else:
                what = "lost" if self.promised else "refused"
                errors = ranks.errors_of_ranks(ends)
                return self.fail(what, f"step {self.promised} was promised; {errors}")
            if words[0] == "train" and self.rows():
                words = ["resume", self.out]
        self.tally.count("runs completed")
        assert self.whole is not None
        if tiny_result(self.out) != self.whole.result:
            return self.fail("wrong", "another result")
        leftovers = [path for path in self.out.rglob("*") if ".tmp" in path.name]
        if leftovers:
            return self.fail("wrong", f"left behind: {leftovers}")
        self.export()

    def export(self) -> None:
        """Export the finished run; an export that is killed leaves a complete folder or none."""
        target = self.folder / "exported"
        words: list[object] = ["export", self.out, "--out", target, "--overwrite"]
        expected = (self.out / "model" / "model.safetensors").read_bytes()
        for last in (False, False, True):
            kill = not last and not self.tally.enough()
            ends = self.ended(words, kill=kill, world=1, share=0.3)
            file = target / "model.safetensors"
            if target.exists() and (not file.exists() or file.read_bytes() != expected):
                return self.fail("wrong", "an export that is not whole")
            if ends[0].code not in (0, -signal.SIGKILL) or (last and not file.exists()):
                return self.fail("lost", f"no export: {ends[0].err}")
        self.tally.count("exports completed")


@dataclass(frozen=True)
class Kill:
    """A kill at a boundary (see Forge.start), or some time after a phase begins (see phases)."""

    boundary: Boundary | None = None
    timer: str = " -1 0"


def drawn(whole: Whole, choices: list[str], share: float, draw: random.Random) -> Kill:
    """Draw a kill in one of these phases. Steps, commits and snapshots occur more than once."""
    phase = draw.choice(choices)
    left = max(1, round(share * TINY_STEPS))
    number = draw.randrange(
        {"step": left, "commit": left, "snapshot": left // 2 or 1}.get(phase, 1)
    )
    if draw.random() < 0.5:
        return Kill((phase, number, draw.randrange(whole.boundaries[phase])))
    return Kill(timer=f"{phase} {number} {draw.random() * whole.spans_s[phase]}")


def longest(names: list[str], phase: str) -> int:
    """Return the largest number of boundaries of one phase, including its begin and end."""
    begins = [at for at, name in enumerate(names) if name == phase]
    return max((names.index(f"{phase} done", at) - at + 1 for at in begins), default=1)


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, even if its parent has not waited for it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return text[text.rindex(")") + 2] in "ZX"


def work(
    number: int, seed: int, place: Path, inputs: Path, tally: Tally, kinds: list[Kind]
) -> None:
    forge_place = place / f"forge-{number}"
    forge_place.mkdir()
    forge, draw = Forge(forge_place), random.Random(f"{seed} {number}")
    try:
        wholes: dict[str, Whole] = {}
        for turn in range(10**9):
            if tally.enough():
                return
            kind = kinds[(turn + number) % len(kinds)]
            if kind.name not in wholes:
                folder = new_folder(place / f"whole-{number}-{turn}")
                series = Series(forge, inputs, folder, kind, tally, draw)
                wholes[kind.name] = series.uninterrupted()
                shutil.rmtree(folder)
            folder = new_folder(place / f"series-{number}-{turn}")
            Series(forge, inputs, folder, kind, tally, draw, wholes[kind.name]).go()
            shutil.rmtree(folder)
            for path in forge_place.glob("process-*"):
                shutil.rmtree(path)
    finally:
        forge.close()


def new_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="at most so many")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--kinds", nargs="*", choices=[kind.name for kind in KINDS])
    given = parser.parse_args()
    kinds = [kind for kind in KINDS if not given.kinds or kind.name in given.kinds]
    report, start_s = Report(as_json=given.json), time.monotonic()
    tally = Tally(given.kills, start_s + 60 * given.minutes)
    with work_folder(given.work, "kills") as place, ThreadPoolExecutor(given.jobs) as pool:
        report.head(place, "lohan", "torch")
        inputs = write_tiny_inputs(new_folder(place / "inputs"))
        jobs = [
            pool.submit(work, number, given.seed, place, inputs, tally, kinds)
            for number in range(given.jobs)
        ]
        try:
            for job in jobs:
                job.result()
        finally:
            tally.stop()
    names = [kind.name for kind in kinds]
    by_kind = {name: {p: tally.kills[name, p] for p in process_hooks.PHASES} for name in names}
    by_kind["all"] = {p: sum(row[p] for row in by_kind.values()) for p in process_hooks.PHASES}
    rows = [{"run": name, **row, "all": sum(row.values())} for name, row in by_kind.items()]
    report.table("kills, by what the process was doing", rows)
    reported = ("runs completed", "exports completed", *BAD, "refused")
    others = [name for name in tally.counts if name not in reported]
    report.table(
        "outcome", [{"": name, "count": tally.counts[name]} for name in (*reported, *others)]
    )
    report.facts({"minutes": f"{(time.monotonic() - start_s) / 60:.1f}"})
    report.close()
    for failure in tally.failures:
        note(failure)
    return int(any(tally.counts[name] for name in (*BAD, "refused")))


if __name__ == "__main__":
    raise SystemExit(main())
