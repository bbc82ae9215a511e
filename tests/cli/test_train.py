"""`lohan train`: settings from file, options and --set; the plan alone; samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lohan.config import fields_of
from lohan.train.run_folder import RunFolder, eval_rows, read_rows
from tests.support.model_folders import generated_in_memory, write_word_model
from tests.support.training_runs import assert_refused, modification_times

PROMPTS = ["w1 w2 w3", "w9"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with a tokenizer, and data."""
    place = tmp_path_factory.mktemp("inputs")
    write_word_model(place / "model", "llama")
    rows = [{"text": " ".join(f"w{(i * j) % 40}" for j in range(1, 9))} for i in range(9)]
    (place / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return place


def arguments(folder: Path, out: Path, *more: object) -> list[object]:
    given = ["train", "--model", folder / "model", "--data", folder / "data.jsonl", "--out", out]
    return [*given, "--host", "16MiB", "--steps", 4, "--batch", 2, "--seq", 16, *more]


def test_set_overrides_file_and_options(lohan, folder, tmp_path):
    (tmp_path / "run.toml").write_text("[train]\nlr = 1e-3\nbeta1 = 0.8\nbeta2 = 0.9\n")
    out = tmp_path / "run"
    ended = lohan(
        *arguments(folder, out, "--config", tmp_path / "run.toml", "--lr", "2e-3"),
        "--set",
        "train.beta2=0.95",
        "--set",
        "train.steps=1",
        "--set",
        "output.export=false",
    )
    assert ended.code == 0, ended.err
    train = RunFolder(out).config().train
    assert (train.lr, train.beta1, train.beta2, train.steps) == (2e-3, 0.8, 0.95, 1)
    assert not (out / "model").exists()


def test_run_keeps_its_optimizer_in_resume_and_eval(lohan, folder, tmp_path):
    """A run trains, resumes and evaluates with another optimizer, which it keeps."""
    out = tmp_path / "run"
    ended = lohan(*arguments(folder, out, "--optimizer", "lion", "--moments", "int8"))
    assert ended.code == 0, ended.err
    train = RunFolder(out).config().train
    assert (train.optimizer, train.moments, train.beta2) == ("lion", "int8", None)
    assert lohan("resume", out, "--steps", 6).code == 0
    assert lohan("eval", out, "--data", folder / "data.jsonl", "--host", "16MiB").code == 0
    file = RunFolder(out).config_file
    settings = file.read_text()
    for old, new, requested in (
        ('moments = "int8"', 'moments = "fp32"', "lion with fp32 moments in fp32"),
        ("[train]", '[train]\ndtype = "bf16"', "lion with int8 moments in bf16"),
    ):
        file.write_text(settings.replace(old, new))
        ended = lohan("resume", out, "--steps", 8)
        assert_refused(
            ended,
            f"was made for lion with int8 moments in fp32, {file} asks for {requested}",
            'put back optimizer = "lion", moments = "int8", ema = 0, dtype = "fp32" under',
        )
        assert "--optimizer" not in ended.err and "--moments" not in ended.err
    file.write_text(settings)
    assert lohan("resume", out, "--steps", 7).code == 0
    given = arguments(folder, tmp_path / "other", "--optimizer", "adam")
    assert_refused(
        lohan(*given), r'\[train\] optimizer: got text "adam", wants one of adamw, sgd, lion'
    )


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("train.lrr=1", r"\[train\] lrr: unknown key; did you mean lr\?"),
        ("lr=1", r"lr: unknown key; lr goes under \[train\]"),
        ("train.lr", r"--set train\.lr: no value; write it as KEY=VALUE"),
        ("train.lr=fast", r'\[train\] lr: got text "fast", wants a number above 0'),
        ("train=3", r"train: a section; name one of its keys, such as train\.steps"),
    ],
)
def test_wrong_assignments(lohan, folder, tmp_path, text, pattern):
    assert_refused(lohan(*arguments(folder, tmp_path / "run"), "--set", text), pattern)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        (["--early-stop", 2], r"\[eval\] early_stop: there is nothing to evaluate on; add --eval"),
        (["--export-best"], r"\[output\] export_best: there is nothing to evaluate on"),
        (["--eval-split", "0.99"], r"0\.99 of 9 examples leaves 0 to train on; lower --eval-split"),
        (["--eval-split", "1.5"], r"\[eval\] split: got 1\.5, wants a share from 0 to below 1"),
        (["--eval-data", "none.jsonl"], r"none\.jsonl: no such file; check --eval-data"),
        (["--eval-data", "x.jsonl", "--eval-split", "0.1"], r"both given; give one of them"),
        (["--sample-every", 2], r"\[sample\] every: there are no prompts; add --sample-prompts"),
        (["--sample-prompts", "none.txt"], r"a file that exists; there is no .*none\.txt"),
        (["--log", "paper"], r"\[output\] log: .*one of tensorboard, wandb"),
        (
            ["--sample-prompts", "w1 w2", "--sample-tokens", 10**7],
            r"--sample-prompts: an answer needs .*GiB on top of the weights, the plan leaves .*KiB",
        ),
    ],
)
def test_rejects_contradictory_settings(lohan, folder, tmp_path, options, pattern):
    """Refused before anything is written."""
    assert_refused(lohan(*arguments(folder, tmp_path / "run"), *options), pattern)
    assert list(tmp_path.iterdir()) == []


def test_dry_run_writes_nothing(lohan, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    before = modification_times(tmp_path)
    ended = lohan(
        *arguments(folder, tmp_path / "run"),
        "--dry-run",
        "--pack",
        "--eval-split",
        0.2,
        "--sample-prompts",
        "w1",
    )
    assert ended.code == 0, ended.err
    for text in ("7 examples packed", "evaluation on 2 examples", "4 steps", "host    total"):
        assert text in ended.out
    assert modification_times(tmp_path).keys() == before.keys()
    assert_refused(
        lohan(*arguments(folder, tmp_path / "run"), "--dry-run", "--host", "20KiB"), "budget"
    )
    (tmp_path / "run").write_text("")
    assert_refused(lohan(*arguments(folder, tmp_path / "run"), "--dry-run"), "is a file")


def test_counts_one_example_in_the_singular(lohan, folder, tmp_path):
    (tmp_path / "one.jsonl").write_text('{"text": "w1 w2 w3"}')
    given = ["--model", folder / "model", "--data", tmp_path / "one.jsonl", "--host", "16MiB"]
    ended = lohan("train", *given, "--out", tmp_path / "run", "--batch", 1, "--dry-run")
    assert ended.code == 0, ended.err
    for text in ("1 example, ", "\n1 step\n", "1 of 1 example\n"):
        assert text in ended.out


def test_dry_run_plans_as_the_run_does(lohan, folder, tmp_path):
    given = [*arguments(folder, tmp_path / "run"), "--pack", "--no-export"]
    planned = [x for x in lohan(*given, "--dry-run").out.splitlines() if x.startswith("host")]
    ran = [x for x in lohan(*given).out.splitlines() if x.startswith("host")]
    assert planned == ran and len(ran) > 4


def test_samples_are_what_the_model_would_say(lohan, folder, tmp_path):
    """At intervals and in the end; those of the last step equal the exported model's answers."""
    out = tmp_path / "run"
    (tmp_path / "more.txt").write_text(PROMPTS[1] + "\n")
    ended = lohan(
        *arguments(folder, out, "--lr", "1e-2"),
        "--sample-prompts",
        PROMPTS[0],
        "--sample-prompts",
        tmp_path / "more.txt",
        "--sample-every",
        3,
        "--sample-tokens",
        5,
    )
    assert ended.code == 0, ended.err
    rows = list(read_rows(out / "samples.jsonl"))
    assert [row["step"] for row in rows] == [3, 4]
    assert [pair["prompt"] for pair in rows[0]["samples"]] == PROMPTS
    texts = [pair["text"] for pair in rows[1]["samples"]]
    assert texts == generated_in_memory(out / "model", PROMPTS, max_new_tokens=5, do_sample=False)
    assert f"sample after step 4: {PROMPTS[0]}\n  {texts[0]}" in ended.out
    plain = tmp_path / "plain"
    assert lohan(*arguments(folder, plain, "--lr", "1e-2")).code == 0
    weights = "model/model.safetensors"
    assert (plain / weights).read_bytes() == (out / weights).read_bytes()


def test_every_option_is_a_setting(lohan, folder, tmp_path):
    """Every option can be given in a file."""
    (tmp_path / "run.toml").write_text(
        f'model = "{folder}/model"\ndata = "{folder}/data.jsonl"\nout = "run"\nseed = 3\n'
        "[train]\nsteps = 2\nbatch = 2\nseq = 16\npack = true\n"
        '[budget]\nhost = "16MiB"\nssd = ["drive"]\n'
        "[eval]\nsplit = 0.2\nevery = 1\nearly_stop = 5\n"
        '[sample]\nprompts = ["w1"]\nevery = 1\ntokens = 3\n'
        "[output]\nexport_best = true\n"
    )
    ended = lohan("train", "--config", tmp_path / "run.toml")
    assert ended.code == 0, ended.err
    assert [row["step"] for row in eval_rows(RunFolder(tmp_path / "run"))] == [1, 2]
    assert (tmp_path / "run" / "best" / "model.safetensors").exists()
    from typer.main import get_command

    from lohan.cli.main import app

    options = {
        name
        for item in get_command(app).commands["train"].params  # type: ignore[attr-defined]
        for name in item.opts
    }
    settings = {info.dotted for info in fields_of()}
    for name in options - {"--config", "--set", "--dry-run", "--json", "--help"}:
        key = name.removeprefix("--").replace("-", "_")
        section, _, rest = key.partition("_")
        assert any(d.rpartition(".")[2] == key or d == f"{section}.{rest}" for d in settings), name
