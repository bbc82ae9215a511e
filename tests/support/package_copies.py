"""Copies of the package with edits, to follow a checklist of CONTRIBUTING.md literally.

A `PackageCopy` holds the files of the repository that a checklist names, and refuses to change any
other file. Its code runs in a fork of a server process that has imported torch and transformers but
not the package. Run as a script, this file is that process.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
READY = "ready"
EDITABLE = "_editable_skbc_"  # modules with the finders of editable installs
OUT, ERR, RESULT = "out", "err", "result.json"


def files_of_checklist(title: str) -> set[str]:
    """Return the files and folders that a checklist of CONTRIBUTING.md names."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    match = re.search(rf"^### {re.escape(title)}\n(.*?)(?=^###? |\Z)", text, flags=re.S | re.M)
    assert match is not None, f"CONTRIBUTING.md has no checklist {title!r}"
    checklist = match[1]
    links = re.findall(r"\]\((docs/[\w.-]+)", checklist)
    quoted = re.findall(r"`([\w./-]+)`", checklist)
    return {name for name in (*links, *quoted) if (ROOT / name).exists()}


class PackageCopy:
    """A copy of the package in a folder, changed where a checklist says so and nowhere else."""

    def __init__(self, folder: Path, checklist: str) -> None:
        self.folder, self.checklist = folder, checklist
        self._named = files_of_checklist(checklist)
        self._edited: set[str] = set()
        self._runs = 0
        # Files of compiled code stay valid, because times of modification are kept.
        shutil.copytree(ROOT / "lohan", folder / "lohan")
        import lohan._core

        core = Path(lohan._core.__file__)
        if not (folder / "lohan" / core.name).exists():
            shutil.copy2(core, folder / "lohan")
        if any(name.startswith("csrc/") for name in self._named):
            shutil.copytree(ROOT / "csrc", folder / "csrc")
        for name in self._named:
            if (ROOT / name).is_file() and not (folder / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def after(self, file: str, anchor: str, text: str) -> None:
        """Insert text after the only match of a regular expression."""
        self._edit(file, anchor, lambda match: match[0] + text)

    def before(self, file: str, anchor: str, text: str) -> None:
        """Insert text before the only match of a regular expression."""
        self._edit(file, anchor, lambda match: text + match[0])

    def _edit(self, file: str, anchor: str, replacement: Any) -> None:
        self._check(file)
        path = self.folder / file
        changed, count = re.subn(anchor, replacement, path.read_text(), flags=re.M)
        assert count == 1, f"{file} has {count} matches of {anchor!r}, not one"
        path.write_text(changed)
        self._edited.add(file)

    def create(self, file: str, text: str) -> None:
        """Create a module in a folder that the checklist names."""
        self._check(f"{Path(file).parent}/")
        (self.folder / file).write_text(text)

    def _check(self, name: str) -> None:
        assert name in self._named, (
            f"{name} has to change, and the checklist {self.checklist!r} does not name it"
        )

    def check_complete(self, *, kept: tuple[str, ...] = ()) -> None:
        """Fail if the checklist names a file of the package that was neither edited nor `kept`."""
        files = {name for name in self._named if (ROOT / name).is_file()}
        unused = {name for name in files if name.startswith(("lohan/", "csrc/"))}
        assert unused - self._edited - set(kept) == set()


class CopyServer:
    """A process that runs functions in forks, each of which imports one copy of the package."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == READY

    def call(self, copy: PackageCopy, function: str, /, **arguments: Any) -> Any:
        """Return the result of `module:name(**arguments)`; all values pass through JSON."""
        return self._run(copy, {"function": function, "arguments": arguments})

    def lohan(self, copy: PackageCopy, *words: object, code: int = 0) -> str:
        """Run `lohan WORDS`, check its exit code, and return what it printed."""
        request = {"argv": ["lohan", *map(str, words)], "code": code}
        return str(self._run(copy, request))

    def _run(self, copy: PackageCopy, request: Mapping[str, Any]) -> Any:
        copy._runs += 1
        place = copy.folder / f"process-{copy._runs}"
        place.mkdir()
        whole = {**request, "copy": str(copy.folder), "place": str(place)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(whole, default=str) + "\n")
        self._process.stdin.flush()
        ended = self._answer()
        out, err = (place / OUT).read_text(), (place / ERR).read_text()
        assert ended == request.get("code", 0), f"exit code {ended}\n{out}\n{err}"
        if "argv" in request:
            return out + err
        return json.loads((place / RESULT).read_text())

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


# -- in a process that has imported a copy ---------------------------------------------------------


def write_inputs(folder: Path) -> list[str]:
    """Write a tiny Llama and data, and return the options of `lohan train` for two steps."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
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
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    rows = [{"input_ids": [(i * j) % 64 for j in range(1, 12)], "target": i} for i in range(8)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = f"--model {folder / 'model'} --data {folder / 'data.jsonl'} --host 4MiB --steps 2"
    words += " --batch 2 --micro-batch 1 --seq 16 --lr 1e-3 --activations recompute"
    return words.split()


def lohan(*words: object) -> None:
    """Run `lohan WORDS` in this process."""
    from lohan.cli.main import main

    sys.argv = ["lohan", *map(str, words)]
    try:
        main()
    except SystemExit as end:
        assert not end.code, f"exit code {end.code} of {sys.argv}"


def result_of(out: Path) -> tuple[list[float], str]:
    """Return the losses of a run, and the digest of the weights that it has exported."""
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    losses = [row["loss"] for row in rows if "loss" in row]
    weights = (out / "model" / "model.safetensors").read_bytes()
    return losses, hashlib.sha256(weights).hexdigest()


def trained(folder: str, runs: dict[str, str]) -> dict[str, Any]:
    """Train once with each of these options, and return the results of `result_of`."""
    words = write_inputs(Path(folder))
    for name, more in runs.items():
        lohan("train", *words, "--out", Path(folder, name), *more.split())
    return {name: result_of(Path(folder, name)) for name in runs}


# -- in the server's process -----------------------------------------------------------------------


def import_copy(folder: Path) -> None:
    """Import the package from a copy, although this interpreter has it installed."""
    assert "lohan" not in sys.modules
    sys.meta_path[:] = [
        finder for finder in sys.meta_path if not type(finder).__module__.startswith(EDITABLE)
    ]
    sys.path[:0] = [str(folder), str(ROOT)]  # The second is for the package `tests`.
    import lohan
    import lohan._core

    for module in (lohan, lohan._core):
        assert Path(str(module.__file__)).parent == folder / "lohan", module.__file__


def run(request: dict[str, Any]) -> int:
    """Run a request in this process, which is a fork of the server, and return its exit code."""
    import traceback

    place = Path(request["place"])
    for number, name in ((1, OUT), (2, ERR)):
        os.dup2(os.open(place / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
    code = 0
    try:
        import_copy(Path(request["copy"]))
        if "argv" in request:
            sys.argv = request["argv"]
            importlib.import_module("lohan.__main__").main()
        else:
            module, _, name = request["function"].partition(":")
            result = getattr(importlib.import_module(module), name)(**request["arguments"])
            (place / RESULT).write_text(json.dumps(result, default=str))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def serve() -> None:
    import torch  # noqa: F401
    import transformers.models.auto.modeling_auto
    import transformers.models.llama.modeling_llama  # noqa: F401

    assert "lohan" not in sys.modules
    gc.collect()
    gc.freeze()  # Collections in a fork would otherwise copy every page that they look at.
    print(json.dumps(READY), flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os._exit(run(json.loads(line)))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
