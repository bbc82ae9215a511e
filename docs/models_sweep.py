"""Train a tiny random model of every class in transformers' auto mappings and record the results.

    python docs/models_sweep.py [causal image ...] [--only llama,bart] [--jobs 2]

Each model is trained in memory and through LoHan, in a process of its own and with a time limit.
Results are appended to docs/models_sweep.json; docs/models.md and lohan/capture/tested.txt are
generated from it. Running the command again continues where it stopped. `--again KIND/TYPE,...` or
`--again error,refused` repeats some of the classes. Classes without a result are counted as not
run. With `--results FILE` the results go to another file, and no page is written.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import re
import sys
import tempfile
import textwrap
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

LIMIT_S = 900  # for one class
MAX_REASON_CHARS = 130
SWEEP_DATE = "November 2026"  # change it with the results
NOT_DONE = "not done"  # no result: the machine was busy, or it takes too long
RESULTS = ROOT / "docs/models_sweep.json"
Row = dict[str, Any]
SHARED = ("transformers.loss.loss_utils", "transformers.quantizers.auto", "lohan.engine.attach")


def compute(kind: str, model_type: str, pipe: Connection) -> None:
    """Compare one model class and send the result through the pipe; runs in a child process."""
    import torch

    from tests.support import every_model

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
    """Rows as they come. What every class imports is imported once, here."""
    from tests.support import every_model

    for name in SHARED:
        importlib.import_module(name)

    fork = multiprocessing.get_context("fork")
    left, running = list(wanted), {}
    while left or running:
        while left and len(running) < jobs:
            kind, model_type = left.pop(0)
            actual, expected = fork.Pipe(duplex=False)
            child = fork.Process(target=compute, args=(kind, model_type, expected))
            child.start()
            expected.close()
            running[actual] = child, kind, model_type, time.monotonic()
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
                row |= {"status": NOT_DONE, "reason": f"not done after {LIMIT_S} s"}
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
    from tests.support import every_model

    collected = []
    for kind in kinds or every_model.MAPPINGS:
        for model_type in every_model.classes(kind):
            key = f"{kind}/{model_type}"
            due = key not in rows or {key, rows[key]["status"]} & again
            if due and (not only or model_type in only):
                collected.append((kind, model_type))
    return collected


# -- The pages -------------------------------------------------------------------------------------

# Compared with the same in memory by tests/end_to_end/test_architectures.py, with
# inputs of their own.
BY_TESTS = (
    "BertForSequenceClassification",
    "DiTTransformer2DModel",
    "FluxTransformer2DModel",
    "LlavaForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "SD3Transformer2DModel",
    "T5ForConditionalGeneration",
    "ViTForImageClassification",
)
TRAINED = {
    "exact": "exact",
    "nothing kept": "exact, nothing kept",
    "refused": "refused",
    "wrong": "wrong",
    "error": "error",
}
TITLES = {
    "causal": "Causal language models",
    "text to text": "Text to text",
    "masked": "Masked language models",
    "sequence": "Sequence classification",
    "token": "Token classification",
    "question": "Question answering",
    "image": "Image classification",
    "image-text": "Images and text to text",
}
HEAD = """\
# Models

transformers {version} has {every} classes in the auto mappings below. For {ran} of them, a tiny
random model could be trained in memory with torch's AdamW for three steps. Of these, {exact}
({share} %) gave the same result with LoHan. [tested.txt](../lohan/capture/tested.txt) lists the
classes of which every block was compared; this page lists the others. The results are from {date}.
`python docs/models_sweep.py` repeats the sweep and generates this page.

Each class is trained twice from a folder: with all activations kept, and with none kept and in
micro-batches. All losses and weights must equal those in memory. If two fp32 runs differ, an fp64
run separates rounding from errors. For {gradients} classes every gradient (Adam's first moment) is
compared as well: its distance from the fp64 run may be at most {noise} times the
distance of an in-memory fp32 run whose initial weights were changed by one ulp. The first run is
exported and reloaded by transformers. The models are tiny, and dropout is off.

A class that is not on the list can be trained unless it is refused. LoHan then compares the first
call of each block with a plain call of the same module (`attach(check=...)`), but nothing between
blocks. DiT, SD3 and Flux from diffusers are compared by `tests/end_to_end/test_architectures.py`.
"""

OTHERS = """\
## Classes with another result

| result | meaning |
| --- | --- |
| exact, nothing kept | All comparisons agree, but activations are always recomputed. |
| partly reached | All comparisons agree, but the sweep's batches do not call every block. The \
table above counts the class as exact, and `attach` treats it as untested. |
| refused | LoHan refuses the model with a reason before training starts. |
"""

UNTRAINED = """\
## No training in memory

The sweep could not create a tiny model or a batch for these classes, mostly because of special
inputs or a missing package. `docs/models_sweep.json` has the reasons.
"""


def write_pages(rows: dict[str, Row]) -> None:
    (ROOT / "docs/models.md").write_text(page_of(rows))
    names = sorted({*checked_classes(rows), *BY_TESTS})
    (ROOT / "lohan/capture/tested.txt").write_text("".join(f"{name}\n" for name in names))


def checked_classes(rows: dict[str, Row]) -> set[str]:
    """Classes of which every list of blocks was compared."""
    return {
        row["name"]
        for row in rows.values()
        if row["status"] in ("exact", "nothing kept") and not row["idle"]
    }


def page_of(rows: dict[str, Row]) -> str:
    import transformers

    from tests.support import every_model

    counts = [["", *TRAINED.values(), "exact of these", "no training in memory", "not run"]]
    counts.append(["---"] * len(counts[0]))
    others: dict[tuple[str, str], list[str]] = {}
    untrained, not_run = [], []
    ran, exact, every = 0, 0, 0
    for kind, title in TITLES.items():
        names = every_model.classes(kind)
        of_kind = sorted((r for r in rows.values() if r["kind"] == kind), key=lambda r: r["name"])
        trained = [row for row in of_kind if row["status"] in TRAINED]
        by_status = Counter(row["status"] for row in trained)
        good = by_status["exact"] + by_status["nothing kept"]
        share = f"{100 * good / len(trained):.0f} %" if trained else ""
        failed = [row["name"] for row in of_kind if row["status"] not in TRAINED]
        missing = sorted(names[t] for t in names if f"{kind}/{t}" not in rows)
        numbers = [str(by_status[status]) for status in TRAINED]
        counts.append([title, *numbers, share, str(len(failed)), str(len(missing))])
        ran, exact, every = ran + len(trained), exact + good, every + len(names)
        for row in trained:
            if row["status"] != "exact" or row["idle"]:
                others.setdefault(_result(row), []).append(row["name"])
        untrained += failed
        not_run += missing
    head = HEAD.format(
        version=transformers.__version__,
        date=SWEEP_DATE,
        every=every,
        ran=ran,
        exact=exact,
        share=f"{100 * exact / max(1, ran):.0f}",
        noise=every_model.NOISE,
        gradients=sum(row.get("gradients", False) for row in rows.values()),
    )
    table = [["result", "reason, or blocks that were not called", "classes"], ["---"] * 3]
    table += [[*result, _names(names)] for result, names in sorted(others.items())]
    parts = [head.strip(), _table(counts), OTHERS.strip(), _table(table)]
    parts += [UNTRAINED.strip(), _names(untrained)]
    if not_run:
        parts.append(f"## Not run\n\n{_names(not_run)}")
    return "\n\n".join(parts) + "\n"


def _result(row: Row) -> tuple[str, str]:
    """Return the result of a class that is not exact, or not whole, and its reason."""
    result = "partly reached" if row["idle"] else TRAINED[row["status"]]
    reason = (row["reason"] or row["idle"]).replace(row["name"], "the model")
    return result, _plain(reason)


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names))


def _table(rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _plain(reason: str) -> str:
    """Return a reason for one table cell, without folders of the sweep."""
    short = re.sub(r"/\S*lohan-sweep-\S*", "the folder", reason).split("; ")[0]
    short = short.replace("|", "/").replace("<", "(").replace(">", ")").replace("`", "'")
    return textwrap.shorten(short, MAX_REASON_CHARS, placeholder=" ...")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*")
    parser.add_argument("--only", default="")
    parser.add_argument("--again", default="")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    rows = read_results(args.results)
    only = args.only.split(",") if args.only else []
    wanted = wanted_of(rows, args.kinds, only, set(args.again.split(",")))
    for row in sweep(wanted, args.jobs):
        key, seconds = f"{row['kind']}/{row['model_type']}", row.pop("seconds")
        if row["status"] != NOT_DONE:
            rows[key] = row
        print(
            f"{key:32} {row['status']:14} {row['kept']:3} {seconds:5.1f} s  {row['reason']}"
            f"{' | idle: ' + row['idle'] if row['idle'] else ''}",
            flush=True,
        )
        write_results(args.results, rows)
    if args.results == RESULTS:
        write_pages(rows)


def read_results(path: Path) -> dict[str, Row]:
    """Read the results, leaving out classes that the installed transformers does not have."""
    from tests.support import every_model

    classes = {kind: every_model.classes(kind) for kind in every_model.MAPPINGS}
    listed = json.loads(path.read_text()) if path.exists() else []
    return {
        f"{row['kind']}/{row['model_type']}": row
        for row in listed
        if row["model_type"] in classes[row["kind"]]
    }


def write_results(path: Path, rows: dict[str, Row]) -> None:
    lines = ",\n".join(json.dumps(rows[key]) for key in sorted(rows))
    path.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
