"""No command removes or changes a file that it did not create.

This holds however folders are nested, whether a command succeeds, is refused or is interrupted.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from lohan.checkpoint.replacing import check_own, replacing
from lohan.cli import main
from lohan.config import load_config
from lohan.data.cache import prepare
from lohan.data.dataset import open_dataset
from lohan.data.images import open_records
from lohan.engine import profile
from lohan.errors import LohanError, ModelError
from lohan.planner import presets
from lohan.store.files import StoreLock, lock_holder
from lohan.store.store import Store
from lohan.train import inputs as starting
from lohan.train import trainer
from lohan.train.run_folder import (
    MARK,
    RunFolder,
    _remove_data,
    append_row,
    new_mark,
    read_mark,
    read_rows,
    repair_logs,
    step_rows,
)
from lohan.train.trainer import UnloggedRows
from lohan.ui.traces import write_merged
from lohan.util.files import temporary_of, write_atomic
from tests.support.model_folders import save_tokenizer, write_random_checkpoint
from tests.support.stores import assert_files_kept, file_digests

CONFIG = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=16,
    bos_token_id=1,
    eos_token_id=2,
)
OUTS = ("new", "empty", "project", "link", "in-model")
MODELS = ("apart", "out/model", "out/best", "link", "is-out", "init", "init out/model")
DATA = ("apart", "out/data", "out/eval-data", "out/notes")
SIMULATED = ("--model", "gpt-1.55b", "--machine", "rtx4090", "--batch", 2, "--policy", "lohan")
SSDS = ("", "out", "out/drive", "out/model", "link")
FATES = ("ends", "refused", "stopped loading", "stopped tokenising", "stopped exporting")
AXES = (OUTS, MODELS, DATA, SSDS, FATES)
CASES = list(itertools.product(*AXES))
INIT = [("new", "init", "apart", "link", "ends"), ("project", "init", "out/notes", "", "ends")]


def covering(axes: int) -> list[tuple[str, ...]]:
    """Return cases in which all combinations of values of a few axes occur."""
    chosen, seen = [], set[Any]()
    for case in random.Random(4).sample(CASES, len(CASES)):
        values = set(itertools.combinations(enumerate(case), axes))
        if not values <= seen:
            chosen.append(case)
            seen |= values
    return chosen


# Seven cases in which every value of every axis occurs.
QUICK = [*INIT, *(tuple(axis[n % len(axis)] for axis in AXES) for n in range(len(MODELS)))]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_random_checkpoint(folder / "model", CONFIG)
    rows = [{"input_ids": [(i * j) % 32 for j in range(1, 8)]} for i in range(4)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Return a function that runs a command in this process; it returns exit code and output."""

    def run(*args: object) -> tuple[int, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["lohan", *map(str, args)])
        code = 0
        try:
            main.main()
        except SystemExit as end:
            code = int(end.code or 0)
        except KeyboardInterrupt:
            code = 130
        output = capsys.readouterr()
        return code, output.out + output.err

    return run


def words(model: Path, data: Path, out: Path, *more: object) -> list[object]:
    given = ["train", "--model", model, "--data", data, "--out", out, "--host", "8MiB"]
    return [*given, "--steps", 1, "--batch", 1, "--seq", 8, *more]


def lay_out(inputs: Path, place: Path, case: tuple[str, ...]) -> list[object]:
    """Create the folders of a case, with files of the user, and return the command."""
    kind, model_at, data_at, ssd_at, fate = case
    out = place / "base" / "run" if kind == "in-model" else place / "run"
    shutil.copytree(inputs / "model", place / "base")
    if kind in ("project", "link"):
        real = place / "elsewhere" if kind == "link" else out
        for name in ("lock", "notes.txt", "metrics.jsonl.tmp", "sub/x.bin"):
            (real / name).parent.mkdir(parents=True, exist_ok=True)
            (real / name).write_text(f"mine: {name}")
        if kind == "link":
            out.symlink_to(real)
    elif kind == "empty":
        out.mkdir(parents=True)
    model, data = place / "base", place / "train.jsonl"
    if model_at == "init out/model":
        model = out / "model"
        model.mkdir(parents=True)
        shutil.copy(inputs / "model" / "config.json", model)
    elif model_at.startswith("out/"):
        shutil.copytree(inputs / "model", model := out / model_at[4:])
    elif model_at == "link":
        (place / "linked").symlink_to(place / "base")
        model = place / "linked"
    elif model_at == "is-out" and kind != "in-model":
        shutil.copytree(inputs / "model", model := out, dirs_exist_ok=True)
    if data_at.startswith("out/"):
        data = out / data_at[4:] / "train.jsonl"
        data.parent.mkdir(parents=True, exist_ok=True)
        (data.parent / "meta.json").write_text("mine")
        (data.parent / "tokens.bin").write_text("mine")
    shutil.copy(inputs / "train.jsonl", data)
    more: list[object] = ["--eval-data", data, "--export-best"] if model_at == "out/best" else []
    if ssd_at == "link":
        (place / "nvme").mkdir()
        (place / "ssd").symlink_to(place / "nvme")
        more += ["--ssd", place / "ssd"]
    elif ssd_at:
        more += ["--ssd", out / ssd_at[4:]]
    if fate == "refused":
        more += ["--host", "10KiB"]
    command = words(model, data, out, *more)
    if model_at.startswith("init"):
        command[1] = "--init"
    return command


def stop_at(monkeypatch: pytest.MonkeyPatch, fate: str) -> None:
    def stopped(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    places = {
        "stopped loading": (starting, "attach"),
        "stopped tokenising": (trainer, "open_inputs"),
        "stopped exporting": (trainer, "export"),
    }
    if fate in places:
        monkeypatch.setattr(*places[fate], stopped)


def check_case(inputs, place, case, call, monkeypatch) -> None:
    command = lay_out(inputs, place, case)
    machine = presets.machine("rtx4090")
    drives = machine.drives[:1]
    measured = [replace(machine, drives=drives * count) for count in range(3)]
    monkeypatch.setattr(profile, "_measure", lambda *_: lambda ssd: measured[len(ssd)])
    monkeypatch.setenv("XDG_CACHE_HOME", str(place.with_name("cache")))
    before, out = file_digests(place), Path(str(command[6]))
    with monkeypatch.context() as patched:
        stop_at(patched, case[4])
        code, output = call(*command)
    assert_files_kept(before, place, (case, output))
    assert "Traceback" not in output, output
    if case[4] != "ends":
        assert code != 0, output
    assert code == 0 or case not in INIT, output
    if code == 2:
        new = [name for name in file_digests(place) if name not in before]
        assert not new, (case, new, output)
    # What a user puts into the folder of a run stays too.
    for name in ("model/README.md", "data/mine.txt", "mine.txt"):
        if (out / name).parent.is_dir():
            (out / name).write_text("mine")
    before = {
        n: c
        for n, c in file_digests(place).items()
        if n in before or Path(n).read_bytes() == b"mine"
    }
    others = random.Random(str(case)).sample(other_commands(out, command), 3)
    for again in (
        command,
        ["resume", out, "--steps", 2],
        ["report", out],
        ["report", out, "-o", command[4]],
        ["export", out, "--out", out],
        ["export", out, "--out", command[2]],
        ["export", out, "--out", command[2], "--overwrite"],
        ["eval", out, "--data", command[4], "--host", "8MiB"],
        ["store", "ls", place],
        ["store", "verify", out],
        [*command, "--dry-run"],
        ["plan", "--model", command[2], "--host", "8MiB", "--batch", 1, "--seq", 8],
        *others,
        ["store", "rm", out, "--yes"],
    ):
        _, output = call(*again)
        assert_files_kept(before, place, (case, again, output))
        assert "Traceback" not in output, (again, output)


def other_commands(out: Path, command: list[object]) -> list[list[object]]:
    """Return the commands that concern no run, with the files that they create."""
    model, data, taken = command[2], command[4], out / "notes.txt"
    sized = ("--host", "64MiB", "--batch", 1, "--seq", 8)
    return [
        [
            "init",
            "--model",
            model,
            "--data",
            data,
            "--machine",
            "rtx4090",
            "--file",
            out / "x.toml",
        ],
        ["init", "--model", model, "--data", data, "--machine", "rtx4090", "--file", taken],
        ["profile", "--ssd", out, "-o", data],
        ["profile", "--ssd", out, "-o", out / "machine.toml"],
        ["simulate", *SIMULATED, "--trace", data],
        ["simulate", *SIMULATED, "--trace", taken],
        ["compare", *SIMULATED, "--plot", out / "x.svg"],
        ["compare", *SIMULATED, "--plot", taken],
        ["verify", "--model", model, "--data", data, "--ssd", out, "--steps", 1, *sized],
        ["generate", out, "--prompt", data, "--host", "8MiB", "--ssd", out],
        ["generate", model, "--prompt", "a", "--host", "8MiB", "--ssd", out],
        ["doctor", "--ssd", out, "--ssd", model],
    ]


@pytest.mark.parametrize("case", QUICK, ids=", ".join)
def test_no_command_touches_a_file_that_it_did_not_create(
    case, inputs, tmp_path, call, monkeypatch
):
    check_case(inputs, tmp_path / "case", case, call, monkeypatch)


PARTS = [f"{half}{number}" for half in ("first", "second") for number in range(10)]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20), ids=PARTS)
def test_no_command_touches_a_file_in_any_layout(part, inputs, tmp_path, call, monkeypatch):
    for at, case in enumerate(covering(3)[part::20]):
        (tmp_path / str(at)).mkdir()
        check_case(inputs, tmp_path / str(at), case, call, monkeypatch)
        shutil.rmtree(tmp_path / str(at))


# -- one thing each -------------------------------------------------------------------------------


def test_runs_in_folders_with_unusual_names(inputs, tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a [v2]", "st*r?", "-dash", "ümläut", "x" * 200):
        ssd = Path(f"drive {name}"[:200])
        code, output = call(
            *words(inputs / "model", inputs / "train.jsonl", f"./{name}", "--ssd", ssd)
        )
        assert code == 0, output
        run = f"./{name}"
        for command in (
            ["resume", run, "--steps", 2],
            ["export", run, "--out", f"./{name[:90]} out"],
            ["eval", run, "--data", inputs / "train.jsonl", "--host", "8MiB"],
            ["report", run],
            ["store", "ls", run],
            ["store", "verify", run],
            ["store", "rm", run, "--yes"],
        ):
            code, output = call(*command)
            assert code == 0, (command, output)


def test_a_store_is_found_under_any_path_of_its_run(inputs, tmp_path, call):
    out = tmp_path / "a" / "run"
    command = words(inputs / "model", inputs / "train.jsonl", out, "--ssd", tmp_path / "drive")
    assert call(*command)[0] == 0
    (tmp_path / "link").symlink_to(out)
    for steps, path in ((2, tmp_path / "a" / ".." / "a" / "run"), (3, tmp_path / "link")):
        code, output = call("resume", path, "--steps", steps)
        assert code == 0, output
    shutil.copytree(out, tmp_path / "copy")
    code, output = call("resume", tmp_path / "copy", "--steps", 4)
    assert code == 2 and "is a copy of the run" in output
    shutil.rmtree(tmp_path / "copy")
    out.rename(tmp_path / "moved")
    code, output = call("resume", tmp_path / "moved", "--steps", 4)
    assert code == 0, output


def test_a_foreign_model_is_refused_before_the_first_step(inputs, tmp_path, call):
    out = tmp_path / "run"
    assert call(*words(inputs / "model", inputs / "train.jsonl", out, "--no-export"))[0] == 0
    shutil.copytree(inputs / "model", out / "model")
    text = (out / "run.toml").read_text()
    (out / "run.toml").write_text(text.replace("export = false", "export = true", 1))
    before = file_digests(out / "model")
    code, output = call("resume", out, "--steps", 2)
    assert code == 2 and "step 2/2" not in output and "is not an export" in output, output
    assert file_digests(out / "model") == before


@pytest.mark.parametrize("place", ["model", "model/nvme"])
def test_a_store_where_the_model_would_be_exported_is_refused(inputs, tmp_path, call, place):
    out = tmp_path / "run"
    command = words(inputs / "model", inputs / "train.jsonl", out, "--ssd", out / place)
    code, output = call(*command)
    assert code == 2 and f"--ssd {out / place} lies in {out / 'model'}" in output, output
    assert not out.exists()


@pytest.mark.parametrize("option", ["--init", "--tokenizer"])
def test_rejects_export_over_the_config_of_random_weights(option, inputs, tmp_path, call):
    """Neither at the end of a run nor by a later export."""
    out, start = tmp_path / "run", tmp_path / "start"
    shutil.copytree(inputs / "model", start)
    settings = json.loads((start / "config.json").read_text())
    (start / "config.json").write_text(json.dumps({**settings, "vocab_size": 264}))
    save_tokenizer(start)
    tokens = start if option == "--tokenizer" else save_tokenizer(tmp_path / "tokens")
    (config := tmp_path / "config.json").write_text((start / "config.json").read_text())
    given = start / "config.json" if option == "--init" else config
    command = words(given, inputs / "train.jsonl", out, "--tokenizer", tokens)
    command[1] = "--init"
    code, output = call(*command)
    assert code == 0, output
    before = file_digests(start)
    code, output = call("export", out, "--out", start, "--overwrite")
    assert code == 2 and f"--out {start} holds {option}" in output, output
    assert file_digests(start) == before
    inside = tmp_path / "other" / "model"
    shutil.copytree(start, inside)
    other = [str(word).replace(str(start), str(inside)) for word in command]
    other[6] = str(inside.parent)
    code, output = call(*other)
    assert code == 2 and ("lies in" in output or "holds 'model'" in output), output
    assert file_digests(inside) == {
        str(inside / Path(name).name): what for name, what in before.items()
    }


def test_an_unwritable_trace_does_not_cost_the_export(inputs, tmp_path, call):
    out = tmp_path / "run"
    command = words(inputs / "model", inputs / "train.jsonl", out, "--trace", "--no-export")
    assert call(*command)[0] == 0
    (out / "trace.json").unlink()
    (out / "trace.json").mkdir()
    (out / "trace.json" / "x").touch()
    text = (out / "run.toml").read_text()
    (out / "run.toml").write_text(text.replace("export = false", "export = true", 1))
    code, output = call("resume", out, "--steps", 2)
    assert code == 0 and "the trace cannot be written: Is a directory" in output, output
    assert (out / "model" / "model.safetensors").is_file()


def test_torn_log_lines_do_not_hide_later_rows(tmp_path):
    folder = RunFolder(tmp_path)
    log = folder.metrics_file
    for step in (1, 2):
        append_row(log, {"step": step, "loss": 1.0})
    with log.open("ab") as file:
        file.write(b'{"step": 3, "lo')
    append_row(log, {"step": 3, "loss": 1.0})
    log.write_bytes(log.read_bytes().replace(b'{"step": 2', b'\xff\x00"step": 2'))
    append_row(log, {"step": 4, "loss": 1.0})
    assert [row["step"] for row in read_rows(log)] == [1, 3, 4]
    repair_logs(folder, step=5, last=[{"step": 4, "loss": 2.0}, {"step": 5, "loss": 1.0}])
    assert [(row["step"], row["loss"]) for row in step_rows(folder)] == [
        (1, 1.0),
        (3, 1.0),
        (4, 1.0),
        (5, 1.0),
    ]


def test_a_manifest_carries_every_row_that_may_not_be_logged():
    pending = UnloggedRows()
    assert pending.add({"step": 1}) == []
    assert pending.add({"step": 2}) == [{"step": 1}]
    pending.logged(1)
    assert pending.add({"step": 3}) == [{"step": 2}]
    assert pending.add({"step": 3, "again": True}) == [{"step": 2}]


def test_links_are_not_followed(tmp_path):
    target = tmp_path / "precious"
    target.write_text("mine")
    (tmp_path / "lock").symlink_to(target)
    with pytest.raises(Exception, match="is a symbolic link"):
        StoreLock([tmp_path])
    (tmp_path / "lock").unlink()
    (tmp_path / "lock").write_text("my notes")
    with pytest.raises(Exception, match="is not a lock file"):
        StoreLock([tmp_path])
    assert (tmp_path / "lock").read_text() == "my notes"
    temporary_of(tmp_path / "a").symlink_to(target)
    write_atomic(tmp_path / "a", b"new")
    assert target.read_text() == "mine" and (tmp_path / "a").read_text() == "new"


def test_holder_of_a_run_is_the_process_with_the_lock(tmp_path):
    """A process that has the number in the lock file by chance does not count."""
    (tmp_path / "lock").write_text(f"{os.getppid()}\n")
    assert lock_holder(tmp_path) is None
    lock = StoreLock([tmp_path])
    assert lock_holder(tmp_path) == os.getpid()
    lock.release()


@pytest.mark.parametrize("replaced", [True, False])
def test_recovers_folder_that_a_killed_export_set_aside(replaced, tmp_path):
    """The folder that it had set aside is put back, or goes if it has been replaced."""
    target, rename = tmp_path / "best", Path.rename
    target.mkdir()
    (target / "config.json").write_text("first")

    def dies(*_: Any, **__: Any) -> Any:
        os._exit(7)

    def set_aside(path: Path, to: Path) -> Path:
        Path.rename = dies  # type: ignore[method-assign]
        return rename(path, to)

    if (pid := os.fork()) == 0:
        with replacing(target, check=lambda: None) as folder:
            (folder / "config.json").write_text("second")
            if replaced:
                shutil.rmtree = dies  # type: ignore[assignment]
            else:
                Path.rename = set_aside  # type: ignore[assignment,method-assign]
        os._exit(8)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert (tmp_path / ".best.lohan-replaced").is_dir() and target.exists() == replaced
    for other in (".best.export-99999999", ".best.replaced-99999999"):
        (tmp_path / other).mkdir()
        (tmp_path / other / "config.json").write_text("mine")
    with pytest.raises(ZeroDivisionError), replacing(target, check=lambda: None):
        1 / 0  # noqa: B018
    assert (target / "config.json").read_text() == ("second" if replaced else "first")
    assert {path.name for path in tmp_path.iterdir()} == {
        "best",
        ".best.export-99999999",
        ".best.replaced-99999999",
    }


@pytest.mark.parametrize("name", [".best.lohan-replaced", ".best.lohan-partial"])
def test_a_folder_that_only_has_the_name_of_an_exports_stays(name, tmp_path):
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.tex").write_text("mine")
    replaces = replacing(tmp_path / "best", check=lambda: None)
    with pytest.raises(ModelError, match="was left unchanged"), replaces:
        pass
    assert (tmp_path / name / "thesis.tex").read_text() == "mine"


def test_an_export_that_was_edited_is_not_replaced(tmp_path, monkeypatch):
    """Also if no size has changed."""
    monkeypatch.setattr("lohan.checkpoint.replacing.DIGESTED", 50)
    target = tmp_path / "best"
    with replacing(target, check=lambda: None, mark="run") as folder:
        (folder / "config.json").write_text("1" * 10)
        (folder / "model.safetensors").write_text("1" * 100)
    check_own(target, "run")
    for name in ("config.json", "model.safetensors"):
        before = (target / name).read_text()
        (target / name).write_text("2" * len(before))
        with pytest.raises(Exception, match=f"holds '{name}', which this run did not write"):
            check_own(target, "run")
        (target / name).write_text(before)


def test_failed_start_keeps_files_of_a_concurrent_start(inputs, tmp_path, monkeypatch):
    """Another process finishes its run between the first look and the claim."""
    out = tmp_path / "run"
    given = {
        "model": inputs / "model",
        "data": inputs / "train.jsonl",
        "out": out,
        "budget.host": "8MiB",
        "train.steps": 1,
        "train.batch": 1,
        "train.seq": 8,
    }
    from tests.support.training_runs import RecordingDisplay

    config, claimed, kept = load_config(None, overrides=given), trainer.folder_lock, {}

    def late(folder: RunFolder) -> Any:
        monkeypatch.setattr(trainer, "folder_lock", claimed)
        trainer.train(config, RecordingDisplay())
        kept.update(file_digests(out))
        return claimed(folder)

    monkeypatch.setattr(trainer, "folder_lock", late)
    with pytest.raises(Exception, match="holds a run already"):
        trainer.train(config, RecordingDisplay())
    assert kept and file_digests(out) == kept


def test_every_run_has_a_name_of_its_own(tmp_path):
    one, other = new_mark(tmp_path), new_mark(tmp_path)
    assert one.store != other.store
    assert len(new_mark(tmp_path / ("ü" * 120)).store.encode()) < 150


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("name", ["plan", "verify", "eval", "generate", "doctor"])
def test_commands_that_keep_nothing_leave_all_as_it_was(
    name, interrupted, inputs, tmp_path, call, monkeypatch
):
    """The current folder contains files of the user."""
    here, model = tmp_path / "here", tmp_path / "here" / "model"
    shutil.copytree(inputs / "model", model)
    for other in ("store", "lohan-store", "lohan-verify", "data", "lock", "notes"):
        (here / other).mkdir()
        (here / other / "mine.txt").write_text(other)
    (here / "linked").symlink_to(here / "notes")
    data = shutil.copy(inputs / "train.jsonl", here)
    sized = ("--host", "64MiB", "--batch", 1, "--seq", 8)
    command: list[object] = {
        "plan": ["plan", "--model", model, *sized],
        "verify": ["verify", "--model", model, "--data", data, "--steps", 1, *sized],
        "eval": ["eval", model, "--data", data, *sized],
        "generate": ["generate", model, "--prompt", "a", "--host", "64MiB"],
        "doctor": ["doctor", "--ssd", here / "linked"],
    }[name]
    monkeypatch.chdir(here)
    before = file_digests(here)

    def stopped(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if interrupted:
            patched.setattr(Store, "create" if name == "eval" else "commit", stopped)
        code, output = call(*command)
    assert "Traceback" not in output, output
    assert interrupted or name in ("generate", "doctor") or code == 0, output  # it has no tokenizer
    assert file_digests(here) == before, output


# -- files that options name ----------------------------------------------------------------------


def outputs(kind: str) -> tuple[list[object], str]:
    """Return a command that ends with a file name, and the suffix of that name."""
    if kind == "profile":
        return ["profile", "-o"], ".toml"
    if kind == "plot":
        return ["compare", *SIMULATED, "--plot"], ".svg"
    return ["simulate", *SIMULATED, "--trace"], ".json"


@pytest.mark.parametrize("kind", ["profile", "plot", "trace"])
def test_a_file_that_an_option_names_is_replaced_only_if_it_is_ours(
    kind, tmp_path, call, monkeypatch
):
    if kind == "plot":
        pytest.importorskip("matplotlib")
    machine = presets.machine("rtx4090")
    monkeypatch.setattr(profile, "_measure", lambda *_: lambda _: machine)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    command, suffix = outputs(kind)
    user_file, actual, link = (tmp_path / f"{name}{suffix}" for name in ("mine", "ours", "link"))
    user_file.write_text(machine.to_toml() if kind == "profile" else '{"traceEvents": []}')
    link.symlink_to(user_file)
    before = file_digests(tmp_path)
    for target in (user_file, link, tmp_path, tmp_path / "no" / user_file.name):
        code, output = call(*command, target)
        assert code == 2 and "choose another" in output, output
    assert_files_kept(before, tmp_path, kind)
    for _ in range(2):  # a new one, then its own
        code, output = call(*command, actual)
        assert code == 0, output
    link.unlink()
    link.symlink_to(actual)
    assert call(*command, link)[0] == 0 and link.is_symlink()
    assert_files_kept({str(user_file): before[str(user_file)]}, tmp_path, kind)


def test_a_trace_of_all_ranks_is_replaced_only_if_it_is_ours(tmp_path):
    file = tmp_path / "trace-all.json"
    for _ in range(2):
        write_merged(file, [[], []])
    file.write_text('{"traceEvents": []}')
    with pytest.raises(Exception, match="is not a trace that lohan has written"):
        write_merged(file, [[], []])
    assert file.read_text() == '{"traceEvents": []}'


def test_settings_are_not_written_over_anything(inputs, tmp_path, call):
    (tmp_path / "mine.toml").write_text("mine")
    (tmp_path / "nowhere.toml").symlink_to(tmp_path / "missing")
    before = file_digests(tmp_path)
    command = ["init", "--model", inputs / "model", "--data", inputs / "train.jsonl"]
    for name, message in (
        ("mine.toml", "already exists"),
        ("nowhere.toml", "already exists"),
        (".", "already exists"),
        ("no/x.toml", "no such folder"),
        ("x" * 300, "cannot be written: File name too long"),
    ):
        code, output = call(*command, "--machine", "rtx4090", "--file", tmp_path / name)
        assert code == 2 and message in output, output
    assert file_digests(tmp_path) == before


def test_prepared_data_does_not_follow_a_link(inputs, tmp_path):
    """The link is at a path where prepared data is written."""
    precious, place = tmp_path / "precious", tmp_path / "data"
    precious.write_text("mine")
    place.mkdir()
    for name in ("tokens.bin.part", "meta.json.part"):
        (place / name).symlink_to(precious)
    prepare(inputs / "train.jsonl", model_dir=inputs / "model", cache_dir=place, seq=8)
    assert precious.read_text() == "mine"
    assert not list(place.glob("*.part"))


def test_ignores_names_in_a_mark_that_lead_outside(tmp_path):
    (tmp_path / "precious.bin").write_text("mine")
    place = tmp_path / "run" / "data"
    place.mkdir(parents=True)
    (place / "meta.json").write_text('{"fields": {"../../precious": 1}}')
    _remove_data(place)
    assert (tmp_path / "precious.bin").read_text() == "mine" and not place.exists()


@pytest.mark.parametrize("text", ["[" * 5000, "[]", '{"format": []}', '{"id": 1}', "1" * 9000])
def test_damaged_marks_are_one_message(text, tmp_path):
    (tmp_path / MARK).write_text(text)
    with pytest.raises(LohanError, match="cannot be understood"):
        read_mark(tmp_path)
    target = tmp_path / "model"
    target.mkdir()
    (target / ".lohan-exported").write_text(text)
    with pytest.raises(LohanError, match="is not an export of this run"):
        check_own(target, "run")
    for name in ("tokens", "images"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "meta.json").write_text(text)
    assert open_dataset(tmp_path / "tokens", seed=0) is None
    assert open_records(tmp_path / "images", seed=0) is None
