"""Tokenised examples on disk, and the batch of any step.

Tokens and labels are flat little-endian int32; example i is [offsets[i], offsets[i + 1]) of both.
Labels follow the Hugging Face convention: as long as the tokens, -100 where no loss is taken, and
the model does the shift; so the first label of an example never counts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from lohan.errors import DataError
from lohan.units import align_up

FORMAT_VERSION = 1
IGNORE = -100
REBUILD = "remove the folder and start again to build it anew"

Example = tuple[list[int], list[int]]  # tokens and labels


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What came out of the file. Tokens are counted after the cut; trained ones carry loss.

    cut: examples longer than `seq`. dropped: examples with nothing left to train on.
    skipped_turns: assistant turns of chats that had to go without loss, see `Encoder.chat`.
    """

    examples: int
    tokens: int
    trained_tokens: int
    longest: int
    cut: int
    dropped: int
    skipped_turns: int


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Tokenised examples on disk, in a seeded order; a batch depends on nothing but the step."""

    folder: Path
    seed: int
    seq: int
    pad_id: int
    fingerprint: str
    summary: Summary

    def __len__(self) -> int:
        return self.summary.examples

    @cached_property
    def offsets(self) -> np.ndarray:
        loaded: np.ndarray = np.load(self.folder / "offsets.npy", mmap_mode="r")
        return loaded

    def example(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and labels of one example.

        Read, not mapped: touched pages of a map would count as the process's memory, and a file
        cut short would kill the process where a short read is an error.
        """
        begin, end = (int(x) for x in self.offsets[index : index + 2])
        return self._read("tokens.bin", begin, end), self._read("labels.bin", begin, end)

    def _read(self, name: str, begin: int, end: int) -> np.ndarray:
        path = self.folder / name
        try:
            values = np.fromfile(path, dtype="<i4", count=end - begin, offset=4 * begin)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}; {REBUILD}") from None
        if len(values) != end - begin:
            raise DataError(
                f"{path}: {4 * (end - begin)} bytes wanted at offset {4 * begin}, "
                f"{values.nbytes} there; {REBUILD}"
            )
        return values

    def indices(self, step: int, batch_size: int) -> np.ndarray:
        """The examples of a step. Epochs follow one another without a gap or a short batch."""
        epochs, places = np.divmod(
            np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64), len(self)
        )
        chosen = np.empty(batch_size, dtype=np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            chosen[here] = _epoch_order(self.seed, int(epoch), len(self))[places[here]]
        return chosen

    def batch_arrays(self, step: int, batch_size: int) -> dict[str, np.ndarray]:
        """A step's `input_ids` and `labels`, and `attention_mask` if anything is padded.

        Padding is on the right, to the longest example of the batch rounded up to 8 but not past
        `seq`. Examples of one length are left as they are, without a mask.
        """
        rows = [self.example(int(index)) for index in self.indices(step, batch_size)]
        lengths = np.array([len(tokens) for tokens, _ in rows])
        longest = int(lengths.max())
        if (lengths == longest).all():
            return {
                "input_ids": np.stack([tokens for tokens, _ in rows]).astype(np.int64),
                "labels": np.stack([labels for _, labels in rows]).astype(np.int64),
            }
        shape = (batch_size, min(align_up(longest, 8), self.seq))
        input_ids = np.full(shape, self.pad_id, dtype=np.int64)
        labels_out = np.full(shape, IGNORE, dtype=np.int64)
        for row, (tokens, labels) in enumerate(rows):
            input_ids[row, : len(tokens)] = tokens
            labels_out[row, : len(labels)] = labels
        mask = (np.arange(shape[1]) < lengths[:, None]).astype(np.int64)
        return {"input_ids": input_ids, "labels": labels_out, "attention_mask": mask}

    def batch(self, step: int, batch_size: int) -> dict[str, Any]:
        """`batch_arrays` as torch tensors: what `model(**batch)` takes."""
        import torch

        return {k: torch.from_numpy(v) for k, v in self.batch_arrays(step, batch_size).items()}

    def steps_for(self, epochs: float, batch_size: int) -> int:
        """Steps that see every example `epochs` times, the last step filled from the next epoch."""
        return max(1, -int(-(len(self) * epochs) // batch_size))


@lru_cache(maxsize=2)
def _epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The permutation of an epoch.

    Sorting raw PCG64 output instead of Generator.permutation: numpy promises the same raw stream
    in every version, and a run may be resumed with another numpy.
    """
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch]))
    return np.argsort(bits.random_raw(count), kind="stable")


def open_dataset(folder: Path, *, seed: int) -> Dataset | None:
    """The complete cache in a folder, or None if there is none; the source is not looked at."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        if meta["version"] != FORMAT_VERSION:
            return None
        dataset = Dataset(
            folder=folder,
            seed=seed,
            seq=meta["seq"],
            pad_id=meta["pad_id"],
            fingerprint=meta["fingerprint"],
            summary=Summary(**meta["summary"]),
        )
        flat_bytes = 4 * dataset.summary.tokens
        sizes = [(folder / name).stat().st_size for name in ("tokens.bin", "labels.bin")]
        complete = sizes == [flat_bytes] * 2 and len(dataset.offsets) == len(dataset) + 1
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return dataset if complete else None
