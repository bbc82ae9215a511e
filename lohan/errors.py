"""One error family. Every message names the thing, the two numbers and the next move.

The command line prints a LohanError as one message and exits with code 2; anything else is a
defect and keeps its stack trace.
"""

from __future__ import annotations


class LohanError(Exception):
    """Base of everything LoHan raises on purpose."""


class ConfigError(LohanError):
    """A setting is unknown, malformed or contradicts another."""


class DataError(LohanError):
    """The training data is missing, malformed or empty."""


class ModelError(LohanError):
    """The model folder or module cannot be used as it is."""


class TrainingError(LohanError):
    """A step whose numbers no training has."""


class BudgetError(LohanError):
    """A memory or disk budget is too small for the run."""


class StoreError(LohanError):
    """The store is missing, incomplete, of another format or in use."""


class StorageIOError(StoreError):
    """A read or write failed, came back short or missed its deadline."""


class ChecksumError(StoreError):
    """Stored bytes are not the bytes that were written."""


class RankError(LohanError):
    """Another rank of the run is gone, or could not go on; `told`: it says why itself."""

    def __init__(self, message: str, *, told: bool = False) -> None:
        super().__init__(message)
        self.told = told


def first_line(error: BaseException) -> str:
    """What another library's error says, in a line: its name if it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    whole = lines[1:] if lines[0].endswith(":") and len(lines) > 1 else lines
    return whole[0].rstrip(".")[:200]
