"""Preferences as tokens: prompts with a chosen and a rejected answer, or with one that is rated.

    prompt, chosen, rejected        texts or messages; the prompt may be the part both share
    prompt, completion, label       true where the completion is wanted

A pair is two examples that follow one another, a rated completion is one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from lohan.data.dataset import (
    IGNORE,
    Dataset,
    Example,
    Mixture,
    mixture_of,
    order,
    rows_of,
    split,
    steps_for,
)
from lohan.data.text import Encoder
from lohan.errors import DataError

Unit = tuple[list[Example], bool | None]  # the examples of a row, and its rating if it has one


def encode_preference(row: dict[str, Any], *, encoder: Encoder, place: str) -> Unit:
    """The examples of one row."""
    row = {key: value for key, value in row.items() if value is not None}
    if {"chosen", "rejected"} <= row.keys():
        prompt, answers = _split_prompt(row, place=place)
        return [_answer(prompt, one, encoder=encoder, place=place) for one in answers], None
    if {"prompt", "completion", "label"} <= row.keys():
        if not isinstance(row["label"], (bool, int)) or row["label"] not in (0, 1):
            raise DataError(f"{place}: label must be true or false, got {row['label']!r}")
        example = _answer(row["prompt"], row["completion"], encoder=encoder, place=place)
        return [example], bool(row["label"])
    found = ", ".join(row) or "none"
    raise DataError(
        f"{place}: no known keys (found: {found}); preferences have prompt+chosen+rejected, "
        "chosen+rejected, or prompt+completion+label"
    )


def _split_prompt(row: dict[str, Any], *, place: str) -> tuple[Any, tuple[Any, Any]]:
    """The prompt, given or shared by both answers, and the answers without it."""
    chosen, rejected = row["chosen"], row["rejected"]
    if "prompt" in row:
        return row["prompt"], (chosen, rejected)
    if type(chosen) is not type(rejected) or not isinstance(chosen, (str, list)):
        raise DataError(f"{place}: chosen and rejected must both be texts, or both messages")
    pairs = zip(chosen, rejected, strict=False)
    shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)))
    if isinstance(chosen, str):  # a word is not cut
        shared = chosen.rfind(" ", 0, shared) + 1
    return chosen[:shared], (chosen[shared:], rejected[shared:])


def _answer(prompt: Any, answer: Any, *, encoder: Encoder, place: str) -> Example:
    """Tokens, with labels on the answer alone."""
    for what, value in (("prompt", prompt), ("answer", answer)):
        if not isinstance(value, (str, list)) or (what == "answer" and not value):
            raise DataError(f"{place}: the {what} must be text or messages that are not empty")
    if isinstance(prompt, str) and isinstance(answer, str):
        return encoder.answer(prompt, answer, raw=True, place=place)
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    after = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    ids, labels = encoder.chat([*before, *after], place=place)
    asked = len(encoder.asked(before, place=place))
    return ids, [IGNORE] * asked + labels[asked:]


@dataclass
class Preferences:
    """Rows of preferences; the batch of any step is a pure function of it.

    Of pairs, row i is examples 2i and 2i + 1, and a batch has all the chosen before all the
    rejected. Of rated completions, the second half of a batch has each prompt with another's
    completion, from which the distance to the reference is estimated: that of the row before it in
    the first pass over the data, within its batch.
    """

    sequences: Dataset
    members: np.ndarray  # rows that belong here
    batch_rows: int  # of a batch in training
    objective: Any = None  # what a batch is for
    reference: np.ndarray | None = field(default=None, repr=False)  # log-probabilities, [rows, 2]

    @property
    def rated(self) -> bool:
        return bool(self.sequences.ratings)

    def __len__(self) -> int:
        return len(self.members)

    @property
    def total(self) -> int:
        """Rows of the file, here or held back."""
        return self.sequences.summary.examples // (1 if self.rated else 2)

    def digest(self) -> str:
        """Of all that decides which answers there are."""
        about = f"{self.sequences.fingerprint} {self.sequences.seed if self.rated else ''} "
        about += str(self.batch_rows if self.rated else "")
        return hashlib.sha256(about.encode() + self.members.tobytes()).hexdigest()[:16]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that a batch may have."""
        if not self.rated:
            return self.sequences.longest
        prompts, answers = zip(*(self._parts(i) for i in range(len(self.sequences))), strict=True)
        found = max(map(len, prompts)) + max(map(len, answers))
        return min(self.sequences.seq, found)

    def batch(self, step: int, batch_size: int) -> dict[str, Any]:
        seed = self.sequences.seed
        if self.sequences.weights:
            return self.of_rows(self.members[self._mixture.rows_of(seed, step, batch_size)])
        return self.of_rows(self.members[rows_of(seed, step, batch_size, len(self))])

    def passes(self, batch_size: int) -> Iterator[dict[str, Any]]:
        for start in range(0, len(self), batch_size):
            yield self.of_rows(self.members[start : start + batch_size])

    def of_rows(self, rows: np.ndarray) -> dict[str, Any]:
        import torch

        if self.rated:
            first = [self.sequences.example(int(row)) for row in rows]
            second = [self._mismatched(int(row)) for row in rows]
        else:
            first = [self.sequences.example(2 * int(row)) for row in rows]
            second = [self.sequences.example(2 * int(row) + 1) for row in rows]
        made = self.sequences.padded([*first, *second])
        made |= {"objective": self.objective, "stats": {}}
        if self.reference is not None:
            made["reference"] = torch.from_numpy(self.reference[rows].T.reshape(-1).copy())
        if self.rated:
            made["desirable"] = torch.tensor([self.sequences.ratings[r] == "1" for r in rows])
        return made

    @cached_property
    def _mixture(self) -> Mixture:
        first = self.members * (1 if self.rated else 2)
        return mixture_of(first, self.sequences.sources, self.sequences.weights)

    def _parts(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Prompt and answer."""
        tokens, labels = self.sequences.example(row)
        first = int(np.argmax(labels != IGNORE))
        return tokens[:first], tokens[first:]

    def _mismatched(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        prompt, _ = self._parts(row)
        _, answer = self._parts(self._before[row])
        tokens = np.concatenate([prompt, answer])
        labels = np.concatenate([np.full(len(prompt), IGNORE, dtype=answer.dtype), answer])
        return tokens[: self.sequences.seq], labels[: self.sequences.seq]

    @cached_property
    def _before(self) -> dict[int, int]:
        """Of each row the one before it in its batch, of the first the last."""
        mixed = self.members[order(self.sequences.seed, 0, len(self))]
        batches = np.split(mixed, range(self.batch_rows, len(mixed), self.batch_rows))
        before = np.concatenate([np.roll(one, 1) for one in batches])
        return dict(zip(mixed.tolist(), before.tolist(), strict=True))

    def split(self, share: float) -> tuple[Self, Self]:
        parts = split(self.members, share, seed=self.sequences.seed)
        train, held = (replace(self, members=part) for part in parts)
        return train, held

    def steps_for(self, epochs: float, batch_size: int) -> int:
        return steps_for(len(self), epochs, batch_size)
