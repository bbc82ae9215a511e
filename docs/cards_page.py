"""Write examples/recipes/*.toml and the tables of docs/planning.md from the planner's forecasts.

    python docs/cards_page.py

Every figure is a forecast of `lohan plan` for a preset of a machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from lohan.cli.main import app
from lohan.util.units import format_bytes, format_seconds

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "examples" / "recipes"
PAGE = ROOT / "docs" / "planning.md"
STEPS = 1000
SEQ = 1024
BEGIN, END = "<!-- forecasts: begin -->", "<!-- forecasts: end -->"


@dataclass(frozen=True)
class Machine:
    """A preset, its description, its folders, and the memory that a run may use."""

    preset: str
    words: str
    drives: int
    host: str

    @property
    def folders(self) -> str:
        return json.dumps([f"/nvme{number}/lohan" for number in range(self.drives)])


MACHINES = {
    "12 GB": Machine(
        "rtx3060-12gb", "RTX 3060 (12 GB), 64 GB of memory, one 2 TB drive", 1, "54GiB"
    ),
    "16 GB": Machine("rtx4080", "RTX 4080 (16 GB), 128 GB of memory, two 2 TB drives", 2, "112GiB"),
    "24 GB": Machine("rtx4090", "RTX 4090 (24 GB), 128 GB of memory, two 2 TB drives", 2, "112GiB"),
    "32 GB": Machine("rtx5090", "RTX 5090 (32 GB), 128 GB of memory, two 2 TB drives", 2, "112GiB"),
}


@dataclass(frozen=True)
class Model:
    """A preset, its name for people, and its name on the Hugging Face hub."""

    preset: str
    title: str
    hub: str
    lr: str
    remark: str = ""  # lines of comments for the recipe
    packs: bool = True  # False if the model does not keep examples apart that share a row


HINT = "# `lohan profile` measures your machine, and `lohan train --dry-run` plans with its rates."
PACK = "pack = true             # several short examples share a row, and none sees the others"
NO_PACK = "pack = false            # this model would let examples that share a row see each other"
MISTRAL = "mistralai/Mistral"
GPT_OSS = """\
# All experts are trained. The MXFP4 weights of the hub are converted to bf16 while they are read.
# transformers computes this attention without a flash kernel unless one for attention sinks is
# installed; the forecast assumes one.
#
"""
MODELS = [
    Model("qwen3-0.6b", "Qwen3 0.6B", "Qwen/Qwen3-0.6B", "2e-5"),
    Model("qwen3-1.7b", "Qwen3 1.7B", "Qwen/Qwen3-1.7B", "2e-5"),
    Model("gemma-3-4b", "Gemma 3 4B, the text part", "google/gemma-3-4b-it", "1e-5"),
    Model("qwen3-4b", "Qwen3 4B", "Qwen/Qwen3-4B", "1e-5"),
    Model("mistral-7b", "Mistral 7B", f"{MISTRAL}-7B-v0.3", "1e-5"),
    Model("llama-3-8b", "Llama 3 8B", "meta-llama/Meta-Llama-3-8B", "1e-5"),
    Model("qwen3-8b", "Qwen3 8B", "Qwen/Qwen3-8B", "1e-5"),
    Model("gemma-3-12b", "Gemma 3 12B, the text part", "google/gemma-3-12b-it", "1e-5"),
    Model("qwen3-14b", "Qwen3 14B", "Qwen/Qwen3-14B", "1e-5"),
    Model("mistral-small-24b", "Mistral Small 24B", f"{MISTRAL}-Small-24B-Base-2501", "5e-6"),
    Model("gpt-oss-20b", "gpt-oss-20b", "openai/gpt-oss-20b", "5e-6", GPT_OSS, packs=False),
    Model("gemma-3-27b", "Gemma 3 27B, the text part", "google/gemma-3-27b-it", "5e-6"),
    Model("qwen3-30b-a3b", "Qwen3 30B-A3B", "Qwen/Qwen3-30B-A3B", "5e-6"),
    Model("qwen3-32b", "Qwen3 32B", "Qwen/Qwen3-32B", "5e-6"),
    Model("llama-3-70b", "Llama 3 70B", "meta-llama/Meta-Llama-3-70B", "5e-6"),
]

# The recipes: model, card, examples per step.
CHOSEN = [
    ("qwen3-0.6b", "12 GB", 32),
    ("qwen3-1.7b", "12 GB", 16),
    ("qwen3-4b", "12 GB", 16),
    ("gemma-3-4b", "16 GB", 16),
    ("qwen3-8b", "16 GB", 16),
    ("qwen3-8b", "24 GB", 32),
    ("llama-3-8b", "24 GB", 32),
    ("mistral-7b", "24 GB", 32),
    ("qwen3-14b", "24 GB", 32),
    ("gemma-3-12b", "24 GB", 32),
    ("gpt-oss-20b", "16 GB", 32),
    ("gpt-oss-20b", "24 GB", 32),
    ("gemma-3-27b", "32 GB", 32),
    ("mistral-small-24b", "32 GB", 32),
    ("qwen3-30b-a3b", "32 GB", 32),
    ("qwen3-32b", "32 GB", 32),
    ("llama-3-70b", "32 GB", 32),
]
FORECAST = re.compile(
    r"Forecast: ([\d,]+) tokens/s; .* steps take ([^.]+)\. .* main memory and (\S+ \S+) on the"
)


@cache
def forecast(model: str, card: str, batch: int) -> dict[str, Any] | None:
    """Return what `lohan plan --json` prints, or None if the plan does not fit."""
    machine = MACHINES[card]
    words = ["plan", "--model", model, "--machine", machine.preset, "--host", machine.host]
    words += ["--batch", str(batch), "--seq", str(SEQ), "--steps", str(STEPS), "--json"]
    printed = CliRunner().invoke(app, words)
    plan: dict[str, Any] = json.loads(printed.stdout) if printed.exit_code == 0 else {}
    return plan if plan.get("fits") else None


def recipe(model: Model, card: str, batch: int) -> str:
    """Return the text of a recipe."""
    machine, plan = MACHINES[card], forecast(model.preset, card, batch)
    assert plan is not None, f"{model.preset} at batch {batch} does not fit {machine.preset}"
    peak = {tier: format_bytes(count) for tier, count in plan["peak_bytes"].items()}
    written = format_bytes(plan["written_bytes_per_step"])
    file = name_of(model, card)
    step, total = format_seconds(plan["step_s"]), format_seconds(plan["total_s"])
    command = f"lohan plan --model {model.preset} --machine {machine.preset} --host {machine.host}"
    return f"""\
# {model.title}, all parameters: {machine.words}.
#
#     lohan train --config examples/recipes/{file}
#
# Forecast: {plan["tokens_per_s"]:,.0f} tokens/s; a step of {batch} x {SEQ} tokens takes {step},
# and {STEPS:,} steps take {total}. Memory: {peak["device"]} on the GPU,
# {peak["host"]} of main memory and {peak["ssd"]} on the drives. Each step writes {written}.
# This is the forecast of:
#
#     {command} \\
#         --batch {batch} --seq {SEQ} --steps {STEPS}
#
{model.remark}{HINT}
model = "{model.hub}"   # or a folder with config.json, safetensors and tokenizer
data = "data.jsonl"     # one JSON object per line: messages, prompt and completion, or text
out = "{Path(file).stem}-run"

[train]
steps = {STEPS}         # or epochs = 2
batch = {batch}              # examples per step
seq = {SEQ}
{PACK if model.packs else NO_PACK}
lr = {model.lr}
warmup = 0.03           # of all steps
clip = 1.0

[budget]
host = "{machine.host}"        # the rest is for Python, the system and other programs
ssd = {machine.folders}   # one folder per drive

[output]
export_dtype = "bf16"
"""


def name_of(model: Model, card: str) -> str:
    return f"{model.preset}-{MACHINES[card].preset}.toml"


def recipes() -> Iterator[tuple[Path, str]]:
    """Yield the path and the text of every recipe."""
    by_preset = {model.preset: model for model in MODELS}
    for preset, card, batch in CHOSEN:
        model = by_preset[preset]
        yield RECIPES / name_of(model, card), recipe(model, card, batch)


def table() -> str:
    """Return the table of forecasts, one row per recipe."""
    titles = {model.preset: model.title for model in MODELS}
    lines = [
        "| all parameters of | card | examples per step | tokens/s | 1,000 steps | on the drives "
        "| recipe |",
        "|---|---|---|---|---|---|---|",
    ]
    for (path, text), (preset, card, batch) in zip(recipes(), CHOSEN, strict=True):
        flat = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
        speed, total, drives = FORECAST.search(flat).groups()  # type: ignore[union-attr]
        link = f"[{path.stem}](../examples/recipes/{path.name})"
        cells = (titles[preset], card, str(batch), speed, total, drives, link)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    RECIPES.mkdir(exist_ok=True)
    for path, text in recipes():
        path.write_text(text, encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
