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

from tests.softcuda import extension
from tests.test_cli import Ended, arguments, data, lohan, model, refused  # noqa: F401 - fixtures

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
cuda: Any = extension()


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in rows(out) if "loss" in row]


def test_train_resume_evaluate_and_generate(lohan, model, data, tmp_path):  # noqa: F811 - fixtures
    found = {}
    for device in ("cpu", "cuda"):
        out = tmp_path / device
        more = ["--dtype", "fp32", "--micro-batch", 1, "--device", device]
        ended = lohan(*arguments(model, data, out, *more))
        assert ended.code == 0, ended
        said = ended.out + ended.err  # the plan, line by line
        assert ("libraries and kernels" in said) == (device == "cuda"), ended
        ended = lohan("resume", out, "--steps", 3)
        assert ended.code == 0, ended
        found[device] = losses(out)
    assert found["cuda"] == found["cpu"] and len(found["cpu"]) == 3
    assert cuda.counts()["kernels"] == 0
    for device in ("cuda", "cuda:1", "gpu"):
        ended = lohan("eval", tmp_path / "cuda", "--data", data, "--device", device, "--json")
        assert ended.code == 0, ended
        found[device] = json.loads(ended.out)["loss"]
    assert found["cuda"] == found["cuda:1"] == found["gpu"]


def test_names_of_devices(lohan, model, data, tmp_path):  # noqa: F811 - fixtures
    for device, says in (
        ("cuda:7", r"no device 7.*2 devices"), ("xpu", r"xpu was asked.*is cuda.*--device cuda"),
        ("graphics", r"auto, cpu, cuda"),
    ):  # fmt: skip
        refused(lohan(*arguments(model, data, tmp_path / "run", "--device", device)), says)


def test_profile_and_doctor(lohan, tmp_path):  # noqa: F811 - a fixture
    ended = lohan(
        "profile", "--ssd", tmp_path, "--device", "cuda", "--device-memory", "256MiB", "--json"
    )
    assert ended.code == 0, ended
    measured = json.loads(ended.out)
    assert measured["h2d"] > 0 and measured["d2h"] > 0
    ended = lohan("doctor", "--ssd", tmp_path)
    assert "cuda" in ended.out.lower() and ended.code in (0, 1), ended


def run(*args: object, **env: str) -> Ended:
    done = subprocess.run(
        [sys.executable, "-m", "lohan", *map(str, args)], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env}, timeout=600,
    )  # fmt: skip
    return Ended(done.returncode, done.stdout, done.stderr)


def test_two_ranks_on_two_devices(model, data, tmp_path):  # noqa: F811 - fixtures
    """NCCL sums in the order of the ranks here, as they do on the CPU."""
    found = {}
    for device in ("cpu", "cuda"):
        out = tmp_path / device
        more = ["--gpus", 2, "--device", device, "--dtype", "fp32", "--micro-batch", 1]
        ended = run(*arguments(model, data, out, *more))
        assert ended.code == 0, ended
        found[device] = losses(out)
    assert found["cuda"] == found["cpu"] and len(found["cpu"]) == 2


def test_a_build_without_a_device_says_so(model, data, tmp_path):  # noqa: F811 - fixtures
    command = arguments(model, data, tmp_path / "run", "--device", "cuda")
    ended = run(*command, SOFTCUDA_DEVICES="0")
    assert ended.code == 2 and "Traceback" not in ended.err
    assert re.search(r"built for cuda, but finds no device.*nvidia-smi.*--device cpu", ended.err)


def test_small_pieces_of_memory_serve_for_large_ones(model, data, tmp_path):  # noqa: F811 - fixtures
    """Expandable segments, set before torch is imported."""
    out = tmp_path / "run"
    ended = run(*arguments(model, data, out, "--device", "cuda"))
    assert ended.code == 0, ended
    code = (
        "from lohan.util.system import set_up_libraries as s; s(); import torch;"
        "torch.empty(2**21, dtype=torch.uint8, device='cuda');"
        "print(torch.cuda.memory_snapshot()[0]['is_expandable'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "True" and "deprecated" not in done.stderr, done
