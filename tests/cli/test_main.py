"""Wrong input gets one message that names the thing and the next move.

The exit code is 2, there is no stack trace, and nothing is left behind.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from lohan.checkpoint.replacing import MARK
from lohan.cli import main
from lohan.store.admin import describe
from tests.support.model_folders import write_random_checkpoint
from tests.support.stores import file_digests
from tests.support.training_runs import (
    TINY_CONFIG,
    assert_refused,
    data_fixture,  # noqa: F401 - a fixture
    model_fixture,  # noqa: F401 - a fixture
    modification_times,
    place_fixture,  # noqa: F401 - a fixture
    train_arguments,
)

# -- before a run ---------------------------------------------------------------------------------


def test_rejects_missing_model_folder(lohan, data, place):
    assert_refused(
        lohan(*train_arguments(place / "none", data, place / "run")),
        "none: no such folder",
        "fetch",
    )
    assert modification_times(place) == {}


def test_model_folder_without_config(lohan, data, place):
    (place / "model").mkdir()
    before = modification_times(place)
    ended = lohan(*train_arguments(place / "model", data, place / "run"))
    assert_refused(ended, r"holds no config\.json; give the folder")
    assert modification_times(place) == before


def test_model_folder_without_weights(lohan, model, data, place):
    (place / "model").mkdir()
    shutil.copy(model / "config.json", place / "model")
    before = modification_times(place)
    ended = lohan(*train_arguments(place / "model", data, place / "run"))
    assert_refused(ended, str(place / "model"), "safetensors")
    assert modification_times(place) == before


def test_rejects_missing_data_file(lohan, model, place):
    ended = lohan(*train_arguments(model, place / "none.jsonl", place / "run"))
    assert_refused(ended, r"none\.jsonl: no such file; check --data")
    assert modification_times(place) == {}


def test_names_the_line_that_is_not_json(lohan, model, data, place):
    lines = data.read_text().splitlines()
    lines[16] = '{"input_ids": [1, 2'
    (place / "bad.jsonl").write_text("\n".join(lines))
    before = modification_times(place)
    ended = lohan(*train_arguments(model, place / "bad.jsonl", place / "run"))
    assert_refused(
        ended, r"bad\.jsonl.*line 17\b", "not JSON: .* column 20", "each line must be one"
    )
    assert modification_times(place) == before


def test_text_without_a_tokenizer(lohan, model, place):
    (place / "data.txt").write_text("some words")
    before = modification_times(place)
    ended = lohan(*train_arguments(model, place / "data.txt", place / "run"))
    assert_refused(ended, "tokenizer", "input_ids")
    assert modification_times(place) == before


def test_unknown_key_in_the_config(lohan, model, data, place):
    (place / "run.toml").write_text("[train]\nbatchsize = 4\n")
    before = modification_times(place)
    ended = lohan(*train_arguments(model, data, place / "run", "--config", place / "run.toml"))
    assert_refused(ended, r"\[train\] batchsize: unknown key; did you mean batch\?")
    assert modification_times(place) == before


@pytest.mark.parametrize(
    ("option", "value", "pattern"),
    [
        ("--host", "lots", r"\[budget\] host: cannot read 'lots'.*8GiB"),
        ("--dtype", "fp8", r"\[train\] dtype: .*fp32, bf16, fp16"),
        ("--micro-batch", 3, "micro_batch: 3 is more than batch, 2; lower"),
        ("--lr", -1.0, r"\[train\] lr: got -1\.0, wants a number above 0"),
        ("--config", "absent.toml", r"absent\.toml: no such config file"),
    ],
)
def test_wrong_options(lohan, model, data, place, option, value, pattern):
    assert_refused(lohan(*train_arguments(model, data, place / "run", option, value)), pattern)
    assert modification_times(place) == {}


def edited(model: Path, place: Path, edit) -> Path:
    """Copy the model folder with other tensors."""
    shutil.copytree(model, place / "model")
    tensors = load_file(model / "model.safetensors")
    edit(tensors)
    save_file(tensors, place / "model" / "model.safetensors", metadata={"format": "pt"})
    return place / "model"


def test_tensor_missing_from_the_checkpoint(lohan, model, data, place):
    name = "model.layers.1.mlp.up_proj.weight"
    folder = edited(model, place, lambda tensors: tensors.pop(name))
    before = modification_times(place)
    ended = lohan(*train_arguments(folder, data, place / "run"))
    assert_refused(ended, f"{re.escape(name)} of LlamaForCausalLM, 1 of", "download both again")
    assert modification_times(place) == before


def test_tensor_of_another_shape(lohan, model, data, place):
    name = "model.layers.0.self_attn.q_proj.weight"
    folder = edited(model, place, lambda tensors: tensors.update({name: torch.zeros(32, 31)}))
    before = modification_times(place)
    ended = lohan(*train_arguments(folder, data, place / "run"))
    assert_refused(ended, re.escape(name), r"\[32, 31\]", r"\[32, 32\]")
    assert modification_times(place) == before


def test_truncated_checkpoint(lohan, model, data, place):
    shutil.copytree(model, place / "model")
    os.truncate(place / "model" / "model.safetensors", 5000)
    before = modification_times(place)
    ended = lohan(*train_arguments(place / "model", data, place / "run"))
    assert_refused(ended, r"model\.safetensors")
    assert modification_times(place) == before


def test_host_budget_too_small(lohan, model, data, place):
    ended = lohan(*train_arguments(model, data, place / "run", "--host", "100KiB"))
    assert_refused(
        ended, r"needs \d+\.\d+ [KM]iB, --host allows 100\.00 KiB", r"raise --host to \d+"
    )
    needed = re.search(r"raise --host to (\S+) (\S+?),? ", ended.err)
    assert modification_times(place) == {}
    enough = f"{needed[1]} {needed[2]}"  # what the message advises is enough, as it is
    ended = lohan(*train_arguments(model, data, place / "run", "--host", enough))
    assert ended.code == 0, ended.err


def test_disk_too_small(lohan, model, data, place):
    """A small file system of its own, so that the numbers are real."""
    disk = place / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        ended = lohan(*train_arguments(model, data, place / "run", "--ssd", disk / "state"))
        assert_refused(
            ended, rf"needs \d\.\d+ MiB in {disk}/state", r"\d+.* are free there", "add a drive"
        )
        assert modification_times(disk) == {}
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert modification_times(place).keys() == {str(disk)}


def test_rejects_out_that_is_a_file(lohan, model, data, place):
    (place / "run").write_text("mine")
    assert_refused(
        lohan(*train_arguments(model, data, place / "run")), "is a file; give a folder as --out"
    )
    assert (place / "run").read_text() == "mine"


def test_folders_of_others_are_left_alone(lohan, model, data, place):
    """A start that fails in a folder with other content takes back only what it made."""
    (place / "run").mkdir()
    (place / "run" / "notes.txt").write_text("mine")
    before = modification_times(place).keys()
    assert_refused(lohan(*train_arguments(model, data, place / "run", "--host", "100KiB")))
    assert modification_times(place).keys() == before


# -- a run that is there --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(model: Path, data: Path) -> Path:
    """Run two steps; tests break copies of this run."""
    out = model.parent / "finished"
    argv = ["lohan", *map(str, train_arguments(model, data, out))]
    before, sys.argv = sys.argv, argv
    try:
        main.main()
    except SystemExit as end:
        assert not end.code
    finally:
        sys.argv = before
    return out


@pytest.fixture
def run(finished: Path, place: Path) -> Path:
    shutil.copytree(finished, place / "run")
    return place / "run"


def committed_slot(run: Path) -> Path:
    generation = describe(run / "store")["generation"]
    return run / "store" / ("slot-a.bin", "slot-b.bin")[generation % 2]


def flip(file: Path, offset: int) -> None:
    with open(file, "r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 1]))


def test_out_holds_a_run(lohan, model, data, run):
    before = modification_times(run)
    ended = lohan(*train_arguments(model, data, run))
    assert_refused(ended, f"{run} holds a run already; continue it with `lohan resume {run}`")
    assert modification_times(run) == before


@pytest.mark.parametrize("command", ["resume", "export"])
def test_commands_reject_folder_that_is_not_a_run(lohan, place, command):
    more = ["--out", place / "model"] if command == "export" else []
    assert_refused(lohan(command, place, *more), rf"{place} is not a run folder \(no run\.toml")
    assert_refused(lohan(command, place / "none", *more), "none is not a run folder")
    assert modification_times(place) == {}


HOLD = "import sys; from lohan.store.store import Store; s = Store.open(sys.argv[1]);"
HOLD += "print('held', flush=True); sys.stdin.read(); s.close()"


def test_second_process_on_the_same_store(lohan, run, tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run / "store")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout.readline() == "held\n"
        message = f"{run / 'store'} is in use by process {holder.pid}; wait for it"
        assert_refused(lohan("resume", run, "--steps", 3), message)
        assert_refused(lohan("export", run, "--out", tmp_path / "model"), message)
        assert_refused(lohan("store", "verify", run), message)
        assert_refused(lohan("store", "rm", run, "--yes"), message)
        listed = lohan("store", "ls", run)
        assert listed.code == 0 and f"in use by process {holder.pid}" in listed.out
    finally:
        holder.stdin.close()
        holder.wait()
    assert not (tmp_path / "model").exists()
    ended = lohan("resume", run, "--steps", 3)
    assert ended.code == 0, ended.err


def test_truncated_state_file(lohan, run, tmp_path):
    slot = committed_slot(run)
    size = slot.stat().st_size
    os.truncate(slot, size - 4096)
    before = modification_times(run)
    for command in (["resume", run, "--steps", 3], ["export", run, "--out", tmp_path / "x"]):
        ended = lohan(*command)
        assert_refused(ended, rf"{slot}: has {size - 4096} bytes, {size} expected", "restore|start")
    assert not (tmp_path / "x").exists()
    assert modification_times(run).keys() == before.keys()


def test_flipped_byte(lohan, run, tmp_path):
    """Found by the first read, named by file and chunk, never trained on."""
    slot = committed_slot(run)
    flip(slot, 12345)
    log = (run / "metrics.jsonl").read_text()
    ended = lohan("resume", run, "--steps", 4)
    assert_refused(ended, str(slot), r"region '[ws]/[\w.]+' chunk \d", "CRC-32C", "offset")
    assert (run / "metrics.jsonl").read_text() == log
    assert_refused(lohan("export", run, "--out", tmp_path / "x"), str(slot), "CRC-32C")
    assert not (tmp_path / "x").exists()
    ended = lohan("store", "verify", run)
    assert ended.code == 2 and "Traceback" not in ended.err
    chunks = describe(run / "store")["chunks"]
    assert str(slot) in ended.out and f"{chunks - 1} of {chunks} chunks are correct" in ended.out


def test_flipped_byte_in_the_other_slot_does_no_harm(lohan, run):
    slot = committed_slot(run)
    other = next(path for path in slot.parent.glob("slot-*.bin") if path != slot)
    flip(other, 12345)
    ended = lohan("store", "verify", run)
    assert ended.code == 0
    ended = lohan("resume", run, "--steps", 3)
    assert ended.code == 0, ended.err


def test_damaged_manifest(lohan, run):
    manifest = run / "store" / "manifest.json"
    flip(manifest, 40)
    assert_refused(lohan("resume", run), str(manifest), "altered or damaged|cannot be understood")


def test_model_of_another_size_on_resume(lohan, run, model, place):
    wider = LlamaConfig(**{**TINY_CONFIG.to_dict(), "intermediate_size": 64})
    write_random_checkpoint(place / "other", wider)
    text = (run / "run.toml").read_text()
    (run / "run.toml").write_text(text.replace(str(model), str(place / "other")))
    assert_refused(lohan("resume", run, "--steps", 3), "another model", "resume with the model")


def test_export_to_an_existing_folder(lohan, run, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "thesis.tex").write_text("mine")
    assert_refused(
        lohan("export", run, "--out", target), f"{target}: exists and holds 1 file;", "--out"
    )
    assert_refused(
        lohan("export", run, "--out", target, "--overwrite"), "holds 1 file and no model"
    )
    assert [path.name for path in target.iterdir()] == ["thesis.tex"]
    assert lohan("export", run, "--out", tmp_path / "new").code == 0
    assert_refused(lohan("export", run, "--out", tmp_path / "new"), "exists and holds")
    assert lohan("export", run, "--out", tmp_path / "new", "--overwrite").code == 0
    assert_refused(
        lohan("export", run, "--out", tmp_path / "x", "--dtype", "int4"), "unknown 'int4'"
    )


def test_a_call_that_fails_on_any_file_is_one_message(lohan, run):
    (run / "journal.jsonl").unlink()
    (run / "journal.jsonl").mkdir()
    assert_refused(
        lohan("report", run), "journal.jsonl: Is a directory; check it and your permissions"
    )


def test_reports_data_that_is_prepared_again(lohan, run):
    shutil.rmtree(run / "data")
    ended = lohan("resume", run, "--steps", 3)
    assert ended.code == 0 and "no longer holds the run's data" in ended.out, ended
    assert "no longer holds" not in lohan("resume", run, "--steps", 4).out


@pytest.mark.parametrize("name", ["src/main.py", "config.json"])
def test_a_model_among_other_files_is_not_overwritten(name, lohan, run, tmp_path):
    """Refuse to overwrite an export to which files were added, or whose files were changed."""
    project = tmp_path / "project"
    assert lohan("export", run, "--out", project).code == 0
    (project / name).parent.mkdir(exist_ok=True)
    (project / name).write_text('{"mine": true}')
    before = file_digests(project)
    ended = lohan("export", run, "--out", project, "--overwrite")
    assert_refused(ended, f"holds {name!r}, which no export wrote", "give another --out")
    assert file_digests(project) == before


def test_rejects_overwriting_a_model_without_an_export_mark(lohan, run, tmp_path):
    project = tmp_path / "project"
    assert lohan("export", run, "--out", project).code == 0
    assert lohan("export", run, "--out", project, "--overwrite").code == 0
    (project / MARK).unlink()
    before = file_digests(project)
    ended = lohan("export", run, "--out", project, "--overwrite")
    assert_refused(ended, "which no export wrote", "give another --out")
    assert file_digests(project) == before


def test_store_ls_and_rm(lohan, run, model, data, place):
    ended = lohan("store", "ls", run.parent)
    assert ended.code == 0
    assert f"{run / 'store'}: step 2, clean" in ended.out and "1 directory" in ended.out
    assert lohan("store", "verify", run).code == 0
    ended = lohan("store", "rm", run, "--yes")
    assert ended.code == 0 and str(run / "store") in ended.out
    assert not (run / "store").exists()
    assert (run / "model" / "model.safetensors").exists() and (run / "metrics.jsonl").exists()
    assert_refused(lohan("store", "ls", run.parent), "no store here or below")
    message = (
        f"the run in {run} has no store at {run / 'store'}, so it can neither go on nor be export",
        "what is left: its log, the exported model; train again with "
        f"`lohan train --config {run / 'run.toml'} --out DIR`",
    )
    before = modification_times(run)
    for command in (
        ["resume", run],
        ["resume", run, "--gpus", 1],
        train_arguments(model, data, run),
        ["export", run, "--out", place / "x"],
    ):
        assert_refused(lohan(*command), *message)
    assert modification_times(run) == before
    ended = lohan("train", "--config", run / "run.toml", "--out", place / "again")
    assert ended.code == 0, ended.err


def test_asks_nothing_without_a_terminal(lohan, run, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    question = rf"remove the store {run / 'store'}\?"
    assert_refused(
        lohan("store", "rm", run), rf"{question} there is no terminal to answer on; add --yes"
    )
    assert (run / "store" / "manifest.json").exists()


def test_help_names_every_command(lohan):
    ended = lohan("--help")
    assert ended.code == 0
    for command in ("train", "resume", "export", "store"):
        assert command in ended.out
