"""Print what each dependency costs: size on disk, and time to import.

    python benchmarks/dependencies.py

The first rows are the packages that are always installed, each alone, and the packages that these
need. The other rows are what each extra adds to them. Import times are CPU times of new processes,
less that of an empty one, as the smallest of --rounds.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from common import HERE, format_table, machine, parser_of
from packaging.requirements import Requirement

PROJECT = HERE.parent / "pyproject.toml"
# Modules whose names differ from those of their packages.
MODULES = {"pillow": "PIL", "mlflow-skinny": "mlflow", "mkdocs-material": "material"}
LEFT_OUT = {"dev", "docs"}  # extras of people who work on LoHan


def requirements() -> dict[str, list[str]]:
    """Return the packages of each extra, with those that are always installed under ""."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    extras = {"": project["dependencies"], **project["optional-dependencies"]}
    return {
        extra: [Requirement(line).name for line in lines]
        for extra, lines in extras.items()
        if extra not in LEFT_OUT
    }


def closure(packages: list[str], installed: Mapping[str, int]) -> dict[str, int] | None:
    """Return the bytes of packages, and of what they need, without those in `installed`.

    None means that one of the packages is not installed.
    """
    sizes: dict[str, int] = {}
    waiting = [name(package) for package in packages]
    while waiting:
        package = waiting.pop()
        if package in installed or package in sizes:
            continue
        try:
            paths = [file.locate() for file in metadata.files(package) or []]
            needed = [Requirement(line) for line in metadata.requires(package) or []]
        except metadata.PackageNotFoundError:
            if package in map(name, packages):
                return None
            continue  # a requirement of another platform
        sizes[package] = sum(Path(path).stat().st_size for path in paths if Path(path).is_file())
        waiting += [
            name(each.name)
            for each in needed
            if each.marker is None or each.marker.evaluate({"extra": ""})
        ]
    return sizes


def name(package: str) -> str:
    return package.lower().replace("_", "-")


def import_s(module: str, rounds: int) -> float:
    """Return the CPU time of a process that imports a module; "" imports nothing."""
    times = []
    for _ in range(rounds):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", f"import {module or 'sys'}"], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def measure(rounds: int) -> list[dict[str, Any]]:
    """Return one row per package that is always installed, and one per extra."""
    wanted = requirements()
    empty_s, always = import_s("", rounds), wanted.pop("")
    core = closure(always, {})
    assert core is not None, "a dependency of LoHan is not installed"

    def row(what: str, sizes: Mapping[str, int], first: str) -> dict[str, Any]:
        module = MODULES.get(first, first).replace("-", "_")
        cost = {"bytes": sum(sizes.values()), "packages": len(sizes)}
        return {"what": what, **cost, "import_s": import_s(module, rounds) - empty_s}

    rows = [
        row(f"{each} {metadata.version(each)}", {each: core[name(each)]}, each) for each in always
    ]
    others = {each: size for each, size in core.items() if each not in map(name, always)}
    rows.append({"what": "what these need", "bytes": sum(others.values()), "packages": len(others)})
    for extra, packages in wanted.items():
        added = closure(packages, core)
        if added is None:
            rows.append({"what": f"lohan[{extra}]: not installed here"})
        else:
            versions = ", ".join(f"{each} {metadata.version(each)}" for each in packages)
            rows.append(row(f"lohan[{extra}]: {versions}", added, packages[0]))
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    rows = measure(asked.rounds)
    if asked.json:
        print(json.dumps({"machine": machine(asked.work), "rows": rows}, indent=1))
        return
    shown = [
        {
            "package": row["what"],
            "packages": row.get("packages", "-"),
            "MB": f"{row['bytes'] / 1e6:.1f}" if "bytes" in row else "-",
            "import s": f"{row['import_s']:.2f}" if "import_s" in row else "-",
        }
        for row in rows
    ]
    print(format_table(shown))


if __name__ == "__main__":
    main()
