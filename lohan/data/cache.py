"""Tokenising data files into a cache, atomically.

`meta.json` is written last and contains a fingerprint of the inputs. It marks a complete cache,
which a resumed run reuses.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lohan.data.checksums import sealed
from lohan.data.dataset import (
    FORMAT_VERSION,
    IGNORE,
    REBUILD,
    Dataset,
    SourceSummary,
    Summary,
    all_or_nothing,
    create_part,
    open_dataset,
)
from lohan.data.reading import (
    PACKED,
    SUFFIXES,
    OnProgress,
    data_files,
    files_of,
    is_saved,
    is_table,
    read_examples,
    suffix_of,
)
from lohan.data.supervised import Unit
from lohan.data.text import Encoder, chat_template, tokenizer_files
from lohan.errors import DataError
from lohan.util.settings import Source

CACHE_FILES = ("tokens.bin", "labels.bin", "offsets.npy", "meta.json")  # meta.json must be last


def prepare(
    source: Path | Sequence[Source],
    *,
    model_dir: Path,
    cache_dir: Path,
    seq: int,
    seed: int = 0,
    vocab_size: int | None = None,
    template: str | None = None,
    progress: OnProgress | None = None,
    option: str = "--data",
    preferences: bool = False,
) -> Dataset:
    """Tokenise one file or several into `cache_dir`, or reuse a cache made from the same inputs.

    `option` is the command-line option that names the files, for messages. With `preferences`, rows
    are pairs of answers or rated answers. Return the dataset.
    """
    sources = [Source(source)] if isinstance(source, Path) else list(source)
    for one in sources:
        check_source(one.path, option)
    fingerprint = _fingerprint(
        sources,
        model_dir=model_dir,
        seq=seq,
        vocab_size=vocab_size,
        template=template,
        preferences=preferences,
    )
    ready = open_dataset(cache_dir, seed=seed)
    if ready is not None and ready.fingerprint == fingerprint:
        return ready

    part = {name: cache_dir / f"{name}.part" for name in CACHE_FILES}
    names = ", ".join(str(one.path) for one in sources)
    with all_or_nothing(cache_dir, part, doing=f"tokenising {names}"):
        encoder = Encoder(model_dir, template=template)
        example_counts = [0] * len(sources)

        def examples() -> Iterator[tuple[int, str, Unit]]:
            for number, one in enumerate(sources):
                read = read_examples(
                    one.path, encoder=encoder, seq=seq, progress=progress, preferences=preferences
                )
                yield from ((number, place, example) for place, example in read)

        counts, ratings = _write_examples(
            examples(), part=part, seq=seq, vocab_size=vocab_size, counts=example_counts
        )
        seen = {"skipped_turns": encoder.skipped_turns, "unseen_tools": encoder.unseen_tools}
        meta = {
            "version": FORMAT_VERSION,
            "fingerprint": fingerprint,
            "seq": seq,
            "pad_id": encoder.pad_id(vocab_size),
            "summary": asdict(Summary(**counts, **seen)),
            "sources": _summaries(sources, example_counts, seq=seq, dropped=counts["dropped"]),
            "rendered": _rendered(encoder, part, pairs=preferences and not ratings),
            "ratings": ratings,
        }
        with create_part(part["meta.json"]) as file:
            file.write(sealed(meta, part))
    dataset = open_dataset(cache_dir, seed=seed)
    if dataset is None:
        raise DataError(f"{cache_dir}: does not hold what was just written there; {REBUILD}")
    return dataset


def _summaries(
    sources: Sequence[Source], counts: Sequence[int], *, seq: int, dropped: int
) -> list[dict[str, Any]]:
    """Return the summary of each file if there are several.

    Raise DataError if a file has no examples.
    """
    for one, count in zip(sources, counts, strict=True):
        if not count:
            raise DataError(
                f"{one.path}: no example is left to train on ({dropped} dropped: the first {seq} "
                "tokens held no answer); raise --seq or check the file"
            )
    if len(sources) == 1:
        return []
    pairs = zip(sources, counts, strict=True)
    return [asdict(SourceSummary(one.path.name, count, one.weight)) for one, count in pairs]


SHOWN_TOKENS = 4000


def _rendered(encoder: Encoder, part: dict[str, Path], *, pairs: bool) -> dict[str, str]:
    """Return the first example as the model sees it, decoded to text.

    The text is divided at the first label. For a pair, the rejected answer is included.
    """
    offsets = np.load(part["offsets.npy"])[: 3 if pairs else 2].tolist()
    texts = []
    for start, stop in pairwise(offsets):
        ids, labels = (
            np.fromfile(part[name], dtype="<i4", offset=4 * start, count=stop - start)
            for name in ("tokens.bin", "labels.bin")
        )
        first = int(np.argmax(labels != IGNORE))
        prompt, answer = ids[:first][-SHOWN_TOKENS:], ids[first:][:SHOWN_TOKENS]
        texts.append(encoder.show(prompt.tolist(), answer.tolist()))
    if pairs and texts[0]:
        texts[0]["rejected"] = texts[1]["answer"]
    return texts[0]


def check_source(source: Path, option: str) -> None:
    if not source.exists():
        raise DataError(f"{source}: no such file; check {option}")
    if is_saved(source):
        return
    if source.is_dir() and data_files(source):
        return
    if not source.is_file():
        raise DataError(f"{source}: not a file; {option} takes one {', '.join(SUFFIXES)} file")
    if suffix_of(source) not in SUFFIXES:
        raise DataError(
            f"{source}: unknown kind {source.suffix!r}; data is read from {', '.join(SUFFIXES)}, "
            f"the first five also compressed, as in .jsonl{PACKED}"
        )
    if source.suffix.lower() == PACKED and is_table(source.with_suffix("")):
        raise DataError(
            f"{source}: compressed tables are not supported; unpack it: gunzip {source.name}"
        )
    if not os.access(source, os.R_OK):
        raise DataError(f"{source}: cannot be read; check its permissions")
    if source.stat().st_size == 0:
        raise DataError(f"{source}: the file is empty; check {option}")


def _fingerprint(
    sources: Sequence[Source],
    *,
    model_dir: Path,
    seq: int,
    vocab_size: int | None,
    template: str | None,
    preferences: bool,
) -> str:
    """Return a hash of everything that determines the token files: contents, not names or times."""
    kinds = " ".join(one.path.suffix for one in sources)
    kinds += "".join(suffix_of(one.path) for one in sources if one.path.suffix.lower() == PACKED)
    whole = hashlib.sha256(f"{FORMAT_VERSION} {seq} {vocab_size} {kinds}".encode())
    if any(one.weight is not None for one in sources):
        whole.update(f"\n{[one.weight for one in sources]}".encode())
    if preferences:
        whole.update(b"\npreferences")
    if template is not None:
        whole.update(f"\n{chat_template(template)}".encode())
    files = [path for one in sources for path in files_of(one.path)]
    for path in (*files, *tokenizer_files(model_dir)):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        whole.update(f"\n{'' if path in files else path.name} {digest}".encode())
    return whole.hexdigest()


def _write_examples(
    units: Iterator[tuple[int, str, Unit]],
    *,
    part: dict[str, Path],
    seq: int,
    vocab_size: int | None,
    counts: list[int],
) -> tuple[dict[str, int], str]:
    """Write the examples that carry loss and their offsets; return the counts and ratings.

    The number of examples of each file is added to `counts`. The examples of a unit are either all
    written or all dropped.

    Tokens after the last label are not written, because a causal model takes no loss from them.
    """
    offsets, ratings = array("q", [0]), []
    cut = dropped = trained = longest = 0
    size = rated = None
    with create_part(part["tokens.bin"]) as tokens, create_part(part["labels.bin"]) as labels:
        for source, place, (examples, rating) in units:
            if size is not None and (len(examples), rating is None) != (size, not rated):
                raise DataError(f"{place}: pairs and rated completions in one set; give one kind")
            size, rated = len(examples), rating is not None
            arrays = [[np.asarray(values, dtype=np.int64) for values in one] for one in examples]
            lengths = []
            for ids, targets in arrays:
                _check_range(ids, targets, vocab_size=vocab_size, place=place)
                carrying = 1 + np.flatnonzero(targets[1:] != IGNORE)
                wanted = int(carrying[-1]) + 1 if len(carrying) else 0
                cut += wanted > seq
                count = int(np.count_nonzero(carrying < min(wanted, seq)))
                lengths.append((min(wanted, seq), count))
            if not all(count for _, count in lengths):
                dropped += 1
                continue
            for (ids, targets), (length, count) in zip(arrays, lengths, strict=True):
                tokens.write(ids[:length].astype("<i4").tobytes())
                labels.write(targets[:length].astype("<i4").tobytes())
                offsets.append(offsets[-1] + length)
                trained += count
                longest = max(longest, length)
            counts[source] += len(examples)
            ratings.append("" if rating is None else str(int(rating)))
    with create_part(part["offsets.npy"]) as file:
        np.save(file, np.asarray(offsets, dtype="<i8"))
    return {
        "examples": len(offsets) - 1,
        "tokens": offsets[-1],
        "trained_tokens": trained,
        "longest": longest,
        "cut": cut,
        "dropped": dropped,
    }, "".join(ratings)


def _check_range(
    ids: np.ndarray, targets: np.ndarray, *, vocab_size: int | None, place: str
) -> None:
    limit = vocab_size if vocab_size is not None else 2**31
    for values in (ids, targets[targets != IGNORE]):
        wrong = values[(values < 0) | (values >= limit)]
        if len(wrong):
            raise DataError(
                f"{place}: token {wrong[0]} is outside the model's vocabulary of {limit}; "
                "use the tokenizer that belongs to the model"
            )
