"""Names of files that come out of files."""

from __future__ import annotations

import os

NAME_MAX, PATH_MAX = 255, 4095  # bytes, on Linux


def usable_path(text: str) -> bool:
    """Whether the system takes a text as a path, be there a file or not."""
    try:
        name = os.fsencode(text)
    except UnicodeEncodeError:
        return False
    if not name or b"\0" in name or len(name) > PATH_MAX:
        return False
    return all(len(part) <= NAME_MAX for part in name.split(b"/"))
