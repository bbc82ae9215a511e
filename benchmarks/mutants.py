"""Mutation check: which single wrong lines of lohan/ and csrc/ the default test suite catches.

    python benchmarks/mutants.py                 every mutant, by the tests that mutants.toml names
    python benchmarks/mutants.py --only lr-      those whose name or topic has this text
    python benchmarks/mutants.py --whole         what these miss, by the whole default suite

mutants.toml is the table. A mutant is a piece of text that occurs once in the source, and what
takes its place; files are found by that text, and tests by their names, so both may move. The tree
is copied and one mutant at a time is put into the copy. A mutant counts as caught if a test of the
default suite fails or does not end. Mutants of csrc/ are built, which needs cmake, ninja and
nanobind; without them they are left out and said to be.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_name("mutants.toml")
LIMIT_S = 300.0  # for the tests of a mutant
WHOLE_LIMIT_S = 3600.0  # for the default suite
NATIVE = (".cpp", ".hpp")
LEFT_OUT = (
    ".git",
    ".venv",
    "build",
    "dist",
    "__pycache__",
    ".*_cache",
    "*.egg-info",
    ".hypothesis",
)
PYTEST = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=line")
NO_TESTS = 5  # exit code of pytest

# In every process of the copy: an editable install leads `import lohan` back to its own tree.
SITE = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "_editable" not in type(f).__module__]
"""


@dataclass(frozen=True)
class Mutant:
    name: str
    topic: str
    find: str
    replace: str
    tests: tuple[str, ...]  # names of test functions, or files of tests


@dataclass(frozen=True)
class Result:
    name: str
    topic: str
    file: str
    caught_by: str  # "" if nothing did
    seconds: float
    note: str = ""


def read_table(path: Path = TABLE) -> list[Mutant]:
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in rows]


def sources(root: Path) -> dict[Path, str]:
    """Text of all that may be mutated."""
    native = (path for path in (root / "csrc").iterdir() if path.suffix in NATIVE)
    return {path: path.read_text() for path in (*sorted((root / "lohan").rglob("*.py")), *native)}


def places_of(find: str, texts: dict[Path, str]) -> list[Path]:
    """A file for every time that the text occurs."""
    return [path for path, text in texts.items() for _ in range(text.count(find))]


def ids_of_tests(tests: Iterable[str], root: Path) -> list[str]:
    """What pytest is told for names of tests and of files; nothing for those that are not there."""
    known = _known_tests(root)
    return [test for name in tests for test in known.get(name, [])]


@cache
def _known_tests(root: Path) -> dict[str, list[str]]:
    """Files by their paths, and functions by their names."""
    known: dict[str, list[str]] = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        file = str(path.relative_to(root))
        known[file] = [file]
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE):
            known.setdefault(name, []).append(f"{file}::{name}")
    return known


class Copy:
    """A copy of the tree whose tests import it and nothing else."""

    def __init__(self, place: Path) -> None:
        self.root, self._build, self._site = place / "tree", place / "build", place / "site"
        shutil.copytree(ROOT, self.root, ignore=shutil.ignore_patterns(*LEFT_OUT))
        core = importlib.util.find_spec("lohan._core")
        if core is None or core.origin is None:
            raise SystemExit("the native core is not built; install LoHan first (pip install -e .)")
        self._core = Path(core.origin)
        self._use_core(self._core)
        self._site.mkdir()
        (self._site / "sitecustomize.py").write_text(SITE)
        self.texts = sources(self.root)
        self._built = False
        self._check()

    @property
    def _env(self) -> dict[str, str]:
        given = os.environ.get("PYTHONPATH")
        path = [str(self._site), str(self.root), *([given] if given else [])]
        return os.environ | {"PYTHONPATH": os.pathsep.join(path)}

    def _check(self) -> None:
        """The copy is what is imported."""
        code = "import lohan, lohan._core as c; print(lohan.__file__); print(c.__file__)"
        command = [sys.executable, "-c", code]
        asked = subprocess.run(
            command, cwd=self.root.parent, env=self._env, check=True, capture_output=True, text=True
        )
        for file in asked.stdout.split():
            if not Path(file).is_relative_to(self.root):
                raise SystemExit(f"{file} is imported instead of the copy in {self.root}")

    def _use_core(self, file: Path) -> None:
        target = self.root / "lohan" / self._core.name
        target.unlink(missing_ok=True)  # never the bytes of a file that a process has mapped
        shutil.copy2(file, target)

    def put(self, file: Path, text: str) -> None:
        """Python tells old bytecode by size and second, which two mutants may share."""
        file.write_text(text)
        Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)

    def build(self) -> str:
        """Builds the core from csrc/ as it is in the copy; what went wrong, if anything did."""
        options = ["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
        configure = [
            "cmake",
            "-S",
            str(self.root / "csrc"),
            "-B",
            str(self._build),
            *options,
            f"-DPython_EXECUTABLE={sys.executable}",
        ]
        commands = [["cmake", "--build", str(self._build)]]
        for command in commands if self._built else [configure, *commands]:
            try:
                ended = subprocess.run(command, env=self._env, capture_output=True, text=True)
            except FileNotFoundError as error:
                return f"cannot build: {error.filename} is missing"
            if ended.returncode:
                said = (ended.stderr or ended.stdout).strip().splitlines()
                return f"cannot build: {said[-1] if said else command[0]}"
        self._built = True
        self._use_core(next(self._build.glob("_core*.so")))
        return ""

    def restore_core(self) -> None:
        self._use_core(self._core)

    def first_failure(
        self, tests: Sequence[str], limit_s: float, more: Sequence[str] = ()
    ) -> tuple[str, int]:
        """The first test that fails, or "" if none does; and the exit code of pytest."""
        with TemporaryFile("w+") as out:
            child = subprocess.Popen(
                [sys.executable, *PYTEST, *more, *tests],
                cwd=self.root,
                env=self._env,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = child.wait(limit_s)
            except subprocess.TimeoutExpired:
                return f"time-out after {limit_s:.0f} s", -1
            finally:
                _end_session(child)
            out.seek(0)
            said = out.read()
        if code in (0, NO_TESTS):
            return "", code
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE)
        if failed is None:
            raise SystemExit(f"pytest {' '.join(tests)} ended with {code}:\n{said[-3000:]}")
        return failed[1], code


def _end_session(child: subprocess.Popen[bytes]) -> None:
    """The child and whatever it has started and left behind."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


class Check:
    def __init__(self, copy: Copy, *, whole: bool) -> None:
        self._copy, self._whole = copy, whole
        self._broken_anyway: list[str] | None = None

    def before(self, mutants: Sequence[Mutant]) -> None:
        """The tests that are named pass on the tree as it is, all in one process."""
        named = (test for mutant in mutants for test in ids_of_tests(mutant.tests, self._copy.root))
        tests = list(dict.fromkeys(named))
        if tests:
            failed, _ = self._copy.first_failure(tests, WHOLE_LIMIT_S)
            if failed:
                raise SystemExit(f"{failed} fails without any mutant; mend it first")

    def of(self, mutant: Mutant) -> Result:
        start = time.perf_counter()
        places = places_of(mutant.find, self._copy.texts)
        if len(places) != 1:
            raise SystemExit(
                f"{mutant.name}: its text occurs {len(places)} times in lohan/ and csrc/; mend "
                f"{TABLE.name}"
            )
        (file,) = places
        shown = str(file.relative_to(self._copy.root))
        before = self._copy.texts[file]
        self._copy.put(file, before.replace(mutant.find, mutant.replace))
        try:
            caught, note = self._tried(mutant, native=file.suffix in NATIVE)
        finally:
            self._copy.put(file, before)
            if file.suffix in NATIVE:
                self._copy.restore_core()
        seconds = time.perf_counter() - start
        return Result(mutant.name, mutant.topic, shown, caught, round(seconds, 1), note)

    def _tried(self, mutant: Mutant, *, native: bool) -> tuple[str, str]:
        if native and (problem := self._copy.build()):
            return "", problem
        tests = ids_of_tests(mutant.tests, self._copy.root)
        note = "" if tests else "none of its tests is there"
        if tests:
            caught, code = self._copy.first_failure(tests, LIMIT_S)
            if caught:
                return caught, ""
            note = "its tests are not in the default suite" if code == NO_TESTS else ""
        if not self._whole:
            return "", note
        left_out = [f"--deselect={test}" for test in self._failing_anyway()]
        caught, _ = self._copy.first_failure([], WHOLE_LIMIT_S, left_out)
        return caught, note

    def _failing_anyway(self) -> list[str]:
        """Tests that cannot run in a copy, or fail as the code is. Asked for on a fresh copy, since
        a mutant is in this one."""
        if self._broken_anyway is None:
            self._broken_anyway = []
            with TemporaryDirectory(prefix="lohan-mutants-") as place:
                sound = Copy(Path(place))
                while True:
                    left_out = [f"--deselect={test}" for test in self._broken_anyway]
                    failed, _ = sound.first_failure([], WHOLE_LIMIT_S, left_out)
                    if not failed:
                        break
                    self._broken_anyway.append(failed)
        return self._broken_anyway


def line_of(result: Result) -> str:
    caught = result.caught_by or f"**nothing**{f' ({result.note})' if result.note else ''}"
    return f"| {result.name} | {result.topic} | {caught} | {result.seconds:.0f} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutants whose name or topic has this text")
    parser.add_argument(
        "--whole", action="store_true", help="the whole default suite on what its tests miss"
    )
    parser.add_argument("--json", type=Path, help="file for the results")
    asked = parser.parse_args()
    mutants = [m for m in read_table() if asked.only in m.name or asked.only in m.topic]
    results: list[Result] = []
    with TemporaryDirectory(prefix="lohan-mutants-") as place:
        check = Check(Copy(Path(place)), whole=asked.whole)
        check.before(mutants)
        print("| mutant | topic | caught by | s |\n|---|---|---|---|", flush=True)
        for mutant in mutants:
            results.append(check.of(mutant))
            print(line_of(results[-1]), flush=True)
    if asked.json is not None:
        asked.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    left_out = [r for r in results if r.note.startswith("cannot build")]
    caught = sum(bool(r.caught_by) for r in results)
    tried = len(results) - len(left_out)
    print(f"\n{caught} of {tried} caught" + (f", {len(left_out)} not built" if left_out else ""))
    return 0 if caught == tried else 1


if __name__ == "__main__":
    raise SystemExit(main())
