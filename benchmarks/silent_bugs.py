"""Insert bugs of other frameworks, and compare what a run and `lohan verify` show of them.

    python benchmarks/silent_bugs.py

Each bug is inserted in LoHan by replacing one function. A small Llama then trains on the text of
examples/data, and `lohan verify` compares the first steps with plain PyTorch. The table also has
the losses of each training, because a falling loss is what hides such a bug.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from common import HERE, format_table, parser_of, work_folder
from typer.testing import CliRunner

from lohan.cli.main import app
from lohan.engine.gradients import GradientCollector, GradientSink
from lohan.optim import AdamW

TEXT = HERE.parent / "examples" / "data" / "captains_log.jsonl"
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SEQ, BATCH, SLICE, STEPS, VERIFIED = 64, 8, 2, 60, 3


# -- The bugs --------------------------------------------------------------------------------------


def overwritten_gradients() -> AbstractContextManager[Any]:
    """Keep the gradient of the last slice of a batch instead of the sum over all slices."""

    def add(self: GradientSink, group: str, tensor: int, grad: torch.Tensor) -> None:
        self._grads.setdefault(group, {})[tensor] = grad.float()

    return patch.object(GradientSink, "add", add)


def optimizer_counts_slices() -> AbstractContextManager[Any]:
    """Advance the optimizer once per slice of a batch instead of once per step."""
    numbers = AdamW.numbers

    def counted(self: AdamW, step: int) -> dict[str, Any]:
        return numbers(self, step * BATCH // SLICE)

    return patch.object(AdamW, "numbers", counted)


@contextmanager
def recycled_buffer() -> Iterator[None]:
    """Let backward read one matrix of each block from the buffer of the block before it."""
    leaves = GradientCollector.leaves
    last: dict[str, torch.Tensor] = {}

    def recycled(self: GradientCollector, site: Any, weights: Any, *, parts: int) -> Any:
        result = leaves(self, site, weights, parts=parts)
        for key in site.groups:
            for spec, leaf in zip(self._blocks.by_key[key].tensors, result[key], strict=True):
                if spec.name.endswith("down_proj.weight"):
                    values = leaf.detach().clone()
                    leaf.data = last.get("down", values)
                    last["down"] = values
        return result

    with patch.object(GradientCollector, "leaves", recycled):
        yield


@dataclass(frozen=True)
class Bug:
    what: str
    source: str
    plant: Callable[[], AbstractContextManager[Any]]


BUGS = [
    Bug("none", "", nullcontext),
    Bug("gradients overwritten, not added", "DeepSpeed #7718", overwritten_gradients),
    Bug("optimizer advances per slice", "DeepSpeed #8443", optimizer_counts_slices),
    Bug("backward reads a recycled buffer", "Soup #331", recycled_buffer),
]


# -- Runs ------------------------------------------------------------------------------------------


def prepare(folder: Path) -> None:
    """Write a model with random weights, and the characters of the text as examples."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**MODEL)).save_pretrained(folder / "model")
    text = "".join(json.loads(line)["output"] + "\n" for line in TEXT.read_text().splitlines())
    codes = [min(ord(letter), 127) for letter in text]
    rows = [codes[start : start + SEQ] for start in range(0, len(codes) - SEQ, SEQ)]
    (folder / "data.jsonl").write_text("\n".join(json.dumps({"input_ids": row}) for row in rows))


def lohan(*words: object) -> dict[str, Any]:
    """Run a command and return what it prints as JSON."""
    ended = CliRunner().invoke(app, [*map(str, words), "--json"])
    if ended.exit_code > 1 or not isinstance(ended.exception, SystemExit | None):
        raise RuntimeError(ended.output) from ended.exception
    return json.loads(ended.stdout)


def options(folder: Path, steps: int) -> list[object]:
    given = {"model": folder / "model", "data": folder / "data.jsonl", "host": "3MiB", "lr": 1e-3}
    given |= {"seq": SEQ, "batch": BATCH, "micro-batch": SLICE, "steps": steps, "ssd": folder}
    return [word for key, value in given.items() for word in (f"--{key}", value)]


def measure(bug: Bug, folder: Path, number: int) -> dict[str, Any]:
    """Train and verify with a bug, and return one row of the table."""
    with bug.plant():
        run = folder / f"run-{number}"
        lohan("train", *options(folder, STEPS), "--out", run, "--set", "output.export=false")
        verified = lohan("verify", *options(folder, VERIFIED))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first = verified["modes"][0]["steps"][0]
    wrong = [tensor["name"] for tensor in first["tensors"] if not tensor["pass"]]
    return {
        "bug": bug.what,
        "source": bug.source,
        "first_loss": rows[0]["loss"],
        "last_loss": sum(row["loss"] for row in rows[-5:]) / 5,
        "grad_norm": rows[0]["grad_norm"],
        "pass": verified["pass"],
        "wrong_tensors": len(wrong),
        "tensors": len(first["tensors"]),
    }


def main() -> None:
    parser = parser_of(__doc__)
    options = parser.parse_args()
    with work_folder(options.work, "silent-bugs") as folder:
        prepare(folder)
        rows = [measure(bug, folder, number) for number, bug in enumerate(BUGS)]
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    shown = [
        {
            "planted": row["bug"],
            "loss 1": f"{row['first_loss']:.4f}",
            f"loss {STEPS}": f"{row['last_loss']:.3f}",
            "norm 1": f"{row['grad_norm']:.3f}",
            "verify": "passes" if row["pass"] else "fails",
            "wrong after step 1": f"{row['wrong_tensors']} of {row['tensors']} tensors",
        }
        for row in rows
    ]
    print(format_table(shown))


if __name__ == "__main__":
    main()
