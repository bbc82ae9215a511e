"""Mutation check: generate wrong versions of lohan/ and report which of them the tests catch.

    python benchmarks/mutants.py                            30 mutants, chosen by seed 0
    python benchmarks/mutants.py --count 100 --seed 7       another choice
    python benchmarks/mutants.py --only schedule/           only files whose path has this text
    python benchmarks/mutants.py --kind drop-effect         only mutants of this kind
    python benchmarks/mutants.py --list                     show the choice without running it
    python benchmarks/mutants.py --whole                    the default suite on those not caught

Mutants are generated from the syntax tree of every module, so there is no table to maintain. KINDS
lists the kinds of change. The choice takes the same number of every kind. It depends on the seed
and on the mutated code, not on line numbers: an edit elsewhere in the tree leaves it as it is.

The tests of a mutant follow from the path of its module (`select_tests`). The tree is copied, and
the copy contains one mutant at a time. A mutant is caught if a test of the default suite fails that
passes without the mutant, or if the tests do not end although they do without it. csrc/ is not
mutated.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_COUNT = 30
TESTS_LIMIT_S = 300.0  # time limit for the tests of one mutant
WHOLE_LIMIT_S = 3600.0  # time limit for the default suite
MAX_IMPORTING_FILES = 6  # test files that run if a module has no test file of its name
NOT_COPIED = (
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
NO_TESTS = 5  # pytest's exit code if it has collected no test
TIME_OUT = -1  # stands for an exit code if pytest was killed

# Runs in every Python process of the copy. The import hook of an editable install would import
# lohan from the original tree.
SITE = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "_editable" not in type(f).__module__]
"""

# -- Generating mutants ---------------------------------------------------------------------------

KINDS = {
    "flip-comparison": "negate a comparison: a < b becomes a >= b",
    "drop-factor": "a * b and a / b become a",
    "swap-and-or": "exchange `and` and `or`",
    "drop-statement": "leave out a call, an augmented assignment, or an assignment to an attribute",
    "off-by-one": "a < b becomes a <= b, n + 1 becomes n",
    "drop-effect": "leave out a read or a write of an operation of the schedule",
}
EFFECTS = "lohan/schedule/ops.py"
# A statement of EFFECTS, or an element of a list there, that mentions one of these is an effect.
_EFFECT_NAMES = {"READ", "WRITE", "AFTER", "WHOLE"}
_NEGATED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_BOUNDARY: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}
# Tests need not notice a change in these: the text of an error, an assertion, the text of an
# f-string (whose positions Python 3.11 does not know), and annotations.
_SKIPPED_NODES = (ast.Raise, ast.Assert, ast.JoinedStr, ast.AnnAssign)
_SKIPPED_FIELDS = ("annotation", "returns", "decorator_list")


@dataclass(frozen=True)
class Mutant:
    """A module with one wrong piece of code."""

    file: str  # path from the root of the tree
    line: int
    scope: str  # qualified name of the class or function
    kind: str
    before: str
    after: str
    start: int  # offsets in the UTF-8 bytes of the file
    end: int
    repeat: int = 0  # number of equal changes before this one in the same scope

    @property
    def identity(self) -> str:
        """A text that identifies the mutant without its position in the file."""
        parts = (self.file, self.scope, self.kind, self.before, self.after, self.repeat)
        return "\n".join(map(str, parts))

    def apply(self, source: str) -> str:
        """Return the source of the module with this change."""
        text = source.encode()
        return (text[: self.start] + self.after.encode() + text[self.end :]).decode()


def mutants_of(source: str, file: str) -> list[Mutant]:
    """Return every mutant of a module, in the order of the source."""
    offsets = [0]
    for line in source.encode().splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    mutants: list[Mutant] = []
    seen: dict[str, int] = {}
    for node, scope in _nodes(ast.parse(source), ()):
        for kind, after in _changes(node, file):
            assert node.end_lineno is not None and node.end_col_offset is not None
            mutant = Mutant(
                file=file,
                line=node.lineno,
                scope=".".join(scope),
                kind=kind,
                before=ast.unparse(node),
                after=after,
                start=offsets[node.lineno - 1] + node.col_offset,
                end=offsets[node.end_lineno - 1] + node.end_col_offset,
            )
            repeat = seen.get(mutant.identity, 0)
            seen[mutant.identity] = repeat + 1
            mutants.append(replace(mutant, repeat=repeat))
    return mutants


def _nodes(
    node: ast.AST, scope: tuple[str, ...]
) -> Iterator[tuple[ast.expr | ast.stmt, tuple[str, ...]]]:
    """Yield the nodes that may be changed, and the names of the scopes around them."""
    if isinstance(node, _SKIPPED_NODES):
        return
    if isinstance(node, ast.expr | ast.stmt):
        yield node, scope
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        scope = (*scope, node.name)
    for name, value in ast.iter_fields(node):
        if name not in _SKIPPED_FIELDS:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _nodes(child, scope)


def _changes(node: ast.expr | ast.stmt, file: str) -> Iterator[tuple[str, str]]:
    """Yield the kind and the new text of every change of a node."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            if not _is_main_guard(left):
                yield "flip-comparison", _comparison(left, _NEGATED[type(op)], right)
                if type(op) in _BOUNDARY:
                    yield "off-by-one", _comparison(left, _BOUNDARY[type(op)], right)
        case ast.BoolOp(op=op, values=values):
            swapped = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield "swap-and-or", f"({ast.unparse(ast.BoolOp(swapped, values))})"
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div()):
            yield "drop-factor", f"({ast.unparse(left)})"
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=ast.Constant(value=1)):
            yield "off-by-one", f"({ast.unparse(left)})"
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "drop-effect" if _is_effect(node, file) else "drop-statement", "pass"
        case ast.List():
            for text in _without_effects(node, file):
                yield "drop-effect", text
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "drop-statement", "pass"


def _without_effects(effects: ast.List, file: str) -> Iterator[str]:
    """Yield the text of a list without each of the effects that it contains."""
    for number, element in enumerate(effects.elts):
        if isinstance(element, ast.Tuple) and _is_effect(element, file):
            left = [other for i, other in enumerate(effects.elts) if i != number]
            yield ast.unparse(ast.List(left, ast.Load()))


def _comparison(left: ast.expr, op: type[ast.cmpop], right: ast.expr) -> str:
    return f"({ast.unparse(ast.Compare(left, [op()], [right]))})"


def _is_main_guard(left: ast.expr) -> bool:
    return isinstance(left, ast.Name) and left.id == "__name__"


def _is_effect(node: ast.AST, file: str) -> bool:
    names = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
    return file == EFFECTS and bool(names & _EFFECT_NAMES)


@cache
def all_mutants(root: Path) -> tuple[Mutant, ...]:
    """Return the mutants of every module of lohan/."""
    return tuple(
        mutant
        for path in sorted((root / "lohan").rglob("*.py"))
        for mutant in mutants_of(path.read_text(encoding="utf-8"), str(path.relative_to(root)))
    )


def choose(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Return `count` mutants, as many of every kind as possible."""

    def rank(mutant: Mutant) -> bytes:
        return hashlib.sha256(f"{seed}\n{mutant.identity}".encode()).digest()

    ranked = sorted(mutants, key=rank)
    by_kind = [[mutant for mutant in ranked if mutant.kind == kind] for kind in KINDS]
    rounds = zip_longest(*by_kind)
    return [mutant for row in rounds for mutant in row if mutant is not None][:count]


# -- Choosing tests -------------------------------------------------------------------------------


def select_tests(file: str, root: Path) -> list[str]:
    """Return the test files that should catch a mutant of a module.

    For lohan/a/b.py these are tests/a/test_b.py and tests/a/test_b_*.py, with tests/top_level for
    the modules that are in no package. If there are none, they are the tests that import
    lohan.a.b, and if there are none either, those that import anything from lohan.a. Of many such
    tests, those that import the fewest modules of lohan are taken.
    """
    module = Path(file).with_suffix("").parts[1:]
    if module[-1] == "__init__":
        module = module[:-1] or module
    folder, name = root.joinpath("tests", *(module[:-1] or ("top_level",))), module[-1]
    mirrored = sorted([*folder.glob(f"test_{name}.py"), *folder.glob(f"test_{name}_*.py")])
    if mirrored:
        return [str(path.relative_to(root)) for path in mirrored]
    dotted = ".".join(("lohan", *module))
    package = dotted.rpartition(".")[0]
    imports = _imports_of_tests(root)
    importing = [test for test, names in imports.items() if dotted in names]
    if not importing:
        prefix = f"{package}." if package != "lohan" else "lohan"
        importing = [
            test for test, names in imports.items() if any(n.startswith(prefix) for n in names)
        ]
    importing.sort(key=lambda test: (len(imports[test]), test))
    return importing[:MAX_IMPORTING_FILES]


@cache
def _imports_of_tests(root: Path) -> dict[str, set[str]]:
    """Return the modules and names of lohan that each test file imports."""
    imports: dict[str, set[str]] = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        imports[str(path.relative_to(root))] = {
            name for name in names if name.split(".")[0] == "lohan"
        }
    return imports


# -- Running mutants ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    mutant: Mutant
    caught_by: str  # the failed test, or empty if the mutant was not caught
    seconds: float
    note: str = ""


class Copy:
    """A copy of the tree. Its tests import the package from the copy."""

    def __init__(self, folder: Path) -> None:
        self.root, self._site = folder / "tree", folder / "site"
        shutil.copytree(ROOT, self.root, ignore=shutil.ignore_patterns(*NOT_COPIED))
        core = importlib.util.find_spec("lohan._core")
        if core is None or core.origin is None:
            raise SystemExit("the native core is not built; install LoHan first (pip install -e .)")
        shutil.copy2(core.origin, self.root / "lohan")
        self._site.mkdir()
        (self._site / "sitecustomize.py").write_text(SITE)
        self._check_imports()

    @property
    def _env(self) -> dict[str, str]:
        inherited = os.environ.get("PYTHONPATH")
        path = [str(self._site), str(self.root), *([inherited] if inherited else [])]
        return os.environ | {"PYTHONPATH": os.pathsep.join(path)}

    def _check_imports(self) -> None:
        """Raise an error if a process imports lohan from elsewhere than the copy."""
        code = "import lohan, lohan._core as c; print(lohan.__file__); print(c.__file__)"
        printed = subprocess.run(
            [sys.executable, "-c", code],
            cwd=self.root.parent,
            env=self._env,
            check=True,
            capture_output=True,
            text=True,
        )
        for file in printed.stdout.split():
            if not Path(file).is_relative_to(self.root):
                raise SystemExit(f"{file} is imported instead of the copy in {self.root}")

    def write(self, file: str, text: str) -> None:
        """Replace a module, and remove its bytecode.

        Python recognizes stale bytecode by size and time in seconds, which two mutants may share.
        """
        path = self.root / file
        path.write_text(text, encoding="utf-8")
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)

    def first_failure(
        self, tests: Sequence[str], limit_s: float, options: Sequence[str] = ()
    ) -> tuple[str, int]:
        """Return the first test that fails, or an empty string, and the exit code of pytest."""
        with TemporaryFile("w+") as out:
            child = subprocess.Popen(
                [sys.executable, *PYTEST, *options, *tests],
                cwd=self.root,
                env=self._env,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = child.wait(limit_s)
            except subprocess.TimeoutExpired:
                return f"time-out after {limit_s:.0f} s", TIME_OUT
            finally:
                _kill_session(child)
            out.seek(0)
            output = out.read()
        if code in (0, NO_TESTS):
            return "", code
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
        if failed is None:
            # The mutant has broken conftest.py, or has ended the process.
            last = output.strip().splitlines()[-1:]
            return f"pytest: {last[0] if last else f'exit code {code}'}", code
        return failed[1], code


def _kill_session(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and all processes that it has left behind."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


class Check:
    """Runs mutants in a copy, and the tests that fail once more without the mutant."""

    def __init__(self, copy: Copy, *, whole: bool) -> None:
        self._copy, self._whole = copy, whole
        # whether the given tests pass without a mutant, within the time limit
        self._passes_unchanged: dict[tuple[str, ...], bool] = {}

    def run(self, mutant: Mutant) -> Result:
        """Return whether the tests catch a mutant."""
        start = time.perf_counter()
        tests = select_tests(mutant.file, self._copy.root)
        caught, note = self._try(mutant, tests, TESTS_LIMIT_S) if tests else ("", "no tests")
        if not caught and self._whole:
            caught, note = self._try(mutant, [], WHOLE_LIMIT_S)
        return Result(mutant, caught, round(time.perf_counter() - start, 1), note)

    def _try(self, mutant: Mutant, tests: Sequence[str], limit_s: float) -> tuple[str, str]:
        """Return the test that catches the mutant, and a note."""
        source = (self._copy.root / mutant.file).read_text(encoding="utf-8")
        deselected: list[str] = []
        while True:
            self._copy.write(mutant.file, mutant.apply(source))
            try:
                options = [f"--deselect={test}" for test in deselected]
                failed, code = self._copy.first_failure(tests, limit_s, options)
            finally:
                self._copy.write(mutant.file, source)
            if not failed:
                return "", "its tests are slow or need a GPU" if code == NO_TESTS else ""
            is_test = "::" in failed
            if self._passes(tests if not is_test else [failed], limit_s):
                return failed, ""
            if not is_test:
                return "", f"{failed}, also without the mutant"
            deselected.append(failed)

    def _passes(self, tests: Sequence[str], limit_s: float) -> bool:
        key = tuple(tests)
        if key not in self._passes_unchanged:
            failed, _ = self._copy.first_failure(tests, limit_s)
            self._passes_unchanged[key] = not failed
        return self._passes_unchanged[key]


def row_of(result: Result) -> str:
    """Return the row of the table for one mutant."""
    mutant = result.mutant
    before = " ".join(mutant.before.split())
    shown = before if len(before) <= 60 else f"{before[:57]}..."
    caught = result.caught_by or f"**nothing**{f' ({result.note})' if result.note else ''}"
    code = shown.replace("|", "\\|")
    cells = (
        f"{mutant.file}:{mutant.line}",
        mutant.kind,
        f"`{code}`",
        caught,
        f"{result.seconds:.0f}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=DEFAULT_COUNT, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0, help="which mutants are chosen")
    parser.add_argument("--only", default="", help="only files whose path has this text")
    parser.add_argument("--kind", choices=KINDS, help="only mutants of this kind")
    parser.add_argument("--list", action="store_true", help="show the choice and stop")
    parser.add_argument(
        "--whole", action="store_true", help="run the default suite on mutants that are not caught"
    )
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    candidates = [
        mutant
        for mutant in all_mutants(ROOT)
        if options.only in mutant.file and options.kind in (None, mutant.kind)
    ]
    mutants = choose(candidates, options.count, options.seed)
    if options.list:
        for mutant in mutants:
            print(f"{mutant.file}:{mutant.line} {mutant.kind}: {mutant.before} -> {mutant.after}")
            print(f"    {' '.join(select_tests(mutant.file, ROOT)) or 'no tests'}")
        print(f"\n{len(mutants)} of {len(candidates)} mutants")
        return 0
    results: list[Result] = []
    with TemporaryDirectory(prefix="lohan-mutants-") as folder:
        check = Check(Copy(Path(folder)), whole=options.whole)
        print("| place | kind | code | caught by | s |\n|---|---|---|---|---|", flush=True)
        for mutant in mutants:
            results.append(check.run(mutant))
            print(row_of(results[-1]), flush=True)
    if options.json is not None:
        rows = [asdict(result) for result in results]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    caught = sum(bool(result.caught_by) for result in results)
    print(f"\n{caught} of {len(results)} caught (seed {options.seed})")
    return 0 if caught == len(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
