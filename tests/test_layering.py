"""Imports go downwards only, and what must start fast does not import torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lohan

ROOT = Path(lohan.__file__).parent

# Each row may import from the rows above it, never from its own or from those below.
LAYERS = [
    ["errors", "machine", "drive_facts", "_core", "doctor", "verify", "report", "ranks", "util"],
    ["util.atomic"],
    ["schedule", "shapes", "planning", "profiling", "commands", "model_files"],
    ["fakes", "runtime.ambient", "runtime.hollow", "model_files.assembly"],
    ["units", "lr", "optim", "schedule.actions", "trace", "shapes.shape", "libraries", "util"],
    ["util.json_file", "util.paths", "util.terminal"],
    ["util.typed"],
    ["layout"],
    [
        "config_parse",
        "plan",
        "display",
        "schedule.places",
        "planning.demand",
        "lora",
        "ranks.shards",
    ],
    ["schedule.builder"],
    ["ranks.heartbeat", "ranks.collectives"],
    ["ranks.team"],
    ["schedule.passes", "schedule.knowledge", "profile", "shapes.families", "schedule.simulator"],
    ["ranks.launching"],
    ["planning.cost", "schedule.check"],
    ["policies", "shapes.of_config"],
    ["policies.activations", "presets"],
    ["settings"],
    ["config"],
    ["data.arrange", "data.samples", "tasks", "tasks.task"],
    ["data.dataset"],
    ["data.encoder"],
    ["data.rows", "data.tables"],
    ["data.reading"],
    ["data.cache"],
    ["data", "data.records"],
    ["run"],
    ["storage", "storage.engine", "storage.deadline"],
    ["storage.files"],
    ["storage.extents", "storage.lock", "storage.manifest", "report.traces", "report.markup"],
    ["storage.volume", "storage.locate", "storage.agreement", "doctor.findings", "report.words"],
    ["storage.flight", "storage.ledger", "storage.admin", "doctor.system", "report.gather"],
    ["storage.transfers", "report.sections"],
    ["storage.opening", "report.page"],
    ["storage.store"],
    ["storage.verify", "storage.sets", "meter"],
    ["storage.snapshot"],
    ["blocks", "model_files.reader", "model_files.conversion"],
    ["discovery", "model_files.parameters", "model_files.writer", "state", "model_files.kinds"],
    ["planning.moments", "planning.sizes", "planning.wishes", "doctor.drives", "ranks.resharding"],
    ["planning.on_device", "planning.facts"],
    ["planning.device_books"],
    ["planning.books", "schedule.steady", "tensors", "planning.shape_load"],
    ["planning.spare", "planning.choices", "model_files.replacing"],
    ["planning.wished", "claiming"],
    ["planning.sizer", "planning.forecast"],
    ["planning.planner"],
    ["planning.best"],
    ["planning.one_memory", "planning.prospect", "planning.forward"],
    ["commands.state_text"],
    ["commands.prospect_text"],
    ["policies.policy"],
    ["policies.systems", "policies.memory", "policies.work"],
    ["policies.run"],
    ["model_files.checkpoint", "model_files.export", "model_files.folder"],
    [
        "model_files.adapters",
        "model_files.diffusers_folder",
        "model_files.shards",
        "model_files.team_reader",
    ],
    ["device", "device.host", "device.timeline"],
    ["device.base", "device.specific", "device.watch"],
    ["device.accelerator", "device.linked"],
    ["device.emulated"],
    ["device.choose", "runtime.exchange"],
    ["runtime", "runtime.activations", "runtime.gradients", "runtime.pool", "runtime.progress"],
    ["runtime.operations", "runtime.buffers", "runtime.elsewhere", "runtime.queues"],
    ["runtime.compiling"],
    ["runtime.together", "runtime.kept", "runtime.batching", "tracing"],
    ["runtime.keeping", "inventory"],
    ["runtime.optimizer", "runtime.sites", "runtime.spill", "runtime.weights", "runtime.waiting"],
    ["runtime.acts", "runtime.recipes"],
    ["runtime.travel"],
    ["runtime.head", "runtime.lanes", "runtime.resident", "runtime.work"],
    ["runtime.pipeline"],
    ["runtime.build"],
    ["runtime.collector"],
    ["runtime.calls"],
    ["runtime.executor"],
    ["footprint", "profiling.compute", "profiling.drives"],
    ["profiling.links"],
    ["profiling.profiler"],
    ["profiling.command"],
    ["model_files.model_store", "evaluation", "packing"],
    ["model_files.weights_store", "generation", "ranks.agreeing"],
    ["session"],
    ["api", "learning", "hf", "hf.batches", "hf.optimizers"],
    ["hf.arguments", "hf.limits"],
    ["hf.mixin"],
    ["hf.trainer", "hf.sft"],
    ["replanning", "shrinking", "streaming", "loggers", "journal"],
    ["tasks.noising", "ranks.crew"],
    ["tasks.language", "tasks.diffusion"],
    ["tasks.table"],
    ["starting"],
    ["between", "report.advice"],
    ["commands.outcomes", "commands.plots"],
    ["trainer", "commands.plan", "commands.simulate", "commands.compare", "commands.forward_run"],
    ["commands.dry_run"],
    ["commands.options"],
    ["commands.ahead", "commands.systems", "commands.measure"],
    ["verify.copies", "verify.judging", "verify.optimizers"],
    ["verify.reference"],
    ["verify.through"],
    ["verify.whole"],
    ["commands.train", "commands.doctor", "commands.report", "commands.verify"],
    ["commands.forward"],
    ["cli"],
    ["__init__", "__main__"],
]
RANK = {name: rank for rank, row in enumerate(LAYERS) for name in row}
NO_TORCH = ["errors", "units", "config", "lr", "plan", "optim", "run", "schedule.actions", "trace"]
NO_TORCH += ["machine", "display", "data", "storage.store", "storage.snapshot", "storage.admin"]
NO_TORCH += ["profile", "shapes.shape", "presets", "profiling.command"]
NO_TORCH += [
    "commands.simulate",
    "commands.compare",
    "planning.prospect",
    "planning.forecast",
    "commands.ahead",
]
NO_TORCH += [
    "cli",
    "schedule.check",
    "layout",
    "planning.demand",
    "state",
    "planning.planner",
    "schedule.steady",
]


def modules() -> list[str]:
    names = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names.append(".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts))
    return names


def file_of(name: str) -> Path:
    path = ROOT.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imports(tree: ast.AST) -> Iterator[str]:
    """Modules of ours that are imported anywhere but under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (a.name.removeprefix("lohan.") for a in node.names if "lohan" in a.name)
        elif isinstance(node, ast.ImportFrom) and node.level:
            raise AssertionError(f"relative import in line {node.lineno}")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lohan":
            inner = node.module.removeprefix("lohan").removeprefix(".")
            for alias in node.names:
                full = f"{inner}.{alias.name}".removeprefix(".")
                yield full if full in RANK else inner
        yield from imports(node)


def test_every_module_has_its_place() -> None:
    assert sorted(modules()) == sorted(set(RANK) - {"_core"}), "give the module a row in LAYERS"


@pytest.mark.parametrize("name", modules())
def test_imports_go_downwards(name: str) -> None:
    found = set(imports(ast.parse(file_of(name).read_text()))) - {""}
    assert found <= RANK.keys()
    upwards = [other for other in found if RANK[other] >= RANK[name]]
    assert upwards == [], f"{name} may only import what stands above it in LAYERS"


def test_weights_activations_and_optimizer_do_not_know_each_other() -> None:
    parts = {f"runtime.{name}" for name in ("weights", "activations", "optimizer")}
    for name in parts:
        assert parts.isdisjoint(imports(ast.parse(file_of(name).read_text())))


def loaded(code: str) -> set[str]:
    ended = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}; print('\\n' + ' '.join(sys.modules))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return set(ended.stdout.splitlines()[-1].split())


def test_pure_layers_do_not_import_torch() -> None:
    names = loaded("; ".join(f"import lohan.{name}" for name in NO_TORCH))
    assert "lohan.store.store" in names
    assert not names & {"torch", "transformers", "safetensors"}


def test_help_does_not_import_torch() -> None:
    code = "sys.argv = ['lohan', '--help']; from lohan.cli import main as cli\n"
    code += "try: cli.main()\nexcept SystemExit as end: assert not end.code"
    names = loaded(f"exec({code!r})")
    assert "lohan.cli.main" in names
    assert not names & {"torch", "transformers", "safetensors", "numpy"}
