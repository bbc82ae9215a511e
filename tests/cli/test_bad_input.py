"""Common mistakes get one line and exit code 2, no stack trace, and leave nothing behind."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lohan.train import trainer
from tests.support.training_runs import (
    assert_refused,
    data_fixture,  # noqa: F401 - a fixture
    model_fixture,  # noqa: F401 - a fixture
    modification_times,
    place_fixture,  # noqa: F401 - a fixture
)


@dataclass(frozen=True)
class Desk:
    """A folder to prepare a mistake in, with correct inputs otherwise."""

    path: Path
    good_model: Path
    good_data: Path

    def model(self, edit: Callable[[Path], object] = lambda folder: None) -> list[object]:
        folder = self.path / "model"
        shutil.copytree(self.good_model, folder)
        edit(folder)
        return ["--model", folder]

    def config_json(self, **changed: Any) -> list[object]:
        def edit(folder: Path) -> None:
            raw = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**raw, **changed}))

        return self.model(edit)

    def tensors(self, edit: Callable[[dict[str, torch.Tensor]], object]) -> list[object]:
        def rewrite(folder: Path) -> None:
            actual = load_file(folder / "model.safetensors")
            edit(actual)
            save_file(actual, folder / "model.safetensors", metadata={"format": "pt"})

        return self.model(rewrite)

    def index(self, weight_map: object) -> list[object]:
        """Write a model folder whose weights are found through an index."""

        def edit(folder: Path) -> None:
            (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
            text = weight_map if isinstance(weight_map, str) else json.dumps(weight_map)
            (folder / "model.safetensors.index.json").write_text(text)

        return self.model(edit)

    def data(self, content: str | bytes, name: str = "data.jsonl") -> list[object]:
        file = self.path / name
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        return ["--data", file]

    def row(self, **row: Any) -> list[object]:
        return self.data(json.dumps(row))

    def toml(self, content: str | bytes) -> list[object]:
        file = self.path / "settings.toml"
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        return ["--config", file]

    def tokenizer(self, text: str) -> list[object]:
        return self.model(lambda folder: (folder / "tokenizer.json").write_text(text))


def weights(shard: str) -> dict[str, Any]:
    return {"weight_map": {"model.norm.weight": shard}}


def garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(os.urandom(4096))


def header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Write the same tensor bytes with another header."""

    def edit(folder: Path) -> None:
        file = folder / "model.safetensors"
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        loaded = json.loads(raw[8 : 8 + length])
        change(loaded)
        text = json.dumps(loaded).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])

    return edit


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/pwned'\ntR.")


NORM = "model.norm.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"

# What is wrong, and what the message must say: the thing, and the next move.
SETTINGS: dict[str, tuple[Callable[[Desk], list[object]], tuple[str, ...]]] = {
    "section misspelt": (
        lambda d: d.toml("[trian]\nlr = 1e-4\n"),
        (r"trian: unknown key; did you mean train\?",),
    ),
    "key misspelt": (
        lambda d: d.toml("[train]\nlearning_rate = 1e-4\n"),
        (r"\[train\] learning_rate: unknown",),
    ),
    "key in another section": (
        lambda d: d.toml("lr = 1e-4\n"),
        (r"lr: unknown key; lr goes under \[train\]",),
    ),
    "not TOML": (lambda d: d.toml("[train\nlr = 1"), (r"settings\.toml: not valid TOML", "line 1")),
    "config is a folder": (lambda d: ["--config", d.path], ("Is a directory; check --config",)),
    "config is not text": (lambda d: d.toml(b"\xff\xfe\x00"), ("not UTF-8 text at byte 0",)),
    "text for a number": (
        lambda d: d.toml('[train]\nlr = "fast"\n'),
        (r'\[train\] lr: got text "fast", wants a num',),
    ),
    "true for a number": (
        lambda d: d.toml("[train]\nclip = true\n"),
        (r"\[train\] clip: got true, wants a number",),
    ),
    "section as a value": (lambda d: d.toml("train = 3\n"), (r"train: got 3, wants a table",)),
    "no examples in a batch": (lambda d: ["--batch", 0], ("batch: got 0, wants a whole number",)),
    "no steps": (lambda d: ["--steps", 0], ("steps: got 0, wants a whole number of at least 1",)),
    "no epochs": (lambda d: ["--epochs", 0], ("epochs: got 0.0, wants a number above 0",)),
    "sequences of one token": (lambda d: ["--seq", 1], ("seq: got 1, wants .* at least 2",)),
    "one and a half steps of warm-up": (
        lambda d: ["--warmup", 1.5],
        ("warmup: got 1.5, wants a number of steps, or a share",),
    ),
    "unknown schedule": (
        lambda d: ["--schedule", "step"],
        ("schedule: .* one of constant, linear, cosine",),
    ),
    "unknown gradient mode": (
        lambda d: ["--update-mode", "fast"],
        ("update_mode: .* serial, naive, optimized",),
    ),
    "unknown activations": (
        lambda d: ["--activations", "some"],
        ("activations: .* or a plan file",),
    ),
    "no such plan": (
        lambda d: ["--activations", "none.json"],
        (r"none\.json is not a plan", "lohan plan --json"),
    ),
    "not a plan": (
        lambda d: ["--activations", d.data("[1]", "plan.json")[1]],
        (r"plan\.json is not a plan",),
    ),
    "decay rate of one": (
        lambda d: d.toml("[train]\nbeta2 = 1.0\n"),
        ("beta2: got 1.0, wants .* to below 1",),
    ),
    "assignment without a value": (lambda d: ["--set", "train.lr"], ("--set", "train.lr=")),
    "assignment of an unknown key": (
        lambda d: ["--set", "train.betas=3"],
        (r"\[train\] betas: unknown key",),
    ),
    "two evaluation sets": (
        lambda d: ["--eval-split", 0.1, "--eval-data", d.good_data],
        ("data and split.*one of them",),
    ),
    "evaluation of nothing": (
        lambda d: ["--eval-every", 5],
        ("nothing to evaluate on; add --eval",),
    ),
    "samples without prompts": (lambda d: ["--sample-every", 5], ("there are no prompts; add",)),
    "the same drive twice": (
        lambda d: ["--ssd", d.path / "a", "--ssd", d.path / "a"],
        ("ssd: .* each folder once",),
    ),
    "a rank in capitals": (
        lambda d: ["--ssd", d.path / "nvme{RANK}"],
        (r"ssd: got .*nvme\{RANK\}\", wants \{rank\} or \{host\} where .*, not \{RANK\}",),
    ),
    "a name that stands for nothing": (
        lambda d: d.toml('[budget]\nssd = ["/a/{host}", "/b/{gpu}"]\n'),
        (r"ssd: got text \"/b/\{gpu\}\", wants .*, not \{gpu\}",),
    ),
}

BUDGETS: dict[str, tuple[Callable[[Desk], list[object]], tuple[str, ...]]] = {
    "no memory": (lambda d: ["--host", "0"], ("host: '0' is not a positive byte size",)),
    "memory in words": (lambda d: ["--host", "plenty"], ("cannot read 'plenty'", "like 8GiB")),
    "negative memory": (lambda d: ["--host", "-1GiB"], ("cannot read '-1GiB' as a byte size",)),
    "too little memory": (
        lambda d: ["--host", "90KiB"],
        (r"--host allows 90\.00 KiB", "raise --host to"),
    ),
    "drive that cannot be written": (
        lambda d: ["--ssd", "/proc/state"],
        ("/proc/state.*: cannot create", "you may write to"),
    ),
    "drive that is a file": (
        lambda d: ["--ssd", d.data("x", "disk")[1]],
        (r"/disk", "director|folder"),
    ),
    "run folder that cannot be written": (
        lambda d: ["--out", "/proc/run"],
        ("/proc/run", "permission|No such file|write to"),
    ),
}

DATA: dict[str, tuple[Callable[[Desk], list[object]], tuple[str, ...]]] = {
    "empty file": (lambda d: d.data(""), ("the file is empty; check --data",)),
    "only blank lines": (lambda d: d.data("\n\n"), ("holds no examples; check --data",)),
    "unknown kind": (
        lambda d: d.data("a,b", "data.xlsx"),
        (r"data\.xlsx: unknown kind '\.xlsx'", "jsonl"),
    ),
    "a folder": (lambda d: ["--data", d.path], ("not a file; --data takes one",)),
    "not text": (lambda d: d.data(b'{"text": "\xff"}'), ("line 1: not UTF-8 text at byte 10",)),
    "numbers for objects": (
        lambda d: d.data("[1, 2]"),
        ("item 1: a number, not an object; write",),
    ),
    "lists for objects": (
        lambda d: d.data('{"input_ids": [1, 2, 3]}\n[1, 2]'),
        ("line 2: a list, not an object; write",),
    ),
    "half an object": (lambda d: d.data('{"text": "a"'), ("line 1: not JSON: .* column",)),
    "unknown keys": (
        lambda d: d.row(query="a", reply="b"),
        ("no known keys .found: query, reply",),
    ),
    "half of an example": (lambda d: d.row(prompt="a"), ("completion is missing .found: prompt",)),
    "text without an end": (
        lambda d: d.data('{"text": "a'),
        ("not JSON: Unterminated string starting at column",),
    ),
    "text that is a number": (lambda d: d.row(text=3), ("text must be text, got a number",)),
    "tokens that are text": (
        lambda d: d.row(input_ids=["a"]),
        ("input_ids must be a list of whole numbers",),
    ),
    "fewer labels than tokens": (
        lambda d: d.row(input_ids=[1, 2, 3], labels=[1]),
        ("3 input_ids but 1 label; give one",),
    ),
    "token outside the vocabulary": (
        lambda d: d.row(input_ids=[1, 64]),
        ("token 64 is outside the model's vocabulary of 64",),
    ),
    "nothing to learn": (
        lambda d: d.row(input_ids=[1, 2, 3], labels=[-100] * 3),
        ("no example is left to train on",),
    ),
    "an object for a list": (
        lambda d: d.data('{"text": "a"}', "data.json"),
        ("an object, not a list; put the objects",),
    ),
    "lines in .json": (
        lambda d: d.data('{"a": 1}\n{"b": 2}', "data.json"),
        (r"rename it to \.jsonl",),
    ),
    "messages without roles": (
        lambda d: d.row(messages=[{"content": "a"}]),
        ("message 1 must be an object with role",),
    ),
    "empty messages": (lambda d: d.row(messages=[]), ("messages must be a list .* an empty list",)),
    "text without a tokenizer": (
        lambda d: d.row(text="some words"),
        ("no tokenizer there", "give tokenized input_ids"),
    ),
    "broken tokenizer": (
        lambda d: [*d.tokenizer("{"), *d.row(text="some words")],
        ("the tokenizer cannot be loaded", "copy the original"),
    ),
}

MODELS: dict[str, tuple[Callable[[Desk], list[object]], tuple[str, ...]]] = {
    "a file for a folder": (lambda d: ["--model", d.good_data], ("no such folder; check",)),
    "a name of the hub": (lambda d: ["--model", "org/name"], ("hf download ORG/NAME",)),
    "config.json not JSON": (
        lambda d: d.model(lambda f: (f / "config.json").write_text("{")),
        (r"config\.json: not readable as JSON", "download it again"),
    ),
    "config.json a list": (
        lambda d: d.model(lambda f: (f / "config.json").write_text("[]")),
        (r"config\.json: holds list, not an object",),
    ),
    "unknown architecture": (
        lambda d: d.config_json(model_type="perceiver9", architectures=["P9"]),
        ("cannot use config.json .model_type 'perceiver9'", "upgrade transformers"),
    ),
    "architecture that is a number": (
        lambda d: d.config_json(architectures=[5]),
        (r"config\.json: architectures is \[5\], not a list of names", "download it again"),
    ),
    "an encoder": (
        lambda d: d.config_json(model_type="bert", architectures=["BertForPreTraining"]),
        ("BertForPreTraining is not a model that LoHan", "give the folder of one"),
    ),
    "quantized": (
        lambda d: d.config_json(quantization_config={"bits": 4}),
        ("says the weights are quantized", "unquantized checkpoint"),
    ),
    "code of its own": (
        lambda d: d.config_json(
            model_type="mine", auto_map={"AutoConfig": "mine.Config"}, architectures=["Mine"]
        ),
        ("comes with code of its own, which LoHan does not run",),
    ),
    "heads that do not divide": (
        lambda d: d.config_json(num_attention_heads=5),
        ("cannot use config.json", "attention heads|num_attention_heads"),
    ),
    "a pickle": (lambda d: d.model(pickled), ("pytorch_model.bin only, a pickle", "convert once")),
    "no weights": (
        lambda d: d.model(lambda f: (f / "model.safetensors").unlink()),
        (r"holds neither model\.safetensors nor", "give a folder with safetensors"),
    ),
    "garbage for weights": (lambda d: d.model(garbage), (r"model\.safetensors: header of",)),
    "cut weights": (
        lambda d: d.model(lambda f: os.truncate(f / "model.safetensors", 9000)),
        (r"ends at byte [\d,]+, the file at 9,000", "truncated or damaged"),
    ),
    "unknown dtype": (
        lambda d: d.model(header(lambda h: h[NORM].update(dtype="F4"))),
        ("has dtype 'F4', known",),
    ),
    "offsets that overlap": (
        lambda d: d.model(header(lambda h: h[QUERY].update(data_offsets=[0, 4096]))),
        ("overlaps|leaves a gap", "truncated or damaged"),
    ),
    "whole numbers for weights": (
        lambda d: d.tensors(lambda t: t.update({QUERY: torch.zeros(32, 32, dtype=torch.int8)})),
        ("is torch.int8, parameter .* needs a floating-point dtype",),
    ),
    "tensor missing": (
        lambda d: d.tensors(lambda t: t.pop(NORM)),
        ("no tensor for parameter model.norm.weight",),
    ),
    "tensor of another shape": (
        lambda d: d.tensors(lambda t: t.update({QUERY: torch.zeros(32, 31)})),
        (r"\[32, 31\]",),
    ),
    "shard missing": (
        lambda d: d.index(weights("model-00002-of-00002.safetensors")),
        ("1 of them missing, first model-00002-of-00002", "finish the download"),
    ),
    "shard outside the folder": (
        lambda d: d.index(weights("../other/model.safetensors")),
        (r"names the shard \.\./other/model\.safetensors, which is outside",),
    ),
    "shard by an absolute path": (
        lambda d: d.index(weights("/etc/passwd")),
        ("names the shard /etc/passwd, which is outs",),
    ),
    "index not JSON": (lambda d: d.index("{"), ("cannot be read as an index with a weight_map",)),
    "index of lists": (lambda d: d.index({"weight_map": []}), ("index", "download it again")),
    "index of another download": (
        lambda d: d.index({"weight_map": {"x": "model-00001-of-00001.safetensors"}}),
        ("places tensor x in model-00001-of-00001", "fetch both again"),
    ),
    "broken generation config": (
        lambda d: d.model(lambda f: (f / "generation_config.json").write_text("{")),
        (r"generation_config\.json", "correct or remove"),
    ),
}

MISTAKES = {**SETTINGS, **BUDGETS, **DATA, **MODELS}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_gets_one_message_and_leaves_nothing(mistake, lohan, model, data, place):
    wrong, patterns = MISTAKES[mistake]
    arguments = wrong(Desk(place, model, data))
    before = modification_times(place)
    given = {"--model": model, "--data": data, "--out": place / "run", "--host": "64MiB"}
    usual = [w for pair in given.items() if pair[0] not in arguments for w in pair]
    ended = lohan("train", *usual, "--batch", 2, "--seq", 16, "--steps", 1, *arguments)
    assert_refused(ended, *patterns)
    assert modification_times(place) == before


# -- other commands -------------------------------------------------------------------------------

COMMANDS: dict[str, tuple[list[object], tuple[str, ...]]] = {
    "resume of nothing": (["resume", "none"], ("none is not a run folder", "lohan train --out")),
    "export of nothing": (["export", "none", "--out", "x"], ("none is not a run folder",)),
    "report of nothing": (["report", "none"], ("none is not a run folder",)),
    "stores of nothing": (["store", "ls", "none"], ("no store here or below",)),
    "verify without a model": (
        ["verify"],
        (r"model: not given; add --model DIR\|ORG/NAME, --data FILE",),
    ),
    "verify without data": (["verify", "--model", "MODEL"], ("data: not given; add --data FILE",)),
    "plan without a model": (["plan"], ("model: not given; add --model DIR",)),
    "plan for an unknown model": (
        ["plan", "--model", "llama-9", "--machine", "rtx4090"],
        ("llama-9", "lohan presets|know"),
    ),
    "plan with no drives": (
        ["plan", "--model", "gpt-6b", "--machine", "rtx4090", "--ssds", "0"],
        ("--ssds 0: give a whole number from 1",),
    ),
    "plan for two largest things": (
        ["plan", "--model", "gpt-6b", "--machine", "rtx4090", "--max-model", "--max-batch"],
        ("--max-model", "--max-batch", "one at a time"),
    ),
    "plan for an unknown machine": (
        ["plan", "--model", "llama-3-8b", "--machine", "rtx9"],
        ("rtx9", "lohan presets|know"),
    ),
    "simulation of an unknown system": (
        ["simulate", "--model", "gpt-13b", "--machine", "rtx4090", "--policy", "x"],
        ("'x'|x:",),
    ),
    "profile of a drive that is not there": (
        ["profile", "--ssd", "none"],
        ("none: no such folder; create it or choose another",),
    ),
    "more layers than there are": (
        ["verify", "--model", "MODEL", "--data", "DATA", "--layers", 9, "--seq", 16],
        ("has 2 layers, 9 were requested",),
    ),
}


@pytest.mark.parametrize("mistake", COMMANDS)
def test_mistake_with_another_command(mistake, lohan, model, data, place, monkeypatch):
    monkeypatch.chdir(place)
    words, patterns = COMMANDS[mistake]
    given = {"MODEL": model, "DATA": data}
    assert_refused(lohan(*(given.get(str(word), word) for word in words)), *patterns)
    assert modification_times(place) == {}


@pytest.mark.parametrize("locked", ["--data", "--out", "--ssd"])
def test_names_files_without_permission(locked, lohan, model, data, place):
    given = {"--model": model, "--data": data, "--out": place / "run"}
    shut = place / "shut"
    shut.mkdir()
    if locked == "--data":
        shutil.copy(data, place / "data.jsonl")
        given["--data"] = place / "data.jsonl"
        given["--data"].chmod(0)
    else:
        given[locked] = shut / "x"
        shut.chmod(0o500)
    if os.access(given["--data"] if locked == "--data" else shut, os.R_OK | os.W_OK):
        pytest.skip("this user may read and write everything")
    ended = lohan("train", *(word for pair in given.items() for word in pair), "--host", "64MiB")
    assert_refused(ended, "Permission denied|cannot be read|may write")
    shut.chmod(0o700)
    assert list(shut.iterdir()) == []


def test_run_continues_after_full_disk_is_freed(lohan, model, data, place, monkeypatch):
    """A full disk during a run is one message, and the run continues when there is space again."""
    disk = place / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small file system")
    step = trainer.one_step

    def filling(*args):
        with suppress(OSError), open(disk / "filler", "ab", buffering=0) as file:
            while file.write(bytes(2**14)):
                pass
        return step(*args)

    words = ["train", "--model", model, "--data", data, "--out", disk / "run", "--host", "64MiB"]
    try:
        monkeypatch.setattr(trainer, "one_step", filling)
        ended = lohan(*words, "--batch", 2, "--seq", 16, "--steps", 3, "--no-export")
        assert_refused(ended, "No space left on device", "free some space")
        monkeypatch.setattr(trainer, "one_step", step)
        (disk / "filler").unlink()
        ended = lohan("resume", disk / "run")
        assert ended.code == 0, ended
        steps = [json.loads(line)["step"] for line in (disk / "run/metrics.jsonl").open()]
        assert steps == [1, 2, 3]
    finally:
        for left in range(50, -1, -1):  # Files are mapped as long as a dataset or a thread lives.
            gc.collect()
            if not subprocess.run(["umount", str(disk)], check=not left).returncode:
                break
            time.sleep(0.2)


def test_covers_enough_kinds_of_mistakes():
    assert len(MISTAKES) >= 70
