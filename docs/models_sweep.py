"""Trains a tiny random model of every class in transformers' auto mappings, in memory and through
LoHan, and writes what came of it: docs/models.md and lohan/capture/tested.py.

python docs/models_sweep.py [causal image ...] [--only llama,bart] [--jobs 2] [--results FILE]

Each class has a process of its own and a time limit. Results go to a file as they come; the same
command again goes on from there, --again KIND/TYPE,... or --again error,refused does some of them
once more. The pages are written of all results that there are.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
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


def wanted_of(
    rows: dict[str, Row], kinds: list[str], only: list[str], again: set[str]
) -> list[tuple[str, str]]:
    """Classes without a result, and those whose key or status is to be had again."""
    from tests import every_model

    found = []
    for kind in kinds or every_model.MAPPINGS:
        for model_type in every_model.classes(kind):
            key = f"{kind}/{model_type}"
            due = key not in rows or {key, rows[key]["status"]} & again
            if due and (not only or model_type in only):
                found.append((kind, model_type))
    return found


# -- The pages -------------------------------------------------------------------------------------

# Compared with the same in memory by tests/test_architectures.py, with inputs of their own.
BY_TESTS = (
    "BertForSequenceClassification", "DiTTransformer2DModel", "FluxTransformer2DModel",
    "LlavaForConditionalGeneration", "Qwen2VLForConditionalGeneration", "SD3Transformer2DModel",
    "T5ForConditionalGeneration", "ViTForImageClassification",
)  # fmt: skip
TRAINED = {
    "exact": "exact", "nothing kept": "exact, nothing kept", "refused": "refused",
    "wrong": "wrong", "error": "error",
}  # fmt: skip
TITLES = {
    "causal": "Causal language models", "text to text": "Text to text",
    "masked": "Masked language models", "sequence": "Sequence classification",
    "token": "Token classification", "question": "Question answering",
    "image": "Image classification", "image-text": "Images and text to text",
}  # fmt: skip
HEAD = """\
# Models

Made by `python docs/models_sweep.py`. Of every class that transformers {version} has in an auto
mapping, a tiny random model is trained for three steps in memory with torch's AdamW. Then
through LoHan: from its folder with all activations kept that can be, and with nothing kept, in
micro-batches. Losses and all weights must be those of the run in memory; where two fp32 runs
differ, an fp64 run tells rounding from error. The first of the two is exported, and reloaded by
transformers with the same weights.

* exact: all of that.
* exact, nothing kept: the same, but what its blocks would keep cannot be planned; they are
  recomputed.
* refused: one message that says why, before anything is trained.

Models of other classes train too: then each block's first call is compared with a plain call of
the same module (`attach(check=...)`). Sizes are tiny, and what is random (dropout) is off.
Classes that could not be tried are listed below each table, with the reason: most want inputs
beyond tokens, or a package that is not installed.
"""


def write_pages(rows: dict[str, Row]) -> None:
    import transformers

    parts = [HEAD.format(version=transformers.__version__)]
    counts = [["", *TRAINED.values(), "share", "not tried"], ["---"] * (len(TRAINED) + 3)]
    tables: list[str] = []
    for kind, title in TITLES.items():
        own = sorted((r for r in rows.values() if r["kind"] == kind), key=lambda r: r["name"])
        tried = [row for row in own if row["status"] in TRAINED]
        if not tried:
            continue
        found = Counter(row["status"] for row in tried)
        good = found["exact"] + found["nothing kept"]
        numbers = [str(found[status]) for status in TRAINED]
        counts.append(
            [title, *numbers, f"{100 * good / len(tried):.0f} %", str(len(own) - len(tried))]
        )
        table = [["class", "result", "reason"], ["---"] * 3]
        table += [[f"`{r['name']}`", TRAINED[r["status"]], _plain(r["reason"])] for r in tried]
        tables += [f"## {title}", _table(table)]
        rest = [row for row in own if row["status"] not in TRAINED]
        if rest:
            tables.append(
                "Not tried: " + "; ".join(f"`{r['name']}` ({_plain(r['reason'])})" for r in rest)
            )
    text = "\n\n".join([*(part.strip() for part in parts), _table(counts), *tables]) + "\n"
    (ROOT / "docs/models.md").write_text(text)
    names = {r["name"] for r in rows.values() if r["status"] in ("exact", "nothing kept")}
    lines = "".join(f'    "{name}",\n' for name in sorted({*names, *BY_TESTS}))
    (ROOT / "lohan/capture/tested.py").write_text(
        '"""Classes that were found exact: docs/models_sweep.py wrote this, and docs/models.md."""'
        f"\n\nTESTED = frozenset({{\n{lines}}})  # fmt: skip\n"
    )


def _table(rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _plain(reason: str) -> str:
    """In one cell, without folders of the sweep."""
    short = re.sub(r"/\S*lohan-sweep-\S*", "the folder", reason).split("; ")[0]
    return short.replace("|", "/").replace("<", "(").replace(">", ")").replace("`", "'")[:160]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*")
    parser.add_argument("--only", default="")
    parser.add_argument("--again", default="")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--results", type=Path, default=Path("models-sweep.json"))
    args = parser.parse_args()
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    rows: dict[str, Row] = {}
    if args.results.exists():
        rows = json.loads(args.results.read_text())
    only = args.only.split(",") if args.only else []
    wanted = wanted_of(rows, args.kinds, only, set(args.again.split(",")))
    for row in sweep(wanted, args.jobs):
        key = f"{row['kind']}/{row['model_type']}"
        rows[key] = row
        said = f"{row['status']:14} {row['kept']:3} {row['seconds']:5.1f} s  {row['reason']}"
        print(f"{key:32} {said}", flush=True)
        args.results.write_text(json.dumps(rows, indent=1))
    write_pages(rows)


if __name__ == "__main__":
    main()
