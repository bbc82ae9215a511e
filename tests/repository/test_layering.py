"""Packages import only earlier packages, and what must start fast does not import torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lohan

ROOT = Path(lohan.__file__).parent
TESTS = Path(__file__).resolve().parents[1]

# A package may import itself and those in the rows above it, at module level and inside functions.
PACKAGES = [
    "errors",
    "util",
    "optim",
    "param_groups",
    "config",
    "store",
    "model",
    "schedule",
    "planner",
    "device",
    "capture",
    "checkpoint",
    "engine",
    "data",
    "train",
    "tools",
    "hf",
    "ui",
    "cli",
]
RANK = {name: rank for rank, name in enumerate(["_core", *PACKAGES])}
# Helpers with which processes start, before anything else is imported.
LIGHT_HELPERS = ["isolation", "forked_commands", "process_hooks"]
ROOT_FILES = {"__init__.py", "__main__.py", "errors.py", "config.py", "optim.py", "param_groups.py"}

NO_TORCH = ["errors", "config", "optim", "param_groups", "util.units", "util.trace"]
NO_TORCH += ["util.memory", "util.drives", "util.libraries", "util.hub", "util.display"]
NO_TORCH += [
    "store.store",
    "store.admin",
    "model.layout",
    "model.state",
    "model.plan",
    "model.options",
]
NO_TORCH += ["model.options", "model.workload"]
NO_TORCH += ["model.machine", "model.shapes", "schedule.actions"]
NO_TORCH += ["schedule.phases", "schedule.steps", "schedule.check", "schedule.simulate"]
NO_TORCH += ["planner.planner", "planner.forecast", "planner.machine_plan", "planner.presets"]
NO_TORCH += ["planner.systems", "device.launch", "engine.profile", "data", "train.run_folder"]
NO_TORCH += ["tools.plan_request", "ui.server", "cli.main", "cli.plan", "cli.compare", "cli.ui"]


def modules() -> list[str]:
    """Dotted names below lohan; a package by its own."""
    names = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names.append(".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts))
    return names


MODULES = modules()


def file_of(name: str) -> Path:
    path = ROOT.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imports(tree: ast.AST, *, lazy: bool = True) -> Iterator[str]:
    """Yield the modules of this package that are imported, except under `if TYPE_CHECKING`.

    Imports inside functions count if `lazy`.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not lazy:
            continue
        if isinstance(node, ast.Import):
            actual = (a.name for a in node.names if a.name.split(".")[0] == "lohan")
            yield from (name.removeprefix("lohan").removeprefix(".") for name in actual)
        elif isinstance(node, ast.ImportFrom) and node.level:
            raise AssertionError(f"relative import in line {node.lineno}")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lohan":
            inner = (node.module or "").removeprefix("lohan").removeprefix(".")
            for alias in node.names:
                full = f"{inner}.{alias.name}".removeprefix(".")
                yield full if full in MODULES or full == "_core" else inner
        yield from imports(node, lazy=lazy)


def test_the_root_has_these_files_only() -> None:
    assert {path.name for path in ROOT.glob("*.py")} == ROOT_FILES


def test_every_package_has_its_row() -> None:
    actual = {name.partition(".")[0] for name in MODULES} - {"__init__", "__main__"}
    assert actual == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_to_earlier_packages(package: str) -> None:
    wrong = []
    for name in MODULES:
        if name.partition(".")[0] != package:
            continue
        for other in imports(ast.parse(file_of(name).read_text())):
            head = other.partition(".")[0]
            if head and (head not in RANK or RANK[head] > RANK[package]):
                wrong.append(f"{name} -> {other}")
    assert wrong == []


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    needs = {
        name: set(imports(ast.parse(file_of(name).read_text()), lazy=False)) & set(MODULES) - {name}
        for name in MODULES
    }
    while free := [name for name, left in needs.items() if not left]:
        for name in free:
            del needs[name]
        for left in needs.values():
            left.difference_update(free)
    assert needs == {}


def test_the_root_of_the_tests_has_no_test_files() -> None:
    names = {path.name for path in TESTS.glob("*.py")}
    assert names == {"__init__.py", "conftest.py", "cpu_times.py", "slow_tier.py"}


def test_test_modules_export_nothing() -> None:
    """Whatever several modules need, in imports or by name for another process, is in support/."""
    module = re.compile(r"\btests(\.\w+)*\.test_\w+")
    wrong = []
    for path in (*TESTS.rglob("*.py"), *TESTS.parent.joinpath("benchmarks").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                texts = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                texts = [alias.name for alias in node.names]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts = [node.value]
            else:
                continue
            wrong += [
                f"{path.name}: {actual[0]}" for text in texts if (actual := module.search(text))
            ]
    assert wrong == []


def loaded(code: str) -> set[str]:
    ended = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}; print('\\n' + ' '.join(sys.modules))"],
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(ended.stdout.splitlines()[-1].split())


def test_pure_layers_do_not_import_torch() -> None:
    light = [f"tests.support.{name}" for name in LIGHT_HELPERS]
    modules = [*light, *(f"lohan.{name}" for name in NO_TORCH)]
    names = loaded("; ".join(f"import {module}" for module in modules))
    assert {"lohan.store.store", *light} <= names
    assert not names & {"torch", "transformers", "safetensors"}


def test_help_does_not_import_torch() -> None:
    code = "sys.argv = ['lohan', '--help']; from lohan.cli import main\n"
    code += "try: main.main()\nexcept SystemExit as end: assert not end.code"
    names = loaded(f"exec({code!r})")
    assert "lohan.cli.main" in names
    assert not names & {"torch", "transformers", "safetensors", "numpy"}
