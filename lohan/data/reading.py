"""Reading examples from data files: text, JSON lines and lists, CSV, and tables.

Files are tokenised while they are read and are never in memory as a whole. Large files are
tokenised by several processes.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import multiprocessing
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

from lohan.data.supervised import Unit, encode_preference
from lohan.data.text import Encoder, encode_row, kind_of
from lohan.errors import DataError
from lohan.util.files import BadJson, NotJson, check_depth, parse_json

# -- Tables of the datasets package ----------------------------------------------------------------
#
# A table is a folder written by `save_to_disk`, a .parquet file or an .arrow file. Rows are read in
# batches and are not copied to other files.


TABLE_SUFFIXES = (".parquet", ".arrow")
ROWS = 256  # number of rows read at a time
SPLIT = "train"

OnProgress = Callable[[int, int], None]


def is_table(source: Path) -> bool:
    return source.suffix.lower() in TABLE_SUFFIXES or is_saved(source)


def is_saved(source: Path) -> bool:
    """Return whether a folder was written by `save_to_disk` of a Dataset or DatasetDict."""
    return any((source / name).is_file() for name in ("state.json", "dataset_dict.json"))


def files_of(source: Path) -> list[Path]:
    """Return all files from which the rows of a source are read."""
    if source.is_dir() and not is_saved(source):
        return data_files(source)
    return sorted(p for p in source.rglob("*") if p.is_file()) if source.is_dir() else [source]


_TRAIN, _OTHER = (
    re.compile(rf"(?:^|[-_./])(?:{words})(?:[-_./0-9]|$)")
    for words in ("train|training", "test|testing|valid|validation|val|dev|eval|evaluation")
)


def data_files(folder: Path) -> list[Path]:
    """Return the training files of a folder, such as `hf download` creates, sorted by name.

    The list is empty if the folder holds no data files.
    """
    kinds = [suffix for suffix in SUFFIXES if suffix != ".txt"]
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and suffix_of(path) in kinds
        and path.name not in _ABOUT_DATA
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    names = {path: str(path.relative_to(folder)).lower() for path in files}
    train = [path for path in files if _TRAIN.search(names[path])]
    if not train and any(_OTHER.search(name) for name in names.values()):
        raise DataError(
            f"{folder}: has {names[files[0]]} and others, and none for training by its name; name "
            f"the files: --data {files[0]}"
        )
    chosen = train or files
    if len(kinds := sorted({suffix_of(path) for path in chosen})) > 1:
        raise DataError(
            f"{folder}: has files of several kinds, {', '.join(kinds)}; name those to train on: "
            f"--data {chosen[0]}"
        )
    return chosen


_ABOUT_DATA = ("dataset_infos.json", "dataset_info.json", "state.json")


def suffix_of(source: Path) -> str:
    """Return the suffix of a file's name, without the suffix of the compression."""
    name = source.name.lower()
    return Path(name.removesuffix(PACKED)).suffix


@contextmanager
def opened(source: Path) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """Open a file for decompressed reading; yield it with a function that returns the position.

    The position counts compressed bytes, so it can be compared with the file's size.
    """
    with source.open("rb") as raw:
        if not source.name.lower().endswith(PACKED):
            yield raw, raw.tell
            return
        try:
            with gzip.GzipFile(fileobj=raw) as file:
                yield file, raw.tell  # type: ignore[misc]
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(
                f"{source}: cannot be unpacked: {error}; download or pack it again"
            ) from None


def table_rows(source: Path, report: OnProgress) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, row) for each row of a table, without the columns that are empty in the row.

    `place` is text for messages that says where the row is.
    """
    try:
        total, rows = _open(source)
        for number, row in enumerate(rows, 1):
            yield f"{source}, row {number}", {k: v for k, v in row.items() if v is not None}
            report(number, total)
    except DataError:
        raise
    except Exception as error:  # Table readers may raise any exception.
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{source}: cannot be read as a table: {first}; write it again with save_to_disk or "
            "to_parquet"
        ) from None


def _open(source: Path) -> tuple[int, Iterator[dict[str, Any]]]:
    try:
        import datasets
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"{source}: tables are read with the package datasets, which is not installed; pip "
            "install datasets, or give a .jsonl file"
        ) from None
    if source.suffix.lower() == ".parquet":
        file = pyarrow.parquet.ParquetFile(source)
        batches = file.iter_batches(batch_size=ROWS)
        return file.metadata.num_rows, (row for batch in batches for row in batch.to_pylist())
    dataset: Any
    if source.is_dir():
        dataset = datasets.load_from_disk(str(source))
        if isinstance(dataset, datasets.DatasetDict):
            if SPLIT not in dataset:
                names = list(dataset)
                raise DataError(
                    f"{source}: has the splits {', '.join(names)} and no {SPLIT!r}; give the "
                    f"folder of one of them, such as {source / names[0]}"
                )
            dataset = dataset[SPLIT]
    else:
        dataset = datasets.Dataset.from_file(str(source))
    return len(dataset), iter(dataset)


# -- Examples of a data file, each with its place in the file for messages -------------------------


PACKED = ".gz"
SUFFIXES = (".txt", ".jsonl", ".json", ".csv", ".tsv", *TABLE_SUFFIXES)
TEXT_BLOCK_BYTES = 2**18
JSON_BLOCK_BYTES = 2**20
FIELD_BYTES = 2**26  # maximum length of a value in a .csv file
ROWS_PER_TASK = 64  # number of rows that are sent to a process at a time
PARALLEL_BYTES = 32 * 2**20  # minimum file size for which starting processes pays off
PROCESSES = 4  # maximum number of processes; each takes about 300 MiB
START = "spawn"

Row = tuple[str, dict[str, Any]]


def read_examples(
    source: Path,
    *,
    encoder: Encoder,
    seq: int,
    progress: OnProgress | None,
    preferences: bool = False,
) -> Iterator[tuple[str, Unit]]:
    """Yield (place, tokens and labels) for each example of a data file of any kind.

    `place` is text for messages that says where the example is. `encoder` makes tokens and labels.
    With `preferences`, a row is a pair of answers or a rated answer.
    """
    report = progress or (lambda done, total: None)
    processes = processes_for(source)
    if suffix_of(source) == ".txt":
        blocks = ((str(source), block) for block in text_blocks(source, report))
        tokens = mapped(_block_ids, blocks, encoder, processes)
        for ids in _examples_of(tokens, encoder=encoder, seq=seq, source=source):
            yield str(source), ([(ids, ids)], None)
        return
    empty, work = True, _preference_ids if preferences else _row_ids
    for encoded in mapped(work, read_rows(source, report), encoder, processes):
        empty = False
        yield encoded
    if empty:
        raise DataError(f"{source}: holds no examples; check --data")


class Progress:
    """A progress report that reaches its total only when `end` is called, after the last row."""

    def __init__(self, report: OnProgress) -> None:
        self._report, self._total = report, 1

    def __call__(self, done: int, total: int) -> None:
        self._total = max(1, total)
        self._report(min(done, self._total - 1), self._total)

    def end(self) -> None:
        self._report(self._total, self._total)


def count_rows(source: Path) -> int:
    """Return the number of examples in a data file."""
    if suffix_of(source) == ".txt":
        raise DataError(
            f"{source}: a text is cut by tokens, so its examples are not counted; give --examples N"
        )
    return sum(1 for _ in read_rows(source, lambda done, total: None))


def read_rows(source: Path, report: OnProgress) -> Iterator[Row]:
    """Yield (place, object) for each row of a data file; `place` is text for messages.

    `report` is called with the work that is done and the total.
    """
    progress = Progress(report)
    yield from _rows_of(source, progress)
    progress.end()


def _rows_of(source: Path, report: OnProgress) -> Iterator[Row]:
    suffix = suffix_of(source)
    if source.is_dir() and not is_saved(source):
        return _folder_rows(data_files(source), report)
    if is_table(source):
        return table_rows(source, report)
    if suffix in (".csv", ".tsv"):
        return _csv_rows(source, report, "\t" if suffix == ".tsv" else ",")
    if suffix == ".json" or _begins_a_list(source):
        return _json_rows(source, report)
    return _jsonl_rows(source, report)


def _folder_rows(files: list[Path], report: OnProgress) -> Iterator[Row]:
    for number, file in enumerate(files):

        def part(done: int, total: int, before: int = number) -> None:
            report(int(1000 * (before + done / max(1, total))), 1000 * len(files))

        yield from read_rows(file, part)


# -- Tokenising by one process or several ----------------------------------------------------------


Item = TypeVar("Item")
Made = TypeVar("Made")
Made_by = TypeVar("Made_by", bound="Worker")


def _row_ids(encoder: Encoder, row: Row) -> tuple[str, Unit]:
    place, values = row
    return place, ([encode_row(values, encoder=encoder, place=place)], None)


def _preference_ids(encoder: Encoder, row: Row) -> tuple[str, Unit]:
    place, values = row
    return place, encode_preference(values, encoder=encoder, place=place)


def _block_ids(encoder: Encoder, block: tuple[str, str]) -> list[int]:
    place, text = block
    return encoder.ids(text, place=place)


class Worker(Protocol):
    """An object that converts rows to examples; each process has a copy of its own."""

    def counts(self) -> tuple[int, ...]:
        """Return the current values of the counters of this worker."""

    def count(self, more: Sequence[int]) -> None:
        """Add the values of another worker's counters to those of this worker."""


def processes_for(source: Path, *, least: int = PARALLEL_BYTES) -> int:
    """Return the number of processes that encode a data file.

    A file of less than `least` bytes is encoded by one process.
    """
    size = sum(file.stat().st_size for file in files_of(source))
    return min(PROCESSES, os.cpu_count() or 1) if size >= least else 1


def mapped(
    work: Callable[[Made_by, Item], Made], items: Iterable[Item], worker: Made_by, processes: int
) -> Iterator[Made]:
    """Yield `work(worker, item)` for every item, in order, computed by one process or several."""
    if processes == 1:
        yield from (work(worker, item) for item in items)
        return
    with ExitStack() as stack:
        # Processes are not forked, because threads of torch may hold locks. The number of pending
        # results is limited to bound memory use.
        context = multiprocessing.get_context(START)
        pool = stack.enter_context(context.Pool(processes, _start_worker, (worker,)))
        pending: list[Any] = []
        rest = iter(items)
        while some := tuple(islice(rest, ROWS_PER_TASK)):
            pending.append(pool.apply_async(_work_on, (work, some)))
            if len(pending) > 2 * processes:
                yield from _finished(pending.pop(0), worker)
        for result in pending:
            yield from _finished(result, worker)


_worker: Worker  # the worker of this process


def _start_worker(worker: Worker) -> None:
    global _worker
    _worker = worker


def _work_on(
    work: Callable[[Any, Any], Any], items: tuple[Any, ...]
) -> tuple[list[Any], list[int]]:
    before = _worker.counts()
    results = [work(_worker, item) for item in items]
    return results, [now - then for now, then in zip(_worker.counts(), before, strict=True)]


WORKER_DEADLINE_S = 600.0  # time in which a process must convert ROWS_PER_TASK rows


def _finished(result: Any, worker: Worker) -> list[Any]:
    try:
        results, counts = result.get(WORKER_DEADLINE_S)
    except multiprocessing.TimeoutError:
        raise DataError(
            f"a process that tokenises gave no answer for {WORKER_DEADLINE_S:g} s; it may have "
            "been killed for its memory: free some, or give the data in smaller files"
        ) from None
    worker.count(counts)
    return list(results)


# -- Text ------------------------------------------------------------------------------------------


def text_blocks(source: Path, report: OnProgress) -> Iterator[str]:
    """Yield the text in blocks that end between words, so that the tokens do not change."""
    decoder = io.IncrementalNewlineDecoder(
        codecs.getincrementaldecoder("utf-8-sig")(), translate=True
    )
    total, done, rest = source.stat().st_size, 0, ""
    progress = Progress(report)
    with opened(source) as (file, position):
        while True:
            raw = file.read(TEXT_BLOCK_BYTES)
            try:
                rest += decoder.decode(raw, final=not raw)
            except UnicodeDecodeError:
                raise DataError(
                    f"{source}: not UTF-8 text after byte {done}; save it as UTF-8"
                ) from None
            done += len(raw)
            progress(position(), total)
            if not raw:
                break
            end = max((m.start() for m in _BETWEEN_WORDS.finditer(rest)), default=len(rest))
            if rest[:end]:
                yield rest[:end]
            rest = rest[end:]
    if rest:
        yield rest
    progress.end()


_BETWEEN_WORDS = re.compile(r"(?<=[^\W\d_]) (?=[^\W\d_])")


def _examples_of(
    blocks: Iterator[list[int]], *, encoder: Encoder, seq: int, source: Path
) -> Iterator[list[int]]:
    """Cut a token stream into examples of `seq` tokens; the last may be shorter."""
    stream: list[int] | None = None
    for block in blocks:
        if stream is None:
            stream = encoder.bos(place=str(source))
        stream += block
        whole = len(stream) // seq * seq
        for begin in range(0, whole, seq):
            yield stream[begin : begin + seq]
        stream = stream[whole:]
    if stream:
        yield stream


# -- Rows ------------------------------------------------------------------------------------------


def _begins_a_list(source: Path) -> bool:
    """Return whether a file begins with a JSON list, as some tools write .jsonl files."""
    with opened(source) as (file, _):
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _jsonl_rows(source: Path, report: OnProgress) -> Iterator[Row]:
    total = source.stat().st_size
    with opened(source) as (file, position):
        for number, raw in enumerate(file, 1):
            place = f"{source}, line {number}"
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{place}: not UTF-8 text at byte {error.start}; save it as UTF-8"
                ) from None
            if text.strip():
                yield place, _json_object(text, place=place)
            if number % 64 == 0:
                report(position(), total)


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


def _json_rows(source: Path, report: OnProgress) -> Iterator[Row]:
    """Yield the items of a JSON list."""
    items = JsonItems(source)
    for number, item in enumerate(items, 1):
        place = f"{source}, item {number}"
        yield place, _as_object(item, place=place)
        report(items.position(), items.size)


class JsonItems:
    """The items of a JSON list in a file, which is read block by block."""

    def __init__(self, source: Path) -> None:
        self.source, self.size, self.done = source, source.stat().st_size, 0
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at = "", 0  # the current text, and the position of the next character
        self._line, self._column = 1, 0  # position of the start of `_text` in the file
        self._ended = False

    def __iter__(self) -> Iterator[Any]:
        with opened(self.source) as (self._file, self.position):
            if (first := self._next()) != "[":
                kind = {"{": "an object, not a list", '"': "text, not a list"}.get(first, "no list")
                raise DataError(
                    f"{self.source}: {kind}; put the objects into [ ... ], or rename it to .jsonl "
                    "if each line is an object of its own"
                )
            self._at += 1
            if self._next() != "]":
                while True:
                    yield self._item()
                    mark = self._next()
                    if mark == "]":
                        break
                    if mark != ",":
                        raise self._wrong("Expecting ',' delimiter", self._at)
                    self._at += 1
            self._at += 1
            if self._next():
                raise self._wrong("Extra data", self._at)

    def _next(self) -> str:
        """Peek at the next character that is not white space; return "" at the end."""
        while True:
            match = _NOT_SPACE.search(self._text, self._at)
            if match is not None:
                self._at = match.start()
                return match[0]
            if not self._read_more():
                return ""

    def _item(self) -> Any:
        self._next()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                # A number may continue in the next block.
                if end < len(self._text) or self._ended or not self._read_more():
                    break
            except json.JSONDecodeError as error:
                if not self._read_more():
                    raise self._wrong(error.msg, error.pos) from None
            except (RecursionError, ValueError) as error:
                reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
                raise DataError(f"{self.source}: not usable JSON: {reason}; correct it") from None
        self._at = end
        try:
            check_depth(value)
        except BadJson as error:
            raise DataError(f"{self.source}: not usable JSON: {error}; correct it") from None
        return value

    def _read_more(self) -> bool:
        """Read another block, at least as large as the unparsed text; return False at the end."""
        if self._ended:
            return False
        self._line, self._column = self._place(self._at)
        rest = self._text[self._at :]
        raw = self._file.read(max(JSON_BLOCK_BYTES, len(rest)))
        self._ended = not raw
        start = self.done - len(self._decoder.getstate()[0])
        try:
            self._text, self._at = rest + self._decoder.decode(raw, final=not raw), 0
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.source}: not UTF-8 text at byte {start + error.start}; save it as UTF-8"
            ) from None
        self.done += len(raw)
        return bool(raw)

    def _wrong(self, what: str, at: int) -> DataError:
        line, column = self._place(at)
        return DataError(
            f"{self.source}, line {line}: not JSON: {what} at column {column + 1}; rename it to "
            ".jsonl if each line is an object of its own"
        )

    def _place(self, at: int) -> tuple[int, int]:
        lines = self._text.count("\n", 0, at)
        column = at - self._text.rfind("\n", 0, at) - 1 if lines else self._column + at
        return self._line + lines, column


_DECODER = json.JSONDecoder()
_NOT_SPACE = re.compile(r"[^ \t\r\n]")


def _csv_rows(source: Path, report: OnProgress, delimiter: str) -> Iterator[Row]:
    """Yield the rows of a file whose first line names the columns."""
    total = source.stat().st_size
    csv.field_size_limit(FIELD_BYTES)
    with opened(source) as (raw, position), io.TextIOWrapper(raw, "utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            names = next(reader, [])
            for number, row in enumerate(reader, 2):
                if not row:
                    continue
                place = f"{source}, row {number}"
                if len(row) != len(names):
                    raise DataError(
                        f"{place}: {len(row)} values for {len(names)} columns; quote values that "
                        f"hold a {delimiter!r}"
                    )
                yield place, {name: value for name, value in zip(names, row, strict=True) if value}
                report(position(), total)
        except csv.Error as error:
            raise DataError(f"{source}, line {reader.line_num}: {error}; correct it") from None
        except UnicodeDecodeError as error:
            raise DataError(
                f"{source}: not UTF-8 text near line {reader.line_num + 1}: {error.reason}; "
                "save it as UTF-8"
            ) from None
