"""Displays for tests."""

from __future__ import annotations


class Watch:
    """A display that records its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def advance(self, task: str, done: int, total: int) -> None: ...
    def memory(self, planned: dict, budgets: dict) -> None: ...
    def first_step(self, number: int, total: int) -> None: ...
    def step(self, row: dict, total: int) -> None: ...
    def close(self) -> None: ...
