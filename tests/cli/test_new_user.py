"""Common attempts of a new user work, or are refused with advice."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from lohan.cli.compare import _value
from lohan.cli.recipes import USUAL_BATCH, init
from lohan.config import load_config
from lohan.planner import presets
from lohan.ui.view import _ratio
from lohan.util.units import parse_bytes
from tests.support.forked_commands import tiny_arguments, write_tiny_inputs
from tests.support.training_runs import assert_refused

SHAPE = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "vocab_size": 32000,
}


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    """Write the config of a model that is planned quickly."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SHAPE))
    return file


def planned(shape: Path, *more: object, machine: object = "rtx4090") -> list[object]:
    return ["plan", "--model", shape, "--machine", machine, "--batch", 8, *more]


def test_resume_takes_settings_that_may_change(tmp_path: Path, lohan) -> None:
    inputs, out = write_tiny_inputs(tmp_path), tmp_path / "run"
    assert lohan("train", *tiny_arguments(inputs, out, "--ssd", tmp_path / "a")).code == 0
    run = ("resume", out, "--steps", 8)
    assert_refused(
        lohan(*run, "--batch", 4), r"train\.batch: cannot change .*examples each step has"
    )
    assert_refused(
        lohan(*run, "--set", "train.seq=8"), r"train\.seq: cannot change .*start a new run"
    )
    assert_refused(lohan(*run, "--set", "train.learn=8"), "learn")
    (tmp_path / "a").rename(tmp_path / "b")
    changes = ("--lr", 5e-4, "--host", "500KiB", "--ssd", tmp_path / "b", "--set", "train.clip=2")
    ended = lohan(*run, *changes)
    assert ended.code == 0, ended.err
    config = load_config(out / "run.toml")
    assert (config.train.lr, config.train.clip, config.budget.host) == (5e-4, 2.0, 500 * 1024)
    assert config.budget.ssd == (tmp_path / "b",)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 9))
    assert rows[-1]["lr"] < 5e-4


def test_plan_counts_steps_of_epochs(tmp_path: Path, lohan, shape: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "a"}\n' * 100)
    for more in (("--examples", 100), ("--data", data)):
        ended = lohan(*planned(shape, "--json", "--epochs", 2, *more))
        assert ended.code == 0, ended.err
        assert json.loads(ended.out)["steps"] == 25
    assert_refused(
        lohan(*planned(shape, "--epochs", 2)), "--epochs: give --examples N or --data FILE"
    )
    assert_refused(
        lohan(*planned(shape, "--steps", 2, "--examples", 9)), "--steps: .*leave one out"
    )


def test_plan_warns_of_missing_room_for_export(
    tmp_path: Path,
    lohan,
    shape: Path,
) -> None:
    whole = json.loads(lohan(*planned(shape, "--json")).out)
    assert "fits_export" not in whole
    profile = presets.machine("rtx4090")
    each = int(whole["peak_bytes"]["ssd"] / len(profile.drives)) + 2**26
    drives = tuple(replace(drive, bytes=each) for drive in profile.drives)
    machine = tmp_path / "machine.toml"
    machine.write_text(replace(profile, drives=drives).to_toml())
    reported = lohan(*planned(shape, machine=machine)).out
    assert re.search(
        r"^fits without the export: it takes .*, and 128.00 MiB are left", reported, re.M
    )
    small = lohan(*planned(shape, "--json", machine=machine)).out
    assert json.loads(small)["fits_export"] is False


def test_too_many_layers_are_refused(lohan, tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 100_000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ("plan", "--model", tmp_path / "config.json", "--machine", "rtx4090")
    assert_refused(
        lohan(*words), r"num_hidden_layers is 1e\+05, more than 1,000; correct config.json"
    )


def test_compare_takes_several_options_and_shows_prices(lohan, shape) -> None:
    words = ("compare", "--model", shape, "--machine", "rtx4090", "--policy", "lohan")
    lines = lohan(*words, "--batch", "8,16", "--ssds", "1,2").out.splitlines()
    assert lines[2].split() == ["lohan", "USD"]
    assert [line.split("  ")[0] for line in lines[3:7]] == [
        "batch 8, 1 SSD",
        "batch 8, 2 SSDs",
        "batch 16, 1 SSD",
        "batch 16, 2 SSDs",
    ]
    prices = [line.split()[-1] for line in lines[3:7]]
    assert prices[0] == prices[2] != prices[1] == prices[3]
    assert [_value("host", parse_bytes(size)) for size in ("16GiB", "64GB")] == ["16 GiB", "64 GB"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("plan", "--model", "gpt-13b", "--host", "64"), r"64 .* is 64 bytes; .*64GiB\?"),
        (("train", "--learning-rate", "1e-5"), r"--learning-rate: no such option; .* --lr here"),
        (("train", "--max-seq-len=8"), r"--max-seq-len: no such option; .* --seq here"),
        (("train", "--output-dir", "x"), r"--output-dir: no such option; .* --out here"),
        (("resume", "x", "--learning-rate", "1e-5"), r"--learning-rate: no such .* --lr here"),
        (("resume", "x", "--max-seq-len=8"), r"--max-seq-len: .* --set train\.seq=VALUE here"),
    ],
)
def test_usual_mistakes_have_a_suggestion(words, message, lohan) -> None:
    assert_refused(lohan(*words), message)


def test_mistyped_model_folder_has_a_suggestion(tmp_path: Path, lohan) -> None:
    inputs = write_tiny_inputs(tmp_path)
    words = [
        inputs / "modle" if word == inputs / "model" else word
        for word in tiny_arguments(inputs, tmp_path / "run")
    ]
    assert_refused(lohan("train", *words), rf"no such folder; did you mean {inputs / 'model'}\?")


def test_init_proposes_a_usual_batch_and_takes_a_run_folder(tmp_path: Path, shape: Path) -> None:
    """Even where one row a step has nearly the best throughput, as on a slow processor."""
    data, file = tmp_path / "rows.jsonl", tmp_path / "slow.toml"
    data.write_text('{"text": "a"}\n' * 9)
    slow = replace(presets.machine("rtx4090"), compute=((1.0, 1e9),), backward=(), head_flops=0.0)
    (tmp_path / "machine.toml").write_text(slow.to_toml())
    init(
        model=str(shape),
        data=data,
        file=file,
        out=tmp_path / "my-run",
        machine=str(tmp_path / "machine.toml"),
    )
    assert f"batch = {USUAL_BATCH}  # the smallest from 8 on" in file.read_text()
    assert f'out = "{tmp_path / "my-run"}"' in file.read_text()


def test_difference_of_lanes_that_do_nothing_is_not_shown() -> None:
    assert _ratio(1e-6, 4e-4, 1.0) == "-"
    assert _ratio(0.5, 0.6, 1.0) == "+20 %"
