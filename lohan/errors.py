"""The exceptions of LoHan. Each message names the subject, both numbers and the next step.

The command line prints a LohanError as one message and exits with code 2. Any other exception is a
defect and keeps its stack trace.
"""

from __future__ import annotations


class LohanError(Exception):
    """Base class of all exceptions that LoHan raises deliberately."""


class ConfigError(LohanError):
    """Raised if a setting is unknown, malformed or contradicts another."""


class DataError(LohanError):
    """Raised if the training data is missing, malformed or empty."""


class ModelError(LohanError):
    """Raised if the model folder or module cannot be used as it is."""


class TrainingError(LohanError):
    """Raised when the loss or the gradient norm is NaN, infinite or implausible."""


class BudgetError(LohanError):
    """Raised if a memory or disk budget is too small for the run."""


class StoreError(LohanError):
    """Raised if the store is missing, incomplete, in use or of another format."""


class StorageIOError(StoreError):
    """Raised if a read or write failed, was short or missed its deadline."""


class ChecksumError(StoreError):
    """Raised if stored bytes differ from the bytes that were written."""


class RankError(LohanError):
    """Raised if another rank of the run has ended or failed.

    `reported` is True if that rank reports the cause itself.
    """

    def __init__(self, message: str, *, reported: bool = False) -> None:
        super().__init__(message)
        self.reported = reported


def first_line(error: BaseException) -> str:
    """Return the message of another library's error in one line, or its type if it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    whole = lines[1:] if lines[0].endswith(":") and len(lines) > 1 else lines
    return whole[0].rstrip(".")[:200]
