"""Trains a tiny random model of every class in transformers' auto mappings, in memory and through
LoHan, and writes what came of it: docs/models.md and lohan/capture/tested.py.

python docs/models_sweep.py [causal image ...] [--only llama,bart] [--jobs 2] [--results FILE]

Each class has a process of its own and a time limit. Results go to a file as they come; the same
command again goes on from there, --again KIND/TYPE,... does some of them once more. The pages are
written when all classes have a result.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

LIMIT_S = 300  # for one class
Row = dict[str, Any]


def compute(kind: str, model_type: str, pipe: Connection) -> None:
    """In a process of its own."""
    import torch

    from tests import every_model

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="lohan-sweep-") as place:
        try:
            row = every_model.row_of(kind, model_type, Path(place))
        except BaseException as error:
            name = every_model.classes(kind)[model_type]
            row = every_model.Row(kind, model_type, name, "error", every_model.first_line(error))
            traceback.print_exc()
    pipe.send(asdict(row))
    pipe.close()


def sweep(wanted: list[tuple[str, str]], jobs: int) -> Iterator[Row]:
    """Rows as they come."""
    from tests import every_model

    fork = multiprocessing.get_context("fork")
    left, running = list(wanted), {}
    while left or running:
        while left and len(running) < jobs:
            kind, model_type = left.pop(0)
            ours, theirs = fork.Pipe(duplex=False)
            child = fork.Process(target=compute, args=(kind, model_type, theirs))
            child.start()
            theirs.close()
            running[ours] = child, kind, model_type, time.monotonic()
        ready = wait(list(running), timeout=1)
        for pipe, (child, kind, model_type, start) in list(running.items()):
            name = every_model.classes(kind)[model_type]
            row = asdict(every_model.Row(kind, model_type, name, "error"))
            if pipe in ready:
                try:
                    row = pipe.recv()
                except EOFError:
                    row["reason"] = "its process died"
            elif time.monotonic() - start > LIMIT_S:
                child.kill()
                row["reason"] = f"not done after {LIMIT_S} s"
            else:
                continue
            child.join()
            del running[pipe]
            row["seconds"] = round(time.monotonic() - start, 1)
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*")
    parser.add_argument("--only", default="")
    parser.add_argument("--again", default="")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--results", type=Path, default=Path("models-sweep.json"))
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    import transformers

    from tests import every_model

    transformers.utils.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    rows: dict[str, Row] = {}
    if args.results.exists():
        rows = json.loads(args.results.read_text())
    again = args.again.split(",")
    only = args.only.split(",") if args.only else None
    wanted = [
        (kind, model_type)
        for kind in args.kinds or every_model.MAPPINGS
        for model_type in every_model.classes(kind)
        if (only is None or model_type in only)
        and (
            f"{kind}/{model_type}" not in rows
            or {f"{kind}/{model_type}", rows[f"{kind}/{model_type}"]["status"]} & set(again)
        )
    ]
    for row in sweep(wanted, args.jobs):
        key = f"{row['kind']}/{row['model_type']}"
        rows[key] = row
        print(
            f"{key:32} {row['status']:14} {row['kept']:3} {row['seconds']:5.1f} s  {row['reason']}",
            flush=True,
        )
        args.results.write_text(json.dumps(rows, indent=1))
    print(Counter(row["status"] for row in rows.values()))


if __name__ == "__main__":
    main()
