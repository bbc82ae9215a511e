"""Each checklist of CONTRIBUTING.md names all files that a dummy must change in order to work.

A test edits a copy of the package as its checklist says. The copy refuses edits of other files, so
a test fails if its checklist leaves out a file. `test_optimizer_checklist.py` has the optimizer.
"""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.package_copies import (
    CopyServer,
    PackageCopy,
    lohan,
    result_of,
    trained,
    write_inputs,
)

TRAINED = "tests.support.package_copies:trained"
OPERATION, TASK = "A new operation", "A new task"
DEVICE, SETTING = "A new device", "A new setting"


@pytest.fixture(scope="module")
def server() -> Iterator[CopyServer]:
    result = CopyServer()
    yield result
    result.close()


# -- a new operation: it weighs the state of a chunk that was updated ------------------------------


ROW = """
    WEIGH = Operation(
        "Z",
        "weigh the state of chunk 1 of group 5 in ring buffer 0",
        lane="ssd",
        subject=Subject.CHUNK,
        at=(STATE,),
        effects=lambda index, chunk, at, spec: [((STATE, at[0]), READ, WHOLE)],
        moves=_per_parameter(lambda layout: layout.state),
        rate=_mixed_write,
    )
"""
BRANCH = """
    def _weigh(self, action: Action) -> Iterable[Ticket]:
        WEIGHED.append(action.token())
        return ()

"""


def edit_operation(copy: PackageCopy) -> None:
    copy.after("lohan/schedule/ops.py", r"^class Op:\n    \"\"\".*\"\"\"\n", ROW)
    file = "lohan/engine/actions.py"
    copy.before(file, r"^LOG_OPERATIONS = ", WEIGHED)
    copy.before(file, r"^    def _write_weights\(self, ", BRANCH.lstrip("\n"))
    copy.after(file, r"^        Op\.WRITE: _write,\n", "        Op.WEIGH: _weigh,\n")
    copy.after(
        "lohan/schedule/phases.py",
        r"^            self\.emit\(Op\.UPDATE, group, chunk, at, .*\n",
        "            self.emit(Op.WEIGH, group, chunk, (buffer,))\n",
    )
    row = "| `Z5.1@0` | ssd | weigh the state of chunk 1 of group 5 in ring buffer 0 |\n"
    copy.before("docs/design.md", r"^\| `F3@0` \| compute \|", row)


WEIGHED = "WEIGHED: list[str] = []\n\n\n"


def run_operation(folder: str, copy: str) -> dict[str, Any]:
    from lohan.engine import actions
    from lohan.schedule.ops import table

    runs = {"serial": "--no-overlap", "overlapped": "--trace"}
    results = trained(folder, runs)
    trace = Path(folder, "overlapped", "trace.json").read_text()
    page = Path(copy, "docs", "design.md").read_text()
    return {
        "results": results,
        "weighed": actions.WEIGHED,
        "traced": '"Z0.0"' in trace,
        "documented": "\n".join(table()) in page,
    }


def test_operation_is_a_row_a_branch_and_its_place_in_a_step(server, tmp_path):
    """The waits of the dummy follow from its effects, and it changes no bit of a run."""
    plain, copy = PackageCopy(tmp_path / "plain", OPERATION), PackageCopy(tmp_path / "a", OPERATION)
    edit_operation(copy)
    copy.check_complete(kept=("lohan/schedule/check.py",))
    folder = tmp_path / "runs"
    shown = server.call(copy, f"{__name__}:run_operation", folder=folder, copy=copy.folder)
    assert shown["results"]["serial"] == shown["results"]["overlapped"]
    assert shown["weighed"] and shown["traced"] and shown["documented"]
    assert any("(U" in token for token in shown["weighed"]), shown["weighed"]
    machine = ("--machine", "rtx4090", "--host", "1GiB", "--batch", 2, "--seq", 16)
    words = ("--model", folder / "model", *machine)
    printed = server.lohan(copy, "plan", *words, "--schedule")
    assert re.search(r"\bZ0\.0@\d+\([^)]*U0\.0\b", printed), printed
    server.lohan(copy, "simulate", *words, "--trace", tmp_path / "simulated.json")
    assert '"Z0.0"' in (tmp_path / "simulated.json").read_text()
    expected = server.call(
        plain, TRAINED, folder=tmp_path / "others", runs={"serial": "--no-overlap"}
    )
    assert expected["serial"] == shown["results"]["serial"]


# -- a new task: it pulls logits towards the number of an example ----------------------------------


PULL = '''"""A task that pulls all logits towards a number."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lohan.data.dataset import Fields, Row
from lohan.data.reading import read_rows
from lohan.errors import ConfigError, DataError
from lohan.train.task import Batch, DataRequest, Task, refuse_text_settings


def examples(path: Path) -> Iterator[Row]:
    for _, row in read_rows(path, lambda *_: None):
        yield {
            "input_ids": np.asarray(row["input_ids"], np.int32),
            "target": np.asarray([row["target"]], np.float32),
        }


def collate(rows: list[Row]) -> Batch:
    fields = {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}
    return {**fields, "input_ids": fields["input_ids"].long()}


class Pull(Task[Fields]):
    def check(self, config):
        refuse_text_settings(config, "pull")

    def prepare(self, data: DataRequest) -> Fields:
        ready = data.fields(examples, about=dict, show=lambda row: {}, collate=collate)
        if ready is None:
            raise DataError(f"{data.sources[0].path}: holds no examples; check {data.option}")
        return ready

    def describe(self, examples, config):
        return f"{len(examples)} examples to pull"

    def shapes(self, config, examples, *, dtype):
        shape = (config.train.batch, 11)
        return {"input_ids": torch.empty(shape, dtype=torch.long, device="meta")}

    def loss(self, model, batch):
        logits = model(input_ids=batch["input_ids"]).logits
        return (logits - batch["target"][:, :, None]).square().mean()
'''


def edit_task(copy: PackageCopy) -> None:
    copy.create("lohan/train/pull.py", PULL)
    copy.after("lohan/train/inputs.py", r"^TASKS: .*\{\n", '    "pull": Pull(),\n')
    copy.before(
        "lohan/train/inputs.py",
        r"^from lohan\.train\.run_folder import ",
        "from lohan.train.pull import Pull\n",
    )
    copy.after("lohan/config.py", r"^TASKS = \(\n", '    "pull",\n')


def run_task(folder: str) -> dict[str, Any]:
    words = [*write_inputs(Path(folder)), "--task", "pull"]
    runs = {name: Path(folder, name) for name in ("whole", "parts", "emulated")}
    lohan("train", *words, "--out", runs["whole"])
    lohan("train", *words, "--out", runs["parts"], "--steps", 1)
    lohan("resume", runs["parts"], "--steps", 2)
    emulated = ("--device", "emulated", "--device-memory", "4MiB")
    lohan("train", *words, "--out", runs["emulated"], *emulated)
    return {
        "plain": plain_losses(runs["whole"]),
        "card": (runs["whole"] / "model" / "README.md").read_text(),
        **{name: result_of(out) for name, out in runs.items()},
    }


def plain_losses(out: Path) -> list[float]:
    """Return the losses of the run of the dummy task, computed by plain PyTorch."""
    import torch
    from transformers import LlamaForCausalLM

    from lohan.data.dataset import rows_of
    from lohan.train.run_folder import RunFolder

    train = RunFolder(out).config().train
    model = LlamaForCausalLM.from_pretrained(out.parent / "model")
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, eps=train.eps)
    rows = [json.loads(line) for line in (out.parent / "data.jsonl").read_text().splitlines()]
    losses = []
    for step in range(2):
        batch = [rows[number] for number in rows_of(0, step, 2, len(rows))]
        logits = model(torch.tensor([row["input_ids"] for row in batch])).logits
        targets = torch.tensor([float(row["target"]) for row in batch])
        loss = (logits - targets[:, None, None]).square().mean()
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip)
        optimizer.param_groups[0]["lr"] = train.lr_at(step, 2)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_task_trains_like_plain_pytorch_and_resumes(server, tmp_path):
    copy = PackageCopy(tmp_path / "copy", TASK)
    edit_task(copy)
    copy.check_complete(kept=("lohan/train/task.py",))
    shown = server.call(copy, f"{__name__}:run_task", folder=tmp_path / "runs")
    losses, _ = shown["whole"]
    assert losses == pytest.approx(shown["plain"], rel=1e-5) and losses[0] != losses[1]
    assert shown["parts"] == shown["whole"] and shown["emulated"] == shown["whole"]
    assert "- pull\n" in shown["card"]
    refused = server.lohan(copy, "verify", "--config", tmp_path / "runs/whole/run.toml", code=2)
    assert "--task pull: plain transformers has no such loss" in refused
    refused = server.lohan(copy, "train", "--task", "pul", "--dry-run", code=2)
    assert "pull" in refused


# -- a new device: a CPU with memory of its own, whose copies are late -----------------------------


LATE = '''"""A device that implements the protocol only. Its copies take a millisecond."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch

from lohan.device.base import pages, sum_squares_on_host


class Passing:
    def __init__(self, future=None):
        self._future = future

    def synchronize(self):
        if self._future is not None:
            self._future.result()


class LateDevice:
    name, default_dtype = "late", "fp32"
    has_own_memory = computes_on_cores = True
    compiles = False
    torch_device = torch.device("cpu")

    def __init__(self, memory):
        self._memory, self._lanes = memory, {}
        self.copies = 0

    def memory_bytes(self):
        return self._memory

    def allocate(self, count):
        return torch.full((count,), 0xFF, dtype=torch.uint8)

    def host_memory(self, count):
        return pages(count)

    def compute_view(self, host):
        raise AssertionError("compute does not read host memory")

    def enter(self, lane):
        pass

    def copy(self, lane, pairs, *, after=None):
        if lane not in self._lanes:
            self._lanes[lane] = ThreadPoolExecutor(1)
        return Passing(self._lanes[lane].submit(self._copy, list(pairs), after))

    def _copy(self, pairs, after):
        if after is not None:
            after.synchronize()
        time.sleep(0.001)
        for dst, src in pairs:
            dst.copy_(src)

    def record_stream(self, lane, tensors):
        pass

    def mark(self):
        return Passing()

    def stamp(self):
        return None

    def wait(self, event):
        event.synchronize()

    def sum_squares(self, tensors):
        return sum_squares_on_host(tensors)

    def computing(self):
        return nullcontext()

    def overhead(self, host_bytes):
        return {}

    def release_cached_memory(self):
        pass

    def random_state(self):
        return torch.get_rng_state()

    def set_random_state(self, state):
        torch.set_rng_state(state)

    def close(self):
        for lane in self._lanes.values():
            lane.shutdown()
'''


def edit_device(copy: PackageCopy) -> None:
    copy.create("lohan/device/late.py", LATE)
    copy.after("lohan/util/settings.py", r'^DEVICES = \("auto", ', '"late", ')
    file = "lohan/device/choose.py"
    copy.before(
        file,
        r'^    if name == "accelerator":\n        return _acc',
        '    if name == "late":\n        return LateDevice(memory)\n',
    )
    copy.before(file, r"^from lohan\.errors import ", "from lohan.device.late import LateDevice\n")


def test_device_trains_with_the_bits_of_the_cpu(server, tmp_path):
    copy = PackageCopy(tmp_path / "copy", DEVICE)
    edit_device(copy)
    copy.check_complete(kept=("lohan/device/base.py", "lohan/device/accelerator.py"))
    runs = {"cpu": "--device cpu --no-overlap", "late": "--device late --device-memory 4MiB"}
    results = server.call(copy, TRAINED, folder=tmp_path / "runs", runs=runs)
    assert results["late"] == results["cpu"]
    refused = server.lohan(copy, "train", "--device", "lat", code=2)
    assert "auto, late, cpu" in refused
    assert (
        "|late|"
        in json.loads(server.lohan(copy, "schema"))["properties"]["budget"]["properties"]["device"][
            "pattern"
        ]
    )
    refused = server.lohan(copy, "doctor", "--gpu", "--ssd", tmp_path, "--device", "late", code=2)
    assert "checks a GPU" in refused


# -- a new setting: an even number that plans take over --------------------------------------------


EVEN = """
@kind("EVEN", int, type="integer", multipleOf=2)
def even(value: Any, name: str, base: Path) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value % 2:
        raise wrong(name, value, "an even number")
    return value


"""
FIELD = '    pairs: int = setting(4, even, "Number of pairs of the dummy, counted twice.")\n'


def edit_setting(copy: PackageCopy) -> None:
    copy.after("lohan/config.py", r'^class TrainConfig:\n    """.*"""\n\n', FIELD)
    copy.after("lohan/config.py", r"^    drives,\n", "    even,\n")
    copy.before("lohan/util/settings.py", r"^def choice\(", EVEN.lstrip("\n"))
    group = r'^    f"\{ADVANCED\}training": \(\n'
    copy.after("lohan/cli/options.py", group, '        "train.pairs",\n')
    # It goes wherever `overlap`, another setting that the engine reads from the plan, goes.
    for file, line in (
        ("lohan/model/plan.py", "    overlap: bool = True"),
        ("lohan/engine/policies.py", "    overlap: bool = True"),
        ("lohan/hf/arguments.py", "    overlap: bool = True"),
        ("lohan/model/options.py", "        overlap=train.overlap,"),
        ("lohan/train/inputs.py", "            overlap=train.overlap,"),
        ("lohan/engine/attach.py", "        overlap=offload.overlap,"),
        ("lohan/hf/mixin.py", "                overlap=self.lohan.overlap,"),
        ("lohan/train/changes.py", '                "overlap",'),
    ):
        added = line.replace("overlap", "pairs").replace("bool = True", "int = 4")
        copy.after(file, f"^{re.escape(line)}\\n", f"{added}\n")
    line = "train --pairs: int | None\n"
    copy.after("tests/cli/options.txt", r"^train --pack/--no-pack: .*\n", line)


def read_setting(folder: str, copy: str) -> dict[str, Any]:
    """Return where the setting appears and how it is read, without a training."""
    import tomllib

    from lohan.config import Config, load_config
    from lohan.errors import ConfigError
    from lohan.ui.form import fields

    file = Path(folder, "run.toml")
    file.write_text('model = "m"\ndata = "d.txt"\nout = "o"\n[train]\npairs = 6\n')
    config = load_config(file)
    written = Config.from_mapping(tomllib.loads(config.to_toml()), base_dir=Path(folder))
    errors = []
    for wrong in ("train.pairs=5", "train.pairs=two", "train.pair=6"):
        try:
            load_config(file, assignments=[wrong])
        except ConfigError as error:
            errors.append(str(error))
    runpy.run_path(str(Path(copy, "docs", "settings_page.py")), run_name="__main__")
    listed = runpy.run_path(str(Path(copy, "tests", "cli", "test_options.py")))
    listed["test_every_option_keeps_its_name_and_type"]()
    return {
        "read": config.train.pairs,
        "same": written == config,
        "set": load_config(file, assignments=["train.pairs=8"]).train.pairs,
        "errors": errors,
        "page": Path(copy, "docs", "configuration.md").read_text(),
        "form": [field for field in fields() if field["key"] == "train.pairs"],
    }


def recorded_plans(module: Any) -> list[int]:
    """Return a list to which every session that the module opens adds its plan's value."""
    values: list[int] = []
    attach = module.attach

    def recorded(*args: Any, **keywords: Any) -> Any:
        session = attach(*args, **keywords)
        values.append(session.plan.pairs)
        return session

    module.attach = recorded
    return values


def planned_setting(folder: str) -> dict[str, int]:
    """Return the value in the plan of `lohan plan`, of a run, and of the resumed run."""
    import lohan.train.inputs as inputs
    from lohan.config import load_config
    from lohan.model.options import options_of

    values = recorded_plans(inputs)
    words, out = write_inputs(Path(folder)), Path(folder, "run")
    lohan("train", *words, "--out", out, "--pairs", 6, "--steps", 1)
    lohan("resume", out, "--steps", 2, "--set", "train.pairs=8")
    options = options_of(load_config(out / "run.toml"), dtype="fp32")
    return {"run": values[0], "resumed": values[-1], "plan": options.pairs}


def test_setting_is_declared_once(server, tmp_path):
    copy = PackageCopy(tmp_path / "copy", SETTING)
    edit_setting(copy)
    others = ("lohan/train/trainer.py", "lohan/train/periodic.py", "lohan/cli/train.py")
    copy.check_complete(kept=others)
    shown = server.call(copy, f"{__name__}:read_setting", folder=tmp_path, copy=copy.folder)
    assert (shown["read"], shown["set"], shown["same"]) == (6, 8, True)
    assert shown["errors"][:2] == [
        "[train] pairs: got 5, wants an even number",
        '[train] pairs: got text "two", wants an even number',
    ]
    assert "did you mean pairs?" in shown["errors"][2]
    row = "| `pairs` | `4` | `--pairs` | `EVEN`. Number of pairs of the dummy, counted twice. |"
    assert row in shown["page"]
    assert [field["default"] for field in shown["form"]] == ["4"]
    helped = " ".join(server.lohan(copy, "train", "--help").split())
    assert "--pairs EVEN Number of pairs" in helped.replace("│ ", "")
    schema = json.loads(server.lohan(copy, "schema"))["properties"]["train"]["properties"]
    assert schema["pairs"]["multipleOf"] == 2 and schema["pairs"]["default"] == 4
    planned = server.call(copy, f"{__name__}:planned_setting", folder=tmp_path / "runs")
    assert planned == {"run": 6, "resumed": 8, "plan": 8}


def planned_by_trainer(folder: str) -> list[int]:
    """Return the value in the plan of a Trainer script."""
    from transformers import LlamaForCausalLM, TrainingArguments

    from lohan.hf import LohanArguments, Trainer, mixin

    values = recorded_plans(mixin)
    write_inputs(Path(folder))
    ids = list(range(12))
    trainer = Trainer(
        model=LlamaForCausalLM.from_pretrained(Path(folder, "model")),
        args=TrainingArguments(Path(folder, "out"), max_steps=1, report_to=[], use_cpu=True),
        train_dataset=[{"input_ids": ids, "labels": ids}] * 8,
        lohan=LohanArguments(host="16MiB", pairs=6),  # type: ignore[call-arg]
    )
    trainer.train()
    return values


@pytest.mark.slow
def test_setting_reaches_the_plan_of_a_trainer_script(server, tmp_path):
    copy = PackageCopy(tmp_path / "copy", SETTING)
    edit_setting(copy)
    values = server.call(copy, f"{__name__}:planned_by_trainer", folder=tmp_path / "runs")
    assert values and set(values) == {6}
