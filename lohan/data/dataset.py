"""Tokenised examples on disk, and the batch of any step.

Tokens and labels are flat arrays of little-endian int32; example i is [offsets[i], offsets[i + 1])
of both. Labels follow the Hugging Face convention: there is one per token, -100 where no loss is
taken, and the model shifts them. The first label of an example is therefore never used.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lohan.data.checksums import META, check_token_ids, sealed, verify
from lohan.errors import DataError
from lohan.util.files import checked, create, from_json, load_json, sync_folder, sync_path
from lohan.util.settings import Source
from lohan.util.units import align_up, counted

# -- Which examples make up the rows of batches ----------------------------------------------------
#
# The rows may use all examples or a part of them, and may pack several examples into a row.


OPEN_ROWS = 64  # maximum number of incomplete rows that packing considers
# Random streams of a seed. Streams below SPLIT are epochs.
SPLIT, PACK = 1 << 32, (1 << 32) + 1
MIX, SOURCE = 1 << 33, 1 << 40  # first streams of the blocks of a mixture, and of its sources
BLOCK = 1000  # number of consecutive rows in which every source of a mixture has its exact share


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of batches: row i holds the examples `members[starts[i] : starts[i + 1]]`."""

    members: np.ndarray
    starts: np.ndarray
    packed: bool = False

    @classmethod
    def single(cls, members: np.ndarray) -> Rows:
        return cls(members, np.arange(len(members) + 1, dtype=np.int64))

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        lengths = np.concatenate([np.diff(part.starts) for part in parts])
        members = np.concatenate([part.members for part in parts])
        return cls(members, np.cumsum([0, *lengths], dtype=np.int64), packed=parts[0].packed)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.members[self.starts[row] : self.starts[row + 1]]


def order(seed: int, stream: int, count: int) -> np.ndarray:
    """Return a permutation of `count` elements that depends only on `seed` and `stream`.

    `stream` is the number of an epoch, or one of the constants above, such as SPLIT.

    Raw PCG64 output is sorted instead of calling Generator.permutation, because numpy guarantees
    the raw stream across versions, and a run may be resumed with another version of numpy.
    """
    bits = np.random.PCG64(np.random.SeedSequence([seed, stream]))
    return np.argsort(bits.random_raw(count), kind="stable")


@lru_cache(maxsize=16)
def _epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    return order(seed, epoch, count)


def rows_of(seed: int, step: int, batch_size: int, count: int) -> np.ndarray:
    """Return the numbers of the rows in the batch of a step, out of `count` rows.

    Epochs follow one another without a gap or a short batch.
    """
    epochs, places = np.divmod(
        np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64), count
    )
    chosen = np.empty(batch_size, dtype=np.int64)
    for epoch in np.unique(epochs):
        in_epoch = epochs == epoch
        chosen[in_epoch] = _epoch_order(seed, int(epoch), count)[places[in_epoch]]
    return chosen


@dataclass(frozen=True)
class Mixture:
    """Rows of several sources, each with a fixed average share of the batches.

    The rows of the sources are numbered consecutively. The shares do not depend on the sizes of the
    sources, so a small source is repeated more often. As with the function `rows_of`, the rows of a
    step depend only on the step.
    """

    counts: tuple[int, ...]  # number of rows of each source
    weights: tuple[float, ...]

    @cached_property
    def shares(self) -> np.ndarray:
        """The number of rows of each source in BLOCK rows, at least 1, by largest remainders."""
        exact = np.array(self.weights) / sum(self.weights) * BLOCK
        shares = np.maximum(np.floor(exact).astype(np.int64), 1)
        for source in np.argsort(np.floor(exact) - exact, kind="stable")[: BLOCK - shares.sum()]:
            shares[source] += 1
        shares[np.argmax(shares)] -= shares.sum() - BLOCK
        return shares

    def rows_of(self, seed: int, step: int, batch_size: int) -> np.ndarray:
        chosen = np.empty(batch_size, dtype=np.int64)
        starts = np.cumsum([0, *self.counts[:-1]])
        for place in range(batch_size):
            block, at = divmod(step * batch_size + place, BLOCK)
            sources = np.repeat(np.arange(len(self.counts)), self.shares)
            sources = sources[_epoch_order(seed, MIX + block, BLOCK)]
            source = int(sources[at])
            before = int(np.count_nonzero(sources[:at] == source))
            rank = block * int(self.shares[source]) + before
            epoch, index = divmod(rank, self.counts[source])
            mixed = _epoch_order(seed, SOURCE * (source + 1) + epoch, self.counts[source])
            chosen[place] = starts[source] + mixed[index]
        return chosen


def mixture_of(first: np.ndarray, sources: Sequence[int], weights: tuple[float, ...]) -> Mixture:
    """Return the mixture of the rows whose first examples are `first`, in ascending order.

    `sources` contains the number of examples of each source.
    """
    source = np.searchsorted(np.cumsum(sources), first, side="right")
    counts = np.bincount(source, minlength=len(sources))
    if not counts.all():
        raise DataError(
            f"no example of file {int(np.argmin(counts)) + 1} is left to train on, and it has "
            "a share of every batch; lower --eval-split, or leave the file out"
        )
    return Mixture(tuple(map(int, counts)), weights)


def steps_for(count: int, epochs: float, batch_size: int) -> int:
    """Return the number of steps that see each of `count` rows `epochs` times.

    The last batch is filled with rows of the next epoch.
    """
    return max(1, -int(-(count * epochs) // batch_size))


def split(members: np.ndarray, share: float, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide the examples `members` at random into those to train on and a held-out share.

    Both parts are in file order.
    """
    held = max(1, round(share * len(members)))
    if held >= len(members):
        raise DataError(
            f"a share of {share:g} of {counted(len(members), 'example')} leaves "
            f"{len(members) - held} to train on; lower --eval-split, or give --eval-data"
        )
    mixed = members[order(seed, SPLIT, len(members))]
    return np.sort(mixed[held:]), np.sort(mixed[:held])


def pack(members: np.ndarray, lengths: np.ndarray, *, seq: int, seed: int) -> Rows:
    """Return rows of at most `seq` tokens, each with one or more examples.

    Examples are taken in a seeded order, and each is put into the first open row with room for it.
    The examples of a row stay together in every epoch; only the rows are shuffled.
    """
    closed: list[list[int]] = []
    open_rows: list[tuple[int, list[int]]] = []  # remaining tokens, examples
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


# -- Dataset --------------------------------------------------------------------------------------


FORMAT_VERSION = 2
IGNORE = -100
REBUILD = "remove the folder and start again, which rebuilds it"

Example = tuple[list[int], list[int]]  # tokens and labels


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Statistics of a prepared data file.

    Tokens are counted after examples are cut to `seq`; trained tokens carry loss. `cut` counts
    examples longer than `seq`, and `dropped` those with nothing left to train on. `skipped_turns`
    counts assistant turns of chats without loss, see `Encoder.chat`. `unseen_tools` counts examples
    with tools that the chat template does not show.
    """

    examples: int
    tokens: int
    trained_tokens: int
    longest: int
    cut: int
    dropped: int
    skipped_turns: int
    unseen_tools: int = 0


@dataclass(frozen=True)
class SourceSummary:
    """The number of examples of one of several files, and its share of batches."""

    file: str
    examples: int
    weight: float | None


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Tokenised examples on disk, in a seeded order; a batch depends only on the step.

    A batch consists of rows. If `rows` is None, each example of the file is a row.
    """

    folder: Path
    seed: int
    seq: int
    pad_id: int
    fingerprint: str
    summary: Summary
    rows: Rows | None = field(default=None, compare=False)
    sources: tuple[int, ...] = ()  # number of examples of each file, if there are several
    weights: tuple[float, ...] = ()  # shares of the files in a batch; empty if they have none
    # The first example as text.
    rendered: Mapping[str, str] = field(default_factory=dict, compare=False)
    ratings: str = ""  # "1" or "0" for each example; empty if examples have no rating

    def __len__(self) -> int:
        return self.summary.examples if self.rows is None else len(self.rows)

    @property
    def packed(self) -> bool:
        return self.rows is not None and self.rows.packed

    def split(self, share: float) -> tuple[Dataset, Dataset]:
        """Return the examples to train on, and a held-out share of them chosen by the seed."""
        parts = split(self._members, share, seed=self.seed)
        train, held = (replace(self, rows=Rows.single(members)) for members in parts)
        return train, held

    def pack(self) -> Dataset:
        """Return a dataset that packs several of these examples into each row, where they fit.

        Examples of files with different shares are not packed together.
        """
        members = self._members
        ends = np.cumsum(self.sources if self.weights else [self.summary.examples])
        parts = np.split(members, np.searchsorted(members, ends[:-1]))
        packed = [pack(p, self._lengths[p], seq=self.seq, seed=self.seed) for p in parts if len(p)]
        return replace(self, rows=Rows.joined(packed))

    @property
    def longest(self) -> int:
        """The number of tokens of the longest row."""
        return int(self._row_lengths.max())

    @property
    def shortest(self) -> int:
        """The number of tokens of the shortest row."""
        return int(self._row_lengths.min())

    @cached_property
    def _row_lengths(self) -> np.ndarray:
        if self.rows is None:
            return self._lengths
        summed: np.ndarray = np.add.reduceat(
            self._lengths[self.rows.members], self.rows.starts[:-1]
        )
        return summed

    @property
    def _members(self) -> np.ndarray:
        return np.arange(self.summary.examples) if self.rows is None else self.rows.members

    @property
    def _lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def _examples(self, row: int) -> list[tuple[np.ndarray, np.ndarray]]:
        indices = [row] if self.rows is None else self.rows[row].tolist()
        return [self.example(index) for index in indices]

    @cached_property
    def offsets(self) -> np.ndarray:
        loaded: np.ndarray = np.load(self.folder / "offsets.npy", mmap_mode="r")
        return loaded

    def example(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens and labels of one example.

        The file is read instead of mapped. Mapped pages would count as memory of the process, and
        access to a truncated mapping would kill the process, whereas a short read is an error.
        """
        begin, end = (int(x) for x in self.offsets[index : index + 2])
        return self._read("tokens.bin", begin, end), self._read("labels.bin", begin, end)

    def _read(self, name: str, begin: int, end: int) -> np.ndarray:
        data = read_exactly(self.folder / name, offset=4 * begin, nbytes=4 * (end - begin))
        return np.frombuffer(data, dtype="<i4")

    def indices(self, step: int, batch_size: int) -> np.ndarray:
        """Return the numbers of the rows in the batch of a step."""
        if self.weights:
            return self._mixture.rows_of(self.seed, step, batch_size)
        return rows_of(self.seed, step, batch_size, len(self))

    @cached_property
    def _mixture(self) -> Mixture:
        rows = Rows.single(self._members) if self.rows is None else self.rows
        return mixture_of(rows.members[rows.starts[:-1]], self.sources, self.weights)

    def batch_arrays(self, step: int, batch_size: int) -> dict[str, np.ndarray]:
        """Return the arrays of a step's batch, as described in `padded_rows` and `packed_rows`."""
        return self._arrays([int(row) for row in self.indices(step, batch_size)])

    def _arrays(self, rows: Sequence[int]) -> dict[str, np.ndarray]:
        arrays = [self._examples(row) for row in rows]
        if self.packed:
            return packed_rows(arrays, pad_id=self.pad_id, seq=self.seq)
        return padded_rows([row[0] for row in arrays], pad_id=self.pad_id, seq=self.seq)

    def batch(self, step: int, batch_size: int) -> dict[str, Any]:
        """Return `batch_arrays` as torch tensors, for `model(**batch)`."""
        return _tensors(self.batch_arrays(step, batch_size))

    def padded(self, examples: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
        """Return a batch with the given examples as rows."""
        return _tensors(padded_rows(examples, pad_id=self.pad_id, seq=self.seq))

    def passes(self, batch_size: int) -> Iterator[dict[str, Any]]:
        """Yield every row once, as batches.

        Rows are ordered by length, longest first. Rows of a batch then need little padding, and a
        lack of memory is detected early.
        """
        lengths = self._row_lengths
        rows = sorted(range(len(self)), key=lambda row: (-int(lengths[row]), row))
        for start in range(0, len(rows), batch_size):
            yield _tensors(self._arrays(rows[start : start + batch_size]))

    def steps_for(self, epochs: float, batch_size: int) -> int:
        return steps_for(len(self), epochs, batch_size)


def read_exactly(path: Path, *, offset: int, nbytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(nbytes)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; {REBUILD}") from None
    if len(data) != nbytes:
        raise DataError(
            f"{path}: {nbytes} bytes wanted at offset {offset}, {len(data)} there; {REBUILD}"
        )
    return data


def padded_rows(
    rows: Sequence[tuple[np.ndarray, np.ndarray]], *, pad_id: int, seq: int
) -> dict[str, np.ndarray]:
    """Return `input_ids` and `labels` with one example per row, and `attention_mask` if padded.

    Padding is on the right, to the longest example of the batch rounded up to a multiple of 8 but
    not past `seq`. Examples of equal length are not padded and get no mask.
    """
    lengths = np.array([len(tokens) for tokens, _ in rows])
    longest = int(lengths.max())
    if (lengths == longest).all():
        return {
            "input_ids": np.stack([tokens for tokens, _ in rows]).astype(np.int64),
            "labels": np.stack([labels for _, labels in rows]).astype(np.int64),
        }
    shape = (len(rows), min(align_up(longest, 8), seq))
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    labels_out = np.full(shape, IGNORE, dtype=np.int64)
    for row, (tokens, labels) in enumerate(rows):
        input_ids[row, : len(tokens)] = tokens
        labels_out[row, : len(labels)] = labels
    mask = (np.arange(shape[1]) < lengths[:, None]).astype(np.int64)
    return {"input_ids": input_ids, "labels": labels_out, "attention_mask": mask}


def packed_rows(
    rows: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]], *, pad_id: int, seq: int
) -> dict[str, np.ndarray]:
    """Return `input_ids`, `labels` and `position_ids` with several examples per row.

    Positions restart with each example. There is no mask: the model finds the borders in the
    positions. The first token of an example is not predicted from the example before it. Padding at
    the end of a row forms an example without loss.
    """
    longest = max(sum(len(tokens) for tokens, _ in row) for row in rows)
    shape = (len(rows), min(align_up(longest, 8), seq))
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    labels_out = np.full(shape, IGNORE, dtype=np.int64)
    positions = np.zeros(shape, dtype=np.int64)
    for number, row in enumerate(rows):
        at = 0
        for tokens, labels in row:
            end = at + len(tokens)
            input_ids[number, at:end] = tokens
            labels_out[number, at + 1 : end] = labels[1:]
            positions[number, at:end] = np.arange(len(tokens))
            at = end
        positions[number, at:] = np.arange(shape[1] - at)
    return {"input_ids": input_ids, "labels": labels_out, "position_ids": positions}


def _tensors(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def open_dataset(
    folder: Path, *, seed: int, vocab_size: int | None = None, verified: bool = True
) -> Dataset | None:
    """Return the complete cache in a folder, or None if there is none.

    The data files that the cache was made from are not read. Every file of the cache is compared
    with its checksum, and every token with the vocabulary, unless `verified` is False.
    """
    try:
        meta = load_json(folder / "meta.json")
        if meta["version"] != FORMAT_VERSION:
            return None
        files = checked(meta.get("sources", []), list[SourceSummary], "sources")
        dataset = Dataset(
            folder=folder,
            seed=seed,
            seq=checked(meta["seq"], int, "seq"),
            pad_id=checked(meta["pad_id"], int, "pad_id"),
            fingerprint=checked(meta["fingerprint"], str, "fingerprint"),
            summary=from_json(Summary, meta["summary"]),
            sources=tuple(file.examples for file in files),
            weights=tuple(file.weight for file in files if file.weight is not None),
            rendered=checked(meta.get("rendered", {}), dict[str, str], "rendered"),
            ratings=checked(meta.get("ratings", ""), str, "ratings"),
        )
        flat_bytes = 4 * dataset.summary.tokens
        sizes = [(folder / name).stat().st_size for name in ("tokens.bin", "labels.bin")]
        complete = sizes == [flat_bytes] * 2 and len(dataset.offsets) == len(dataset) + 1
        if not complete:
            return None
        if verified:
            verify(folder, meta)
            if vocab_size is not None:
                for name in ("tokens.bin", "labels.bin"):
                    check_token_ids(folder, name, vocab_size=vocab_size, ignore=IGNORE)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return dataset


# -- Examples of several sequences of numbers each -------------------------------------------------
#
# The examples of field NAME are concatenated in NAME.bin, and their offsets are in NAME.npy.
# meta.json describes the types and the content. It is written last and marks a complete folder.


VERSION = 2
TYPES = {"i": "<i4", "f": "<f4"}  # types on disk of integers and of floating-point numbers

Row = Mapping[str, np.ndarray]  # one example
Batch = dict[str, Any]
Draw = Callable[[Row, np.random.PCG64], Row]
DRAWS = 1 << 32  # keeps the random streams of `draw` apart from those of the order


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Examples of several named sequences, in a seeded order; a batch depends only on the step.

    `collate` converts examples to a batch. `draw` applies random changes to an example. In
    training, the changes differ between rows and steps. In evaluation, they are always the same.
    """

    folder: Path
    seed: int
    count: int  # number of examples on disk
    types: Mapping[str, str]  # numpy type of each field
    about: Mapping[str, Any]  # in meta.json: the result of the argument `about` of `write_fields`
    collate: Callable[[Sequence[Row]], Batch] = field(compare=False, repr=False)
    draw: Draw | None = field(default=None, compare=False, repr=False)
    members: np.ndarray | None = field(default=None, compare=False)  # selected examples; None: all
    sources: tuple[int, ...] = ()  # number of examples of each file
    weights: tuple[float, ...] = ()  # shares of the files in a batch; empty if they have none

    @property
    def rendered(self) -> Mapping[str, str]:
        """The first example as the model sees it."""
        texts: dict[str, str] = checked(self.about.get("rendered", {}), dict[str, str], "rendered")
        return texts

    def __len__(self) -> int:
        return self.count if self.members is None else len(self.members)

    def split(self, share: float) -> tuple[Fields, Fields]:
        """Return the examples to train on, and a held-out share of them chosen by the seed."""
        train, held = split(self._numbers, share, seed=self.seed)
        return replace(self, members=train), replace(self, members=held)

    def steps_for(self, epochs: float, batch_size: int) -> int:
        return steps_for(len(self), epochs, batch_size)

    def batch(self, step: int, batch_size: int) -> Batch:
        if self.weights:
            rows = self._mixture.rows_of(self.seed, step, batch_size)
        else:
            rows = rows_of(self.seed, step, batch_size, len(self))
        return self._of(rows, [(step, place) for place in range(batch_size)])

    def passes(self, batch_size: int) -> Iterator[Batch]:
        """Yield every example once, in batches.

        The longest come first, so that a lack of memory is detected early.
        """
        lengths = np.max([self._lengths(name) for name in self.types], axis=0)
        rows = np.argsort(-lengths[self._numbers], kind="stable")
        for start in range(0, len(rows), batch_size):
            batch_rows = rows[start : start + batch_size]
            yield self._of(batch_rows, [(int(self._numbers[row]),) for row in batch_rows])

    def longest(self, name: str) -> int:
        return int(self._lengths(name)[self._numbers].max())

    def example(self, number: int) -> dict[str, np.ndarray]:
        """Return an example by its number on disk; the files are read instead of mapped."""
        fields = {}
        for name, kind in self.types.items():
            begin, end = (4 * int(place) for place in self._offsets[name][number : number + 2])
            path = self.folder / f"{name}.bin"
            data = read_exactly(path, offset=begin, nbytes=end - begin)
            fields[name] = np.frombuffer(data, dtype=kind)
        return fields

    def _of(self, rows: np.ndarray, streams: Sequence[tuple[int, ...]]) -> Batch:
        """Return the batch of the given rows; `streams` seeds the random changes of each row."""
        examples: list[Row] = [self.example(int(self._numbers[row])) for row in rows]
        if self.draw is not None:
            seeds = (np.random.SeedSequence([self.seed, DRAWS, *stream]) for stream in streams)
            bits = map(np.random.PCG64, seeds)
            examples = [self.draw(one, seed) for one, seed in zip(examples, bits, strict=True)]
        return self.collate(examples)

    @cached_property
    def _mixture(self) -> Mixture:
        return mixture_of(self._numbers, self.sources, self.weights)

    @property
    def _numbers(self) -> np.ndarray:
        return np.arange(self.count) if self.members is None else self.members

    def _lengths(self, name: str) -> np.ndarray:
        return np.diff(self._offsets[name])

    @cached_property
    def _offsets(self) -> dict[str, np.ndarray]:
        return {name: np.load(self.folder / f"{name}.npy", mmap_mode="r") for name in self.types}


@contextmanager
def all_or_nothing(folder: Path, part: dict[str, Path], *, doing: str) -> Iterator[None]:
    """Install the files written in the `with` body together, or remove them on an error.

    `part` maps final names in `folder` to the paths of the files that are written.
    """
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
        # Make the files durable, remove the old meta.json, and move the new meta.json last.
        for path in part.values():
            sync_path(path)
        (folder / META).unlink(missing_ok=True)
        for name, path in part.items():
            path.replace(folder / name)
        sync_folder(folder)
    except BaseException as error:
        for path in part.values():
            with suppress(OSError):
                path.unlink()
        for empty in created:  # The innermost folder is first.
            with suppress(OSError):
                empty.rmdir()
        if isinstance(error, OSError):
            raise DataError(
                f"{error.filename or folder}: {error.strerror} while {doing}; check space and "
                "permissions there"
            ) from None
        raise


def create_part(path: Path) -> BinaryIO:
    return os.fdopen(create(path), "wb")


def write_fields(
    folder: Path,
    parts: Iterable[tuple[Source, Iterable[Row]]],
    *,
    about: Callable[[], Mapping[str, Any]],
    show: Callable[[Row], Mapping[str, str]],
) -> None:
    """Write the examples of several files to `folder`, atomically.

    All examples must have the same fields, which is not checked. `about` returns further facts for
    the description of the dataset. It is called after all examples were read, so it may count
    them. `show` renders the first example as text.
    """
    part: dict[str, Path] = {}
    with all_or_nothing(folder, part, doing="preparing the data"):
        types: dict[str, str] = {}
        offsets: dict[str, array[int]] = {}
        summaries: list[SourceSummary] = []
        shown: Mapping[str, str] = {}
        with ExitStack() as stack:
            files: dict[str, BinaryIO] = {}
            for source, examples in parts:
                number = 0
                for number, example in enumerate(examples, 1):  # noqa: B007 - counted
                    shown = shown or show(example)
                    for name, values in example.items():
                        if name not in files:
                            types[name] = TYPES["f" if values.dtype.kind == "f" else "i"]
                            offsets[name] = array("q", [0])
                            part[f"{name}.bin"] = folder / f"{name}.bin.part"
                            files[name] = stack.enter_context(create_part(part[f"{name}.bin"]))
                        files[name].write(values.astype(types[name]).tobytes())
                        offsets[name].append(offsets[name][-1] + len(values))
                summaries.append(SourceSummary(source.path.name, number, source.weight))
        for name, places in offsets.items():
            part[f"{name}.npy"] = folder / f"{name}.npy.part"
            with create_part(part[f"{name}.npy"]) as file:
                np.save(file, np.asarray(places, dtype="<i8"))
        count = min((len(places) - 1 for places in offsets.values()), default=0)
        meta = {
            "version": VERSION,
            "count": count,
            "fields": types,
            "about": {**about(), "rendered": dict(shown)},
            "sources": [asdict(one) for one in summaries],
        }
        part[META] = folder / f"{META}.part"
        with create_part(part[META]) as file:
            file.write(sealed(meta, part))


def open_fields(
    folder: Path,
    *,
    seed: int,
    collate: Callable[[Sequence[Row]], Batch],
    draw: Draw | None = None,
    verified: bool = True,
) -> Fields | None:
    """Return the examples that `write_fields` has written to a folder, or None if it is incomplete.

    The data files that the examples were made from are not read. Every file is compared with its
    checksum unless `verified` is False. `collate` and `draw` are those of Fields.
    """
    try:
        meta = load_json(folder / META)
        if meta["version"] != VERSION:
            return None
        files = checked(meta.get("sources", []), list[SourceSummary], "sources")
        opened = Fields(
            folder=folder,
            seed=seed,
            count=checked(meta["count"], int, "count"),
            types=checked(meta["fields"], dict[str, str], "fields"),
            about=checked(meta["about"], dict[str, Any], "about"),
            collate=collate,
            draw=draw,
            sources=tuple(file.examples for file in files),
            weights=tuple(file.weight for file in files if file.weight is not None),
        )
        whole = all(
            len(places) == opened.count + 1
            and (folder / f"{name}.bin").stat().st_size == 4 * int(places[-1])
            for name, places in opened._offsets.items()
        )
        if whole and verified:
            verify(folder, meta)
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None
    return opened if whole and opened.count and opened.types else None


def padded(rows: Sequence[np.ndarray], *, value: float, most: int) -> np.ndarray:
    """Return rows as one array, padded with `value` to the length of the longest row.

    That length is rounded up to a multiple of 8, but not to more than `most`.
    """
    longest = max(map(len, rows))
    width = max(longest, min(-(-longest // 8) * 8, most))
    wide = np.float32 if rows[0].dtype.kind == "f" else np.int64
    array = np.full((len(rows), width), value, dtype=wide)
    for number, row in enumerate(rows):
        array[number, : len(row)] = row
    return array
