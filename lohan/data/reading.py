"""A data file as examples, one by one, each with the place it stands at for messages."""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lohan.data.dataset import Example
from lohan.data.rows import encode_row, kind_of
from lohan.data.tables import SUFFIXES as TABLES
from lohan.data.tables import is_table, table_rows
from lohan.data.text import Encoder
from lohan.errors import DataError
from lohan.util.json_file import BadJson, NotJson, parse_json

SUFFIXES = (".txt", ".jsonl", ".json", *TABLES)
TEXT_BLOCK_BYTES = 2**18

Progress = Callable[[int, int], None]


def read_examples(
    source: Path, *, encoder: Encoder, seq: int, progress: Progress | None
) -> Iterator[tuple[str, Example]]:
    """(where it stands, tokens and labels) of each example, whatever the file's kind."""
    suffix = source.suffix.lower()
    report = progress or (lambda done, total: None)
    if suffix == ".txt":
        for ids in _pieces(_text_blocks(source, report), encoder=encoder, seq=seq, source=source):
            yield str(source), (ids, ids)
        return
    if is_table(source):
        rows = table_rows(source, report)
    else:
        rows = _jsonl_rows(source, report) if suffix == ".jsonl" else _json_rows(source, report)
    empty = True
    for place, row in rows:
        empty = False
        yield place, encode_row(row, encoder=encoder, place=place)
    if empty:
        raise DataError(f"{source}: holds no examples; check --data")


def _text_blocks(source: Path, report: Progress) -> Iterator[str]:
    """The text in blocks that end between two words, so that tokens are those of the whole."""
    decoder = io.IncrementalNewlineDecoder(
        codecs.getincrementaldecoder("utf-8-sig")(), translate=True
    )
    total, done, kept = source.stat().st_size, 0, ""
    with source.open("rb") as file:
        while True:
            raw = file.read(TEXT_BLOCK_BYTES)
            try:
                kept += decoder.decode(raw, final=not raw)
            except UnicodeDecodeError:
                raise DataError(
                    f"{source}: not UTF-8 text after byte {done}; save it as UTF-8"
                ) from None
            done += len(raw)
            report(done, total)
            if not raw:
                break
            end = max((m.start() for m in _BETWEEN_WORDS.finditer(kept)), default=len(kept))
            if kept[:end]:
                yield kept[:end]
            kept = kept[end:]
    if kept:
        yield kept


_BETWEEN_WORDS = re.compile(r"(?<=[^\W\d_]) (?=[^\W\d_])")


def _pieces(
    blocks: Iterator[str], *, encoder: Encoder, seq: int, source: Path
) -> Iterator[list[int]]:
    """One token stream cut into examples of `seq` tokens; the last may be shorter."""
    stream: list[int] | None = None
    for block in blocks:
        if stream is None:
            stream = encoder.bos(place=str(source))
        stream += encoder.ids(block, place=str(source))
        whole = len(stream) // seq * seq
        for begin in range(0, whole, seq):
            yield stream[begin : begin + seq]
        stream = stream[whole:]
    if stream:
        yield stream


def _jsonl_rows(source: Path, report: Progress) -> Iterator[tuple[str, dict[str, Any]]]:
    total, done = source.stat().st_size, 0
    with source.open("rb") as file:
        for number, raw in enumerate(file, 1):
            done += len(raw)
            place = f"{source}, line {number}"
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{place}: not UTF-8 text at byte {error.start}; save it as UTF-8"
                ) from None
            if text.strip():
                yield place, _json_object(text, place=place)
            if number % 64 == 0 or done == total:
                report(done, total)


def _json_object(text: str, *, place: str) -> dict[str, Any]:
    try:
        row = parse_json(text.rstrip())
    except NotJson as error:
        raise DataError(
            f"{place}: not JSON: {error.what} at column {error.column}; "
            "each line must be one JSON object"
        ) from None
    except BadJson as error:
        raise DataError(f"{place}: not usable JSON: {error}; correct or remove it") from None
    return _as_object(row, place=place)


def _as_object(row: Any, *, place: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(
            f'{place}: {kind_of(row)}, not an object; write {{"text": "..."}} or the like'
        )
    return row


def _json_rows(source: Path, report: Progress) -> Iterator[tuple[str, dict[str, Any]]]:
    """Items of a JSON list. The file is read whole; large sets belong in .jsonl."""
    try:
        rows = parse_json(source.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source}: not UTF-8 text at byte {error.start}; save it as UTF-8"
        ) from None
    except NotJson as error:
        hint = "rename it to .jsonl if each line is an object of its own"
        raise DataError(
            f"{source}, line {error.line}: not JSON: {error.what} at column {error.column}; {hint}"
        ) from None
    except BadJson as error:
        raise DataError(f"{source}: not usable JSON: {error}; correct it") from None
    if not isinstance(rows, list):
        raise DataError(f"{source}: {kind_of(rows)}, not a list; put the objects into [ ... ]")
    total = source.stat().st_size
    for number, row in enumerate(rows, 1):
        place = f"{source}, item {number}"
        yield place, _as_object(row, place=place)
        report(total * number // len(rows), total)
