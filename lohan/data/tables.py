"""Tables of the datasets package: a folder that `save_to_disk` wrote, .parquet and .arrow files.

Rows are read one batch at a time and not copied anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lohan.errors import DataError

SUFFIXES = (".parquet", ".arrow")
ROWS = 256  # at a time
SPLIT = "train"

Progress = Callable[[int, int], None]


def is_table(source: Path) -> bool:
    return source.suffix.lower() in SUFFIXES or is_saved(source)


def is_saved(source: Path) -> bool:
    """A folder that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""
    return any((source / name).is_file() for name in ("state.json", "dataset_dict.json"))


def files_of(source: Path) -> list[Path]:
    """All that decides the rows."""
    return sorted(p for p in source.rglob("*") if p.is_file()) if source.is_dir() else [source]


def table_rows(source: Path, report: Progress) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it stands, row) of each example. Columns without a value are left out."""
    try:
        total, rows = _open(source)
        for number, row in enumerate(rows, 1):
            yield f"{source}, row {number}", {k: v for k, v in row.items() if v is not None}
            report(number, total)
    except DataError:
        raise
    except Exception as error:  # readers of tables raise what they like: ArrowException, TypeError
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{source}: cannot be read as a table: {first}; write it anew with save_to_disk or "
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
    found: Any
    if source.is_dir():
        found = datasets.load_from_disk(str(source))
        if isinstance(found, datasets.DatasetDict):
            found = found[_split(source, list(found))]
    else:
        found = datasets.Dataset.from_file(str(source))
    return len(found), iter(found)


def _split(source: Path, names: list[str]) -> str:
    if SPLIT not in names:
        raise DataError(
            f"{source}: has the splits {', '.join(names)} and no {SPLIT!r}; give the folder of one "
            f"of them, such as {source / names[0]}"
        )
    return SPLIT
