"""Calls of tokenizers and chat templates with bounded memory and time, and clear errors."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lohan.errors import DataError, first_line

PIECE_CHARACTERS = 2**15  # maximum length of a piece of a long text, which is tokenised in one call
WINDOW_CHARACTERS = 256  # length on each side of a cut that is tokenised to validate the cut
BETWEEN_WORDS = re.compile(r"(?<=[^\W\d_]) (?=[^\W\d_])")

Tokenize = Callable[[str], list[int]]


def pieces(text: str, tokenize: Tokenize) -> Iterator[str]:
    """Yield a long text in pieces whose tokens, concatenated, are those of the uncut text.

    Cuts are between two words. Some tokenizers put a space in front of every text; for those, the
    space at the cut is left out. Both ways are tried on a window around each cut. If neither gives
    the tokens of the uncut window, the remaining text is not cut.
    """
    start = 0
    while len(text) - start > 2 * PIECE_CHARACTERS:
        near = text[start : start + PIECE_CHARACTERS]
        cut = max((match.start() for match in BETWEEN_WORDS.finditer(near)), default=0)
        skip = _skipped(text, start + cut, tokenize) if cut else None
        if skip is None:
            break
        yield near[:cut]
        start += cut + skip
    yield text[start:]


def _skipped(text: str, cut: int, tokenize: Tokenize) -> int | None:
    """Return how many characters to leave out at a cut, or None if the cut would change tokens."""
    before = text[max(0, cut - WINDOW_CHARACTERS) : cut]
    after = text[cut : cut + WINDOW_CHARACTERS]
    whole, first = tokenize(before + after), tokenize(before)
    return next((skip for skip in (0, 1) if first + tokenize(after[skip:]) == whole), None)


@contextmanager
def tokenizer_errors(place: str) -> Iterator[None]:
    """Turn a panic of a tokenizer's Rust code into a DataError.

    A PanicException is a BaseException, so handlers of Exception do not catch it.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise DataError(
            f"{place}: the tokenizer failed on this text: {first_line(error)}; shorten the text, "
            "or give tokenized input_ids"
        ) from None


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise TimeoutError inside the block after `seconds` of CPU time.

    The block must be Python code. Signals reach the main thread only; elsewhere there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(number: int, frame: Any) -> None:
        raise TimeoutError(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, expire)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
