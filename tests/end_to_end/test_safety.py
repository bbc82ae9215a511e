"""Safe by default: no code from a model folder, no pickles, no paths out of it, private files."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import pytest

from lohan.train.run_folder import owner_only
from tests.support.models import attached, small_model
from tests.support.training_runs import (
    assert_refused,
    data_fixture,  # noqa: F401 - a fixture
    model_fixture,  # noqa: F401 - a fixture
    place_fixture,  # noqa: F401 - a fixture
    train_arguments,
)

CODE = "import pathlib\npathlib.Path({mark!r}).write_text('run')\n"


@pytest.fixture
def copy(model: Path, place: Path) -> Path:
    shutil.copytree(model, place / "model")
    return place / "model"


def test_code_of_a_model_is_never_run(lohan, copy, data, place):
    """Neither of one that needs it nor of one that does not."""
    mark = place / "mark"
    (copy / "mine.py").write_text(CODE.format(mark=str(mark)))
    raw = json.loads((copy / "config.json").read_text())
    remote = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    (copy / "config.json").write_text(json.dumps({**raw, "auto_map": remote}))
    ended = lohan(*train_arguments(copy, data, place / "run", "--no-export"))
    assert ended.code == 0, ended  # a Llama: transformers has code for it
    unknown = {**raw, "auto_map": remote, "model_type": "mine", "architectures": ["Mine"]}
    (copy / "config.json").write_text(json.dumps(unknown))
    assert_refused(lohan(*train_arguments(copy, data, place / "again")), "code of its own")
    assert not mark.exists()


def test_code_of_a_tokenizer_is_never_run(lohan, copy, place):
    mark = place / "mark"
    (copy / "mine.py").write_text(CODE.format(mark=str(mark)))
    settings = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Tokens", None]}}
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    (place / "data.txt").write_text("some words")
    assert_refused(
        lohan(*train_arguments(copy, place / "data.txt", place / "run")), "tokenizer cannot be load"
    )
    assert not mark.exists()


def test_pickles_are_never_opened(lohan, copy, data, place):
    mark = place / "mark"
    (copy / "model.safetensors").unlink()
    command = f"touch {mark}"
    (copy / "pytorch_model.bin").write_bytes(f"cos\nsystem\n(S'{command}'\ntR.".encode())
    assert_refused(
        lohan(*train_arguments(copy, data, place / "run")), "a pickle that cannot be streamed"
    )
    assert not mark.exists()


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "{place}/secret.safetensors", "a/../../b"]
)
def test_shards_stay_inside_the_folder(name, lohan, copy, data, place):
    """Even where the file outside is a perfect shard."""
    shutil.move(copy / "model.safetensors", place / "secret.safetensors")
    name = name.format(place=place)
    index = {"weight_map": {"model.norm.weight": name}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_refused(lohan(*train_arguments(copy, data, place / "run")), "outside the model folder")


def others(path: Path) -> list[str]:
    """Return the paths that group or others may access."""
    collected = [path, *path.rglob("*")]
    return [str(p) for p in collected if stat.S_IMODE(p.lstat().st_mode) & 0o077]


def test_runs_are_private_but_for_the_model(lohan, model, data, place):
    """The user's umask decides who may read the exported model; all else is the owner's."""
    before = os.umask(0o022)
    try:
        drive = place / "drive"
        drive.mkdir()
        words = train_arguments(model, data, place / "run", "--ssd", drive, "--trace")
        assert lohan(*words).code == 0
        (store,) = drive.iterdir()
        shared = [place / "run", *(place / "run" / "model").rglob("*"), place / "run" / "model"]
        assert sorted(others(place / "run")) == sorted(map(str, shared))
        assert others(store) == []
        assert lohan("resume", place / "run", "--steps", 3).code == 0
        assert sorted(others(place / "run")) == sorted(map(str, shared)) and others(store) == []
        assert lohan("report", place / "run").code == 0
        assert sorted(others(place / "run")) == sorted(map(str, shared))
        assert os.umask(0o022) == 0o022  # the process's own setting is back
        assert lohan("export", place / "run", "--out", place / "tuned").code == 0
        assert others(place / "tuned")  # made to be shared: the user's umask decides
    finally:
        os.umask(before)


def test_keeps_permissions_of_existing_folders(lohan, model, data, place):
    (place / "run").mkdir(mode=0o755)
    (place / "run").chmod(0o755)
    assert lohan(*train_arguments(model, data, place / "run")).code == 0
    collected = set(others(place / "run"))
    assert {path for path in collected if "/model" not in path} == {str(place / "run")}


def test_stores_of_the_python_api_are_private(place):
    """Whatever the umask: the folder lets nobody else in."""
    before = os.umask(0)
    try:
        with attached(small_model("llama"), place / "drive") as session:
            store = session.store.dirs[0]
            assert stat.S_IMODE(store.stat().st_mode) == 0o700
            session.flush()
            small = [path for path in store.iterdir() if path.suffix != ".bin"]
            assert small and not any(stat.S_IMODE(p.stat().st_mode) & 0o077 for p in small)
    finally:
        os.umask(before)


def test_umask_comes_back_after_an_error():
    before = os.umask(0o022)
    try:
        with pytest.raises(ZeroDivisionError), owner_only():
            1 / 0  # noqa: B018
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
