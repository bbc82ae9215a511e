"""Compare the files of a folder before and after a command."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any


def tree(folder: Path) -> dict[str, str]:
    """Every file and link by its path, with its content."""
    collected = {}
    for place, folders, files in os.walk(folder):
        for name in (*files, *folders):
            path = Path(place) / name
            if path.is_symlink():
                collected[str(path)] = f"-> {path.readlink()}"
            elif path.is_file():
                collected[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return collected


def assert_kept(before: dict[str, str], folder: Path, what: Any) -> None:
    after = tree(folder)
    lost = [name for name, content in before.items() if after.get(name) != content]
    assert not lost, (what, lost)
