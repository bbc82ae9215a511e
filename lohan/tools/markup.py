"""HTML in small pieces. What comes from a run is escaped here and nowhere else."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any


class Markup(str):
    """HTML made here, not escaped again."""


def text(value: object) -> str:
    return value if isinstance(value, Markup) else escape(str(value))


def script_json(value: Any) -> str:
    """Safe inside a script element: no tag can begin in it."""
    made = json.dumps(_finite(value), separators=(",", ":"))
    return made.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def card(title: str, *parts: str) -> str:
    return f'<section class="card"><h2>{text(title)}</h2>{"".join(parts)}</section>'


def table(
    head: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Sequence[int] = ()
) -> str:
    """`numbers`: columns that stand on the right."""

    def line(tag: str, cells: Sequence[object]) -> str:
        kinds = ['class="n"' if at in numbers else "" for at in range(len(cells))]
        return "".join(
            f"<{tag} {kind}>{text(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True)
        )

    top = f"<tr>{line('th', head)}</tr>" if any(head) else ""
    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return f'<div class="wide"><table>{top}{body}</table></div>'


def note(words: str) -> str:
    return f'<p class="note">{text(words)}</p>'


def chart(name: str, title: str = "", *, tall: bool = False) -> str:
    head = f"<h3>{text(title)}</h3>" if title else ""
    return f'<div>{head}<div class="chart{" tall" if tall else ""}" id="{name}"></div></div>'
