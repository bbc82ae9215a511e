"""The command line with --device cuda, on software CUDA: in this process and as ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lohan.device.accelerator import AcceleratorDevice
from lohan.tools.gpu_checks import CHECKS, run_here
from lohan.tools.late_device import LateDevice
from lohan.tools.self_test import compared
from tests.softcuda import extension, unordered
from tests.support.forked_commands import Ended
from tests.support.model_folders import (
    PIPELINE_CONFIGS,
    save_latents,
    save_pipeline,
    write_word_model,
)
from tests.support.process_hooks import send_while_held
from tests.support.training_runs import (
    assert_refused,
    data_fixture,  # noqa: F401 - a fixture
    model_fixture,  # noqa: F401 - a fixture
    train_arguments,
)

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
cuda: Any = extension()


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in rows(out) if "loss" in row]


def test_train_resume_evaluate_and_generate(lohan, model, data, tmp_path):
    collected = {}
    for device in ("cpu", "cuda"):
        out = tmp_path / device
        more = ["--dtype", "fp32", "--micro-batch", 1, "--device", device]
        ended = lohan(*train_arguments(model, data, out, *more))
        assert ended.code == 0, ended
        output = ended.out + ended.err  # the plan, line by line
        assert ("libraries and kernels" in output) == (device == "cuda"), ended
        ended = lohan("resume", out, "--steps", 3)
        assert ended.code == 0, ended
        collected[device] = losses(out)
    assert collected["cuda"] == collected["cpu"] and len(collected["cpu"]) == 3
    assert cuda.counts()["kernels"] == 0
    for device in ("cuda", "cuda:1", "gpu"):
        ended = lohan("eval", tmp_path / "cuda", "--data", data, "--device", device, "--json")
        assert ended.code == 0, ended
        collected[device] = json.loads(ended.out)["loss"]
    assert collected["cuda"] == collected["cuda:1"] == collected["gpu"]


def test_nan_loss_ends_both_runs_alike(lohan, model, data, tmp_path):
    """An accelerator's loss is read after backward, and the updates are rolled back."""
    settings = {}
    for device in ("cpu", "cuda"):
        out = tmp_path / device
        more = ["--dtype", "fp32", "--micro-batch", 1, "--device", device, "--lr", 1e30]
        ended = lohan(
            *train_arguments(model, data, out, *more, "--steps", 4, "--commit-every", "step")
        )
        assert ended.code != 0, ended
        kept = tmp_path / f"{device}-kept"
        exported = lohan("export", out, "--out", kept)
        assert exported.code == 0, exported
        settings[device] = ended.err, (kept / "model.safetensors").read_bytes()
    assert settings["cuda"] == settings["cpu"]
    assert re.search(r"step 2: the loss is nan.*step 1 is committed", settings["cpu"][0])


def test_a_deterministic_run_sets_workspaces_before_it_uses_the_device(model, data, tmp_path):
    """In a new process, because cuBLAS reads the setting when it is first used."""
    given = ["--device", "cuda", "--deterministic"]
    ended = run(*train_arguments(model, data, tmp_path / "run", *given), CUBLAS_WORKSPACE_CONFIG="")
    assert ended.code == 0, ended


def test_generation_equals_that_on_the_cpu(lohan, tmp_path):
    folder, collected = write_word_model(tmp_path / "model", "qwen3"), {}
    requests = ["--prompt", "w1 w2 w3", "--max-new-tokens", 5, "--host", "64MiB", "--ssd", tmp_path]
    for device in ("cpu", "cuda"):
        ended = lohan(
            "generate", folder, *requests, "--device", device, "--dtype", "fp32", "--json"
        )
        assert ended.code == 0, ended
        collected[device] = [pair["text"] for pair in json.loads(ended.out)]
    assert collected["cuda"] == collected["cpu"] and collected["cpu"][0]


def test_diffusion_with_a_large_table_of_positions(lohan, tmp_path, monkeypatch):
    """SD3's belongs to the checkpoint, takes megabytes and never changes."""
    pytest.importorskip("diffusers")
    name, config = PIPELINE_CONFIGS["sd3"]
    monkeypatch.setitem(PIPELINE_CONFIGS, "sd3", (name, {**config, "pos_embed_max_size": 192}))
    folder, images = save_pipeline(tmp_path / "sd3", "sd3"), save_latents(tmp_path / "data", "sd3")
    collected = {}
    for device in ("cpu", "cuda"):
        out = tmp_path / device
        ended = lohan(
            "train",
            "--task",
            "diffusion",
            "--model",
            folder,
            "--data",
            images,
            "--out",
            out,
            "--host",
            "64MiB",
            "--batch",
            2,
            "--micro-batch",
            1,
            "--steps",
            2,
            "--device",
            device,
            "--dtype",
            "fp32",
        )
        assert ended.code == 0, ended
        collected[device] = losses(out)
    assert collected["cuda"] == collected["cpu"] and len(collected["cpu"]) == 2


def test_names_of_devices(lohan, model, data, tmp_path):
    for device, message in (
        ("cuda:7", r"no device 7.*2 devices"),
        ("xpu", r"xpu was requested.*is cuda.*--device cuda"),
        ("graphics", r"wants one of auto, cpu, .*cuda, cuda:N"),
    ):
        assert_refused(
            lohan(*train_arguments(model, data, tmp_path / "run", "--device", device)), message
        )


def test_profile_and_doctor(lohan, tmp_path):
    ended = lohan(
        "profile", "--ssd", tmp_path, "--device", "cuda", "--device-memory", "256MiB", "--json"
    )
    assert ended.code == 0, ended
    measured = json.loads(ended.out)
    assert measured["h2d"] > 0 and measured["d2h"] > 0
    assert measured["device_rate"] > 0
    assert 0 < measured["forward_launch_s"] < measured["backward_launch_s"] < 0.1
    ended = lohan("doctor", "--ssd", tmp_path)
    assert "cuda" in ended.out.lower() and ended.code in (0, 1), ended


@pytest.mark.parametrize("name", CHECKS)
def test_the_checks_of_a_card_pass(name, tmp_path):
    """The checks run in this process at a small scale."""
    result = run_here(name, "cuda", tmp_path)
    assert result["state"] == "ok", result
    assert all(
        f.note == "not a real device" for f in compared(result["figures"], result["card"], {})
    )
    assert not list(tmp_path.iterdir())


def test_the_checks_of_a_card_as_a_command(lohan, tmp_path):
    file = tmp_path / "report.json"
    ended = lohan("doctor", "--gpu", "--ssd", tmp_path, "--check", "device", "-o", file)
    assert ended.code == 0 and "all 1 checks passed" in ended.out, ended
    loaded = json.loads(file.read_text())
    assert loaded["card"].startswith("software CUDA") and loaded["passed"]
    assert loaded["checks"][0]["facts"]["capability"] == "8.9"


def test_the_checks_of_a_card_find_a_missing_wait(monkeypatch, tmp_path):
    monkeypatch.setattr(AcceleratorDevice, "wait", lambda self, event: None)
    cuda.set_delays(100_000, 0, 0)  # Longer than the two slices that the host is ahead.
    with unordered():
        result = run_here("saved-activations", "cuda", tmp_path)
    assert result["state"] == "wrong" and "activations saved, and recomputed" in result["error"]


def test_a_late_device_pauses_on_the_stream_of_every_lane_and_of_compute():
    paused: list[Any] = []
    device = LateDevice(pause=lambda cycles: paused.append(torch.cuda.current_stream()))
    on_device, on_host = device.allocate(64), torch.zeros(64, dtype=torch.uint8).pin_memory()
    lanes = ("h2d", "slices", "d2h")
    for lane in lanes:
        device.copy(
            lane, [(on_host, on_device) if lane == "d2h" else (on_device, on_host)]
        ).synchronize()
    device.mark()
    assert paused == [*(device._streams[lane] for lane in lanes), torch.cuda.current_stream()]


LIGER = """
def _apply_liger_kernel_to_instance(*, model, **config):
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.variance_epsilon = EPSILON
"""


@pytest.mark.parametrize("epsilon, state", [(1e-6, "ok"), (10.0, "wrong")])
def test_the_check_of_liger_compares_gradient_norms(epsilon, state, monkeypatch, tmp_path):
    """A stand-in for the package changes the norms, which must show in the gradients."""
    folder = tmp_path / "packages" / "liger_kernel"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "transformers.py").write_text(LIGER.replace("EPSILON", str(epsilon)))
    monkeypatch.syspath_prepend(folder.parent)
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    result = run_here("liger", "cuda", tmp_path)
    assert result["state"] == state, result


def run(*args: object, **env: str) -> Ended:
    done = subprocess.run(
        [sys.executable, "-m", "lohan", *map(str, args)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        timeout=600,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


HELD = (
    "import runpy, tests.support.process_hooks as hooks; hooks.hold_backward();"
    "runpy.run_module('lohan', run_name='__main__', alter_sys=True)"
)
STOPPED = [  # Ctrl-C that come in a backward, steps that are committed, what is said
    (1, 3, r"stopped after step 3 of 5"),
    (2, 2, r"^lohan: interrupted; all committed steps are on disk$"),
    (3, 2, r"^lohan: stopped at once; resume goes on from the last committed step$"),
]


@pytest.mark.parametrize("stopped", STOPPED)
def test_ctrl_c_in_a_backward_on_a_device(stopped, lohan, model, data, tmp_path):
    """Stop a run by several Ctrl-C while backward runs on the device.

    The main thread handles none of them before backward ends. The first one then lets the step
    finish, the second one discards it, and the third one ends the process immediately.
    """
    count, steps, text = stopped
    out, more = tmp_path / "run", ["--device", "cuda", "--dtype", "fp32", "--commit-every", "step"]
    given = [*more, "--steps", 5]
    ended = lohan(*train_arguments(model, data, tmp_path / "whole", *given))
    assert ended.code == 0, ended
    process = subprocess.Popen(
        [sys.executable, "-c", HELD, *map(str, train_arguments(model, data, out, *given))],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HOLD": str(tmp_path)},
    )
    send_while_held(process.pid, tmp_path, count)
    reported, errors = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in errors, errors
    assert re.search(text, reported + errors, re.MULTILINE), reported + errors
    ended = lohan("resume", out)
    assert ended.code == 0 and f"resuming after step {steps} of 5" in ended.out, ended
    assert losses(out) == losses(tmp_path / "whole")
    files = (folder / "model" / "model.safetensors" for folder in (out, tmp_path / "whole"))
    assert len({file.read_bytes() for file in files}) == 1


LATE_AND_POISONED = {
    "SOFTCUDA_ORDER": "1",
    "SOFTCUDA_POISON": "1",
    "SOFTCUDA_COPY_US": "2000",
    "SOFTCUDA_WORK_US": "200",
    "SOFTCUDA_SEED": "1",
}


def test_two_ranks_on_two_devices(model, data, tmp_path):
    """Two ranks on the device have the losses and norms of two ranks on the CPU.

    NCCL sums in the order of the ranks here, as they do on the CPU. Both processes run under the
    order detector, with poisoned memory and random delays.
    """
    collected = {}
    for device in ("cpu", "cuda"):
        out = tmp_path / device
        more = ["--gpus", 2, "--device", device, "--dtype", "fp32", "--micro-batch", 1]
        ended = run(*train_arguments(model, data, out, *more, "--steps", 4), **LATE_AND_POISONED)
        assert ended.code == 0, ended
        collected[device] = losses(out), [row["grad_norm"] for row in rows(out) if "loss" in row]
    assert collected["cuda"][0] == collected["cpu"][0] and len(collected["cpu"][0]) == 4
    assert collected["cuda"][1] == pytest.approx(collected["cpu"][1], rel=1e-6)


def test_build_without_a_device_is_reported(model, data, tmp_path):
    command = train_arguments(model, data, tmp_path / "run", "--device", "cuda")
    ended = run(*command, SOFTCUDA_DEVICES="0")
    assert ended.code == 2 and "Traceback" not in ended.err
    assert re.search(r"built for cuda, but finds no device.*nvidia-smi.*--device cpu", ended.err)


def test_small_pieces_of_memory_serve_for_large_ones(model, data, tmp_path):
    """Expandable segments, set before torch is imported."""
    out = tmp_path / "run"
    ended = run(*train_arguments(model, data, out, "--device", "cuda"))
    assert ended.code == 0, ended
    code = (
        "from lohan.util.libraries import set_up_libraries as s; s(); import torch;"
        "torch.empty(2**21, dtype=torch.uint8, device='cuda');"
        "print(torch.cuda.memory_snapshot()[0]['is_expandable'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "True" and "deprecated" not in done.stderr, done
