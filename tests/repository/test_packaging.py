"""What a wheel holds: everything in lohan/ that version control does not ignore."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STATIC = ["app.js", "charts.js", "dom.js", "icon.svg", "index.html", "new.js", "plan.js"]
STATIC += ["report.html", "report.js", "run.js", "runs.js", "style.css", "timeline.js", "try.js"]
DATA = {
    "lohan/py.typed",
    "lohan/_core.pyi",
    "lohan/planner/machines.toml",
    "lohan/planner/models.toml",
    *(f"lohan/ui/static/{name}" for name in STATIC),
    "lohan/capture/tested.txt",
}


def test_data_files_are_part_of_the_package() -> None:
    """The build takes the folder as it is, less what .gitignore names."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]
    assert settings["wheel"] == {"packages": ["lohan"], "py-api": "cp312"}
    ignored = (ROOT / ".gitignore").read_text().split()
    files = {p.relative_to(ROOT) for p in (ROOT / "lohan").rglob("*") if p.is_file()}
    kept = {str(p) for p in files if not any(_matches(p, pattern) for pattern in ignored)}
    others = {name for name in kept if not name.endswith(".py")}
    assert others == DATA


def _matches(path: Path, pattern: str) -> bool:
    return any(part.match(pattern.rstrip("/")) for part in (path, *path.parents))


@pytest.mark.slow
def test_wheel(tmp_path: Path) -> None:
    """Builds a wheel; takes a minute of compiling."""
    if any(importlib.util.find_spec(name) is None for name in ("scikit_build_core", "nanobind")):
        pytest.skip("needs scikit-build-core and nanobind in this environment")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    place = ["-C", f"build-dir={tmp_path / 'build'}", "-w", str(tmp_path), str(ROOT)]
    subprocess.run([*build, *place], check=True)
    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "lohan").rglob("*.py")}
    assert DATA | modules <= names
    assert any(name.startswith("lohan/_core.") and name.endswith(".so") for name in names)


def test_every_public_name_is_there() -> None:
    import lohan

    assert all(getattr(lohan, name) is not None for name in lohan.__all__)
