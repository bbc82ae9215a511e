"""Config: files, overrides, errors that name the key, and the round trip through TOML."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lohan.config import (
    DTYPES,
    PREFERENCE_LOSSES,
    BudgetConfig,
    Config,
    EvalConfig,
    OutputConfig,
    PreferenceConfig,
    SampleConfig,
    TrainConfig,
    field_of,
    fields_of,
    load_config,
)
from lohan.errors import ConfigError
from lohan.optim import SCHEDULES
from lohan.util.settings import Source, load_toml
from lohan.util.units import GiB

TOP = {"model": "m", "data": "d.jsonl", "out": "run"}


def config(base: Path = Path("/base"), **tables: Any) -> Config:
    return Config.from_mapping({**TOP, **tables}, base_dir=base)


def refusal(**tables: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config(**tables)
    return str(caught.value)


def test_defaults() -> None:
    got = config()
    assert got.train == TrainConfig()
    assert got.budget == BudgetConfig()
    assert got.output == OutputConfig()
    assert (got.seed, got.train.steps, got.train.micro_batch, got.train.dtype) == (0,) + (None,) * 3


def test_paths_of_a_file_start_at_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "sub" / "run.toml"
    file.parent.mkdir()
    file.write_text(
        'model = "../m"\ndata = "/abs/d.txt"\nout = "run"\n'
        '[budget]\nhost = "1.5GiB"\nssd = ["a", "/b"]\nsnapshot_dir = "snap"\n'
    )
    got = load_config(file)
    assert got.model == file.parent / "../m"
    assert got.data == (Source(Path("/abs/d.txt")),)
    assert got.budget.ssd == (file.parent / "a", Path("/b"))
    assert got.budget.snapshot_dir == file.parent / "snap"
    assert got.budget.host == 3 * GiB // 2


def test_home_folder_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    got = config(budget={"snapshot_dir": "~/snap"})
    assert got.budget.snapshot_dir == Path("/home/someone/snap")


def test_overrides_win_and_none_is_not_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = "m"\ndata = "d.txt"\n[train]\nlr = 1e-3\nbatch = 4\n')
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    given_ = {"out": "run", "train.lr": 1e-4, "train.batch": None, "budget.ssd": []}
    got = load_config(file, overrides={**given_, "budget.host": "2GiB"})
    assert got.model == tmp_path / "m"
    assert got.out == here / "run"
    assert (got.train.lr, got.train.batch, got.budget.ssd) == (1e-4, 4, ())
    assert got.budget.host == 2 * GiB


def test_overrides_alone_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    got = load_config(None, overrides={**TOP, "budget.ssd": ("x", "y")})
    assert got.model == tmp_path / "m"
    assert got.budget.ssd == (tmp_path / "x", tmp_path / "y")


def test_accepts_one_ssd_as_plain_text() -> None:
    assert config(budget={"ssd": "/nvme0"}).budget.ssd == (Path("/nvme0"),)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"train": {"bach": 4}}, r"\[train\] bach: unknown key; did you mean batch\?"),
        ({"train": {"micro-batch": 4}}, r"did you mean micro_batch\?"),
        ({"sead": 4}, r"^sead: unknown key; did you mean seed\?"),
        ({"trian": {}}, r"^trian: unknown key; did you mean train\?"),
        ({"lr": 1e-5}, r"^lr: unknown key; lr goes under \[train\]"),
        ({"train": {"host": "8GiB"}}, r"host goes under \[budget\]"),
        ({"train": {"seed": 1}}, r"seed goes at the top"),
        ({"budget": {"warm_up": 1}}, r"did you mean \[train\] warmup\?"),
        ({"output": {"zzz": 1}}, r"\[output\] zzz: .*the keys here are export, export_dtype"),
    ],
)
def test_unknown_key_names_the_nearest(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**tables)


def test_unknown_override_is_refused_too() -> None:
    for dotted in ("train.lrr", "trian.lr"):
        with pytest.raises(ConfigError, match="unknown key"):
            Config.from_mapping(TOP, base_dir=Path("/"), overrides={dotted: 1.0})


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("train", "steps", 0),
        ("train", "steps", True),
        ("train", "steps", 1.5),
        ("train", "steps", "10"),
        ("train", "epochs", 0),
        ("train", "epochs", float("inf")),
        ("train", "batch", 0),
        ("train", "micro_batch", -1),
        ("train", "seq", 1),
        ("train", "lr", 0.0),
        ("train", "lr", float("nan")),
        ("train", "lr", "1e-5"),
        ("train", "schedule", "cosin"),
        ("train", "warmup", -1),
        ("train", "warmup", 1.5),
        ("train", "warmup", True),
        ("train", "min_lr_ratio", 1.1),
        ("train", "weight_decay", -0.1),
        ("train", "beta1", 1.0),
        ("train", "beta2", -0.1),
        ("train", "eps", 0),
        ("train", "dtype", "fp8"),
        ("budget", "host", "lots"),
        ("budget", "host", True),
        ("budget", "host", 0),
        ("budget", "ssd", 3),
        ("budget", "ssd", [3]),
        ("budget", "ssd", ["/a", "/a"]),
        ("budget", "snapshot_every", -1),
        ("budget", "snapshot_dir", ""),
        ("output", "export", "yes"),
        ("output", "export", 1),
        ("output", "export_dtype", 16),
    ],
)
def test_bad_value_names_its_key(section: str, key: str, value: Any) -> None:
    assert refusal(**{section: {key: value}}).startswith(f"[{section}] {key}: ")


def test_rejects_removed_durability_with_the_nearest_setting() -> None:
    message = refusal(budget={"durability": "checkpoint"})
    assert message == "[budget] durability: unknown key; did you mean commit_every?"


def test_message_names_the_value_and_the_expected_form() -> None:
    assert refusal(train={"lr": "1e-5"}) == ('[train] lr: got text "1e-5", wants a number above 0')
    assert refusal(train={"steps": True}) == (
        "[train] steps: got true, wants a whole number of at least 1"
    )
    assert refusal(train=3) == "train: got 3, wants a table; write [train] above its keys"
    assert refusal(model=7) == "model: got 7, wants a path"


def test_micro_batch_above_batch() -> None:
    assert refusal(train={"batch": 2, "micro_batch": 4}) == (
        "[train] micro_batch: 4 is more than batch, 2; lower micro_batch or raise batch"
    )


def test_missing_paths_are_named_together() -> None:
    with pytest.raises(
        ConfigError, match=r"^data: not given; add --data FILE\[:WEIGHT\], --out DIR"
    ):
        Config.from_mapping({"model": "m"}, base_dir=Path("/"))


def test_file_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such config file"):
        load_toml(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_toml(tmp_path)
    file = tmp_path / "bad.toml"
    file.write_text("[train\nlr = 1")
    with pytest.raises(ConfigError, match=r"bad\.toml: not valid TOML: .*line 1"):
        load_toml(file)
    file.write_bytes(b"lr = \xff")
    with pytest.raises(ConfigError, match="not UTF-8 text at byte 5"):
        load_toml(file)


@pytest.mark.parametrize(
    ("warmup", "steps"), [(0, 0), (7, 7), (10.0, 10), (0.1, 10), (0.001, 1), (1, 1)]
)
def test_warmup_is_steps_or_a_share(warmup: float, steps: int) -> None:
    assert config(train={"warmup": warmup}).train.warmup_steps(100) == steps


names = st.text(
    st.characters(blacklist_categories=["Cs"], blacklist_characters="\0/~{}:"), min_size=1
).filter(lambda name: name not in (".", ".."))
small = st.floats(0, 1, exclude_max=True)
positive = st.floats(1e-300, 1e300)
trains = st.builds(
    TrainConfig,
    steps=st.none() | st.integers(1, 2**40),
    epochs=positive,
    batch=st.integers(64, 999),
    micro_batch=st.none() | st.integers(1, 64),
    seq=st.integers(2, 2**20),
    lr=positive,
    schedule=st.sampled_from(SCHEDULES),
    warmup=st.integers(0, 2**40) | st.floats(1e-6, 1, exclude_max=True),
    min_lr_ratio=small,
    weight_decay=small,
    beta1=small,
    beta2=small,
    eps=positive,
    dtype=st.none() | st.sampled_from(DTYPES),
)
budgets = st.builds(
    BudgetConfig,
    host=st.none() | st.integers(1024, 2**50) | st.integers(1, 999).map(lambda n: n * GiB),
    ssd=st.lists(names.map(lambda name: Path("/ssd") / name), unique=True).map(tuple),
    snapshot_every=st.integers(0, 9999),
    snapshot_dir=st.none() | names.map(lambda name: Path("/snap") / name),
)
outputs = st.builds(
    OutputConfig,
    export=st.booleans(),
    export_dtype=st.none() | st.sampled_from(DTYPES),
    log=st.lists(st.sampled_from(["tensorboard", "wandb"]), unique=True).map(tuple),
)
preferences = st.builds(
    PreferenceConfig,
    loss=st.sampled_from(PREFERENCE_LOSSES),
    beta=st.floats(1e-6, 10),
    margin=st.floats(0, 10),
    desirable=st.floats(1e-6, 10),
    undesirable=st.floats(1e-6, 10),
)
evals = st.builds(
    EvalConfig,
    data=names.map(lambda name: Path("/e") / name),
    every=st.none() | st.integers(1, 99),
    early_stop=st.integers(0, 9),
)
texts = st.text(st.characters(blacklist_categories=["Cs"]), min_size=1).filter(
    lambda text: text.strip() and not text.endswith((".txt", ".jsonl", ".json"))
)
samples = st.builds(
    SampleConfig,
    prompts=st.lists(texts, min_size=1).map(tuple),
    every=st.none() | st.integers(1, 99),
)


@given(
    st.builds(
        Config,
        model=names.map(lambda name: Path("/m") / name),
        data=st.lists(
            names.map(lambda name: Source(Path("/d") / name)), min_size=1, max_size=2
        ).map(tuple),
        out=names.map(lambda name: Path("/o") / name),
        seed=st.integers(0, 2**62),
        train=trains,
        preference=preferences,
        budget=budgets,
        output=outputs,
        eval=evals,
        sample=samples,
    )
)
def test_toml_round_trip(original: Config) -> None:
    text = original.to_toml()
    assert Config.from_mapping(tomllib.loads(text), base_dir=Path("/elsewhere")) == original


def test_written_file_reads_back(tmp_path: Path) -> None:
    original = config(tmp_path, budget={"host": "8GiB"}, train={"lr": 2e-5, "steps": 3})
    file = tmp_path / "run.toml"
    file.write_text(original.to_toml(), encoding="utf-8")
    assert 'host = "8GiB"' in file.read_text(encoding="utf-8")
    assert load_config(file) == original


def test_every_field_is_documented_once() -> None:
    infos = list(fields_of())
    assert len(infos) == len({info.dotted for info in infos})
    for info in infos:
        assert info.help.endswith(".")
        assert info.kind.metavar
        assert field_of(info.dotted) is info
    tables = (TrainConfig, PreferenceConfig, BudgetConfig, EvalConfig, SampleConfig, OutputConfig)
    assert len(infos) == 7 + sum(len(dataclasses.fields(table)) for table in tables)
    assert [info.dotted for info in infos if info.required] == ["model", "data", "out"]


def test_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().train.lr = 1.0  # type: ignore[misc]


def test_pure_modules_do_not_import_torch() -> None:
    code = (
        "import sys, lohan.config, lohan.optim, lohan.util.units; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_rank_has_fewer_rows_than_there_may_be_ranks():
    whole = config(train={"batch": 9, "micro_batch": 5}, budget={"gpus": 4})
    of_rank = whole.of_rank(4)
    assert (of_rank.train.batch, of_rank.train.micro_batch) == (3, 3)
    assert whole.of_rank(1).train == whole.train


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[train]\nlearning_rate = 1e-4\n", "lr"),
        ("learning_rate = 1e-4\n", r"\[train\] lr"),
        ("[train]\nmax-steps = 3\n", "steps"),
        ("[train]\noutput_dir = 'x'\n", "out"),
    ],
)
def test_names_of_other_trainers_get_a_suggestion(text, key, tmp_path):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigError, match=rf"unknown key; did you mean {key}\?"):
        load_config(tmp_path / "run.toml")
