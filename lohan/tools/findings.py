"""What was found, for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OK, WARNING, PROBLEM = "ok", "warning", "problem"


@dataclass(frozen=True)
class Finding:
    subject: str
    state: str  # ok | warning | problem
    text: str
    advice: str = ""


def describe(found: Sequence[Finding]) -> list[str]:
    width = max(len(finding.subject) for finding in found)
    lines = []
    for finding in found:
        lines.append(f"{finding.state:8} {finding.subject:{width}}  {finding.text}")
        if finding.advice and finding.state != OK:
            lines.append(f"{'':8} {'':{width}}  -> {finding.advice}")
    counts = {state: sum(f.state == state for f in found) for state in (PROBLEM, WARNING)}
    lines.append("")
    lines.append(
        f"{_count(counts[PROBLEM], 'problem')}, {_count(counts[WARNING], 'warning')}"
        + ("" if counts[PROBLEM] else "; a run can start here")
    )
    return lines


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


def passed(found: Sequence[Finding]) -> bool:
    return all(finding.state != PROBLEM for finding in found)
