"""Runs of `lohan train`: their inputs, settings, results and reports, and the same in memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from lohan.checkpoint.adapters import AdapterValues
from lohan.cli import main
from lohan.cli.tools import report as report_command
from lohan.config import load_config
from lohan.data import open_dataset
from lohan.optim import lr_at
from lohan.train import trainer
from lohan.train.inputs import open_inputs, task_of
from lohan.train.run_folder import RunFolder, step_rows
from tests.support.forked_commands import Ended
from tests.support.model_folders import save_tokenizer, write_random_checkpoint
from tests.support.models import decay_groups

# -- displays --------------------------------------------------------------------------------------


class RecordingDisplay:
    """A display that records its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def advance(self, task: str, done: int, total: int) -> None: ...
    def memory(self, planned: dict, budgets: dict) -> None: ...
    def first_step(self, number: int, total: int) -> None: ...
    def step(self, row: dict, total: int) -> None: ...
    def close(self) -> None: ...


# -- a tiny run by command line, and its refusal ---------------------------------------------------

TINY_CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
)


@pytest.fixture(name="model", scope="module")
def model_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs") / "model"
    write_random_checkpoint(folder, TINY_CONFIG)
    return folder


@pytest.fixture(name="data", scope="module")
def data_fixture(model: Path) -> Path:
    file = model.parent / "data.jsonl"
    rows = [{"input_ids": [(i * j) % 64 for j in range(1, 12)]} for i in range(20)]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def train_arguments(model: Path, data: Path, out: Path, *more: object) -> list[object]:
    given = ["train", "--model", model, "--data", data, "--out", out, "--host", "64MiB"]
    return [*given, "--steps", 2, "--batch", 2, "--seq", 16, *more]


def modification_times(folder: Path) -> dict[str, int]:
    """Return when each file below a folder was changed."""
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def assert_refused(ended: Ended, *patterns: str) -> None:
    """Check that a command was refused with one message, which has every pattern."""
    assert ended.code == 2, ended
    assert "Traceback" not in ended.err + ended.out
    assert ended.err.startswith("lohan: ") and ended.err.count("lohan: ") == 1
    assert ended.err.rstrip().count("\n") == 0, ended.err
    for pattern in patterns:
        assert re.search(pattern, ended.err), (pattern, ended.err)


@pytest.fixture(name="place")
def place_fixture(tmp_path: Path):
    """Create a folder in which a refused command must leave nothing new."""
    folder = tmp_path / "place"
    folder.mkdir()
    return folder


# -- a run on words, and the same in memory --------------------------------------------------------

MODEL_WORDS = [
    "<pad>",
    "<s>",
    "<end>",
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "dog",
    "ran",
    "red",
    "?",
]


@pytest.fixture(name="model", scope="module")
def word_model_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("inputs") / "model"
    config = LlamaConfig(
        vocab_size=len(MODEL_WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    write_random_checkpoint(folder, config, std=0.1)
    tokenizer = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(MODEL_WORDS)}, unk_token="?")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<end>", pad_token="<pad>"
    ).save_pretrained(folder)
    return folder


TEXT_ROWS = [
    {"text": " ".join(MODEL_WORDS[3 + (i * j) % 9] for j in range(1, 5 + i % 6))} for i in range(9)
]


def trained_in_memory(
    model: Path, run: Path, steps: int, batch: int, *, pack: bool = False
) -> torch.nn.Module:
    """Train on the same batches with PyTorch's AdamW in memory, with the settings of the run."""
    train = load_config(run / "run.toml").train
    dataset = open_dataset(run / "data", seed=0)
    dataset = dataset.pack() if pack else dataset
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    net.config.use_cache = False  # with a cache, examples in a row would see each other
    optimizer = torch.optim.AdamW(
        decay_groups(net, train.weight_decay), lr=1.0, betas=train.optimizer_with(1.0).betas
    )
    for step in range(steps):
        net(**dataset.batch(step, batch)).loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), train.clip)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(
                step,
                total_steps=steps,
                peak_lr=train.lr,
                schedule=train.schedule,
                warmup_steps=train.warmup_steps(steps),
            )
        optimizer.step()
        optimizer.zero_grad()
    return net.eval()


# -- a run with evaluations ------------------------------------------------------------------------

EVALUATED_STEPS = 6


@pytest.fixture(name="inputs", scope="module")
def evaluated_inputs_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_evaluated_inputs(tmp_path_factory.mktemp("inputs"))


def write_evaluated_inputs(folder: Path) -> Path:
    """Write a tiny Llama with dropout, training data, and other data for evaluation."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attention_dropout=0.2,
        bos_token_id=1,
        eos_token_id=2,
    )
    write_random_checkpoint(folder / "model", config)
    for name, shift in (("data", 0), ("held", 3)):
        rows = [
            {"input_ids": [(i * j + shift) % 64 for j in range(1, 6 + i % 9)]} for i in range(9)
        ]
        write_rows(folder / f"{name}.jsonl", rows)
    return folder


def evaluated_settings(inputs: Path, out: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": inputs / "model",
        "data": inputs / "data.jsonl",
        "out": out,
        "budget.host": "400KiB",
        "train.steps": EVALUATED_STEPS,
        "train.batch": 2,
        "train.micro_batch": 1,
        "train.seq": 16,
        "train.lr": 1e-3,
        "train.activations": "recompute",
        **{name.replace("__", "."): value for name, value in more.items()},
    }


def run_evaluated(inputs: Path, out: Path, **more: Any) -> RecordingDisplay:
    shown = RecordingDisplay()
    trainer.train(load_config(None, overrides=evaluated_settings(inputs, out, **more)), shown)
    return shown


def exported_bytes(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def worsening_settings(inputs: Path, out: Path, **more: Any) -> dict[str, Any]:
    """Return a run whose evaluation gets worse, since it learns other answers than expected."""
    return evaluated_settings(
        inputs,
        out,
        train__steps=12,
        train__lr=2e-2,
        train__schedule="constant",
        eval__data=inputs / "held.jsonl",
        eval__every=1,
        eval__early_stop=3,
        output__export_best=True,
        **more,
    )


# -- runs of a task, and the same in memory --------------------------------------------------------

TASK_STEPS, TASK_BATCH = 3, 3


def task_config(model: Path, data: Path, out: Path, **more: Any) -> Any:
    overrides = {
        "model": model,
        "data": data,
        "out": out,
        "budget.host": "32MiB",
        "train.steps": TASK_STEPS,
        "train.batch": TASK_BATCH,
        "train.lr": 1e-3,
        "train.seq": 64,
        # AdamW with the default eps amplifies the rounding of gradients that are nearly zero.
        "train.eps": 1e-3,
        "train.schedule": "constant",
        "train.weight_decay": 0.1,
        "train.clip": 0.5,
        **{name.replace("__", "."): value for name, value in more.items()},
    }
    return load_config(None, overrides=overrides)


def train_task(model: Path, data: Path, out: Path, **more: Any) -> RecordingDisplay:
    shown = RecordingDisplay()
    trainer.train(task_config(model, data, out, **more), shown)
    return shown


def train_task_in_memory(out: Path, net: nn.Module) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on the run's batches with PyTorch's AdamW in memory; return losses and weights."""
    config = RunFolder(out).config()
    inputs = open_inputs(RunFolder(out), config, RecordingDisplay(), resume=True)
    net, train_ = net.train(), config.train
    learns = nn.ParameterList([p for p in net.parameters() if p.requires_grad])
    optimizer = torch.optim.AdamW(decay_groups(learns, train_.weight_decay), eps=train_.eps)
    torch.manual_seed(config.seed)
    losses = []
    for step in range(TASK_STEPS):
        loss = net(**inputs.train_examples.batch(step, TASK_BATCH)).loss
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(learns, train_.clip)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(
                step, total_steps=TASK_STEPS, peak_lr=train_.lr, schedule="constant"
            )
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(net.state_dict())


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def compare_with_peft(out: Path, net: nn.Module, **lora: Any) -> dict[str, torch.Tensor]:
    """Compare the adapter of a run with one trained by PEFT in memory, and return it.

    `lora` are the settings that a user of PEFT would give.
    """
    peft = pytest.importorskip("peft", reason="adapters need the extra: pip install 'lohan[peft]'")
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **lora}
    adapted = peft.get_peft_model(net, peft.LoraConfig(**settings))
    config = RunFolder(out).config()
    torch.manual_seed(config.seed)
    values = AdapterValues(task_of(config).load(config, dtype="fp32"))
    for key in values.names():
        parameter = adapted.get_parameter(key)
        parameter.data = values.read_flat(key, 0, parameter.numel()).view(parameter.shape)
    losses, _ = train_task_in_memory(out, adapted)
    assert [row["loss"] for row in step_rows(RunFolder(out))] == pytest.approx(losses, rel=1e-5)
    exported = load_file(out / "model" / "adapter_model.safetensors")
    learnt: dict[str, torch.Tensor] = peft.get_peft_model_state_dict(adapted)
    assert exported.keys() == learnt.keys()
    for key, tensor in learnt.items():
        assert torch.allclose(exported[key], tensor, atol=2e-5), key
    return learnt


# -- preferences -----------------------------------------------------------------------------------

PREFERENCE_ROWS = 40
PREFERENCE_PAIRS = [
    {"prompt": f"ask {i}: ", "chosen": "yes " * (1 + i % 3), "rejected": "no" * (1 + i % 4)}
    for i in range(PREFERENCE_ROWS)
]
RATED_ANSWERS = [
    {"prompt": f"ask {i}: ", "completion": f"{i % 7} " * (1 + i % 3), "label": i % 3 != 0}
    for i in range(PREFERENCE_ROWS)
]


@pytest.fixture(name="model", scope="module")
def preference_model_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preference") / "model"
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    write_random_checkpoint(folder, config)
    return save_tokenizer(folder)


# -- run folders without a store -------------------------------------------------------------------

HOSTILE_TEXT = "</script><img src=x onerror=alert(1)>\u202e"

RUN_TOML = """model = "models/m"
data = "d.jsonl"
out = "."

[train]
steps = 3
"""
LOGGED_STEP = {
    "step": 1,
    "loss": 2.0,
    "lr": 1e-5,
    "tokens_per_s": 10.0,
    "step_s": 0.5,
    "rss_bytes": 10**9,
    "ssd_read_bytes": 10,
    "ssd_written_bytes": 10,
    "busy": {"compute": 0.5},
    "binding": "compute",
    "grad_norm": 1.0,
}


def write_run_folder(folder: Path, *steps: int, loss: float = 2.0) -> RunFolder:
    """Write a run folder with a log and without a store."""
    folder.mkdir(parents=True)
    run = RunFolder(folder)
    run.config_file.write_text(RUN_TOML)
    rows = [{**LOGGED_STEP, "step": step, "loss": loss / step} for step in steps]
    run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


# -- reports ---------------------------------------------------------------------------------------


@pytest.fixture(name="finished", scope="module")
def finished_fixture(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a training with evaluations, samples and a trace."""
    place = tmp_path_factory.mktemp("report")
    data = write_rows(place / "data.jsonl", TEXT_ROWS)
    words = [
        "lohan",
        "train",
        "--model",
        model,
        "--data",
        data,
        "--out",
        place / "run",
        "--host",
        "300KiB",
        "--steps",
        8,
        "--batch",
        2,
        "--seq",
        16,
        "--lr",
        "1e-3",
        "--trace",
        "--eval-split",
        0.2,
        "--eval-every",
        4,
        "--sample-prompts",
        "the cat",
        "--sample-tokens",
        3,
        "--no-export",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [str(word) for word in words])
        try:
            main.main()
        except SystemExit as end:
            assert not end.code
    return place / "run"


@pytest.fixture(name="page", scope="module")
def page_fixture(finished: Path) -> str:
    """Return the report of the finished run."""
    target = finished.parent / "report.html"
    report_command([finished], target)
    assert target.stat().st_mode & 0o077 == 0  # readable by the owner only
    return target.read_text(encoding="utf-8")


def view_texts(value: object) -> Iterator[str]:
    """Yield the texts of a view. The parts of a cell are joined, as on the page."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from view_texts(inner)
    elif isinstance(value, list) and any("code" in v for v in value if isinstance(v, dict)):
        yield "".join(v["code"] if isinstance(v, dict) else str(v) for v in value)
    elif isinstance(value, list):
        for inner in value:
            yield from view_texts(inner)
    elif isinstance(value, str):
        yield value


class PageElements(HTMLParser):
    """The elements of a page: tags with attributes, visible text, and the data of its script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._inside: list[str] = []
        self.raw: dict[str, str] = {}
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag in ("script", "style"):
            self._inside.append(dict(attributes).get("id") or tag)

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self._inside.pop()

    def handle_data(self, data):
        if self._inside:
            self.raw[self._inside[-1]] = self.raw.get(self._inside[-1], "") + data
        else:
            self.text += data

    @property
    def data(self) -> dict:
        """The view of the first run."""
        return json.loads(self.raw["data"])["runs"][0]

    @property
    def shown(self) -> str:
        """All texts of the first run, a cell or a line each."""
        return "\n".join(view_texts(self.data))
