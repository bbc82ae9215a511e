"""Which examples make up the rows of batches: all, a part of them, or several packed into a row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lohan.errors import DataError
from lohan.util.units import counted

OPEN_ROWS = 64  # rows with room that an example may still go into
SPLIT, PACK = 1 << 32, (1 << 32) + 1  # streams of the seed, beyond any epoch


@dataclass(frozen=True, eq=False)
class Rows:
    """Row i holds the examples `members[starts[i] : starts[i + 1]]`."""

    members: np.ndarray
    starts: np.ndarray
    packed: bool = False

    @classmethod
    def single(cls, members: np.ndarray) -> Rows:
        return cls(members, np.arange(len(members) + 1, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.members[self.starts[row] : self.starts[row + 1]]


def order(seed: int, stream: int, count: int) -> np.ndarray:
    """A permutation, the one of an epoch or another stream of the seed.

    Sorting raw PCG64 output instead of Generator.permutation: numpy promises the same raw stream
    in every version, and a run may be resumed with another numpy.
    """
    bits = np.random.PCG64(np.random.SeedSequence([seed, stream]))
    return np.argsort(bits.random_raw(count), kind="stable")


@lru_cache(maxsize=2)
def _epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    return order(seed, epoch, count)


def rows_of(seed: int, step: int, batch_size: int, count: int) -> np.ndarray:
    """The rows of a step, of so many. Epochs follow one another without a gap or a short batch."""
    epochs, places = np.divmod(
        np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64), count
    )
    chosen = np.empty(batch_size, dtype=np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        chosen[here] = _epoch_order(seed, int(epoch), count)[places[here]]
    return chosen


def steps_for(count: int, epochs: float, batch_size: int) -> int:
    """Steps that see every row `epochs` times, the last step filled from the next epoch."""
    return max(1, -int(-(count * epochs) // batch_size))


def split(members: np.ndarray, share: float, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The examples to train on and those held back, each in the order of the file."""
    held = max(1, round(share * len(members)))
    if held >= len(members):
        raise DataError(
            f"a share of {share:g} of {counted(len(members), 'example')} leaves "
            f"{len(members) - held} to train on; lower --eval-split, or give --eval-data"
        )
    mixed = members[order(seed, SPLIT, len(members))]
    return np.sort(mixed[held:]), np.sort(mixed[:held])


def pack(members: np.ndarray, lengths: np.ndarray, *, seq: int, seed: int) -> Rows:
    """Rows of at most `seq` tokens: each example, in a seeded order, goes into the first row with
    room for it. What is packed together stays together in every epoch; the rows are shuffled."""
    closed: list[list[int]] = []
    open_rows: list[tuple[int, list[int]]] = []  # room left, examples
    for index in order(seed, PACK, len(members)).tolist():
        length = int(lengths[index])
        for place, (room, row) in enumerate(open_rows):
            if length <= room:
                row.append(index)
                open_rows[place] = (room - length, row)
                break
        else:
            open_rows.append((seq - length, [index]))
            if len(open_rows) > OPEN_ROWS:
                fullest = min(range(len(open_rows)), key=lambda place: open_rows[place][0])
                closed.append(open_rows.pop(fullest)[1])
    closed += [row for _, row in open_rows]
    starts = np.cumsum([0, *map(len, closed)], dtype=np.int64)
    return Rows(members[np.array([i for row in closed for i in row])], starts, packed=True)
