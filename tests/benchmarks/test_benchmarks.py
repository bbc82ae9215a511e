"""Every benchmark runs in its smallest form and prints its tables; the figures are not tested."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import HANG_S

ROOT = Path(__file__).resolve().parents[2]
SHAPE = {"hidden": 32, "layers": 2, "intermediate": 64, "vocabulary": 128, "heads": 2}
TINY = [word for name, value in SHAPE.items() for word in (f"--{name}", str(value))]


def bench(name: str, work: Path, *args: str) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / name), "--work", str(work), *args],
        env={**os.environ, "PYTHONPATH": ":".join(paths)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )


def columns(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


@pytest.mark.slow
def test_step_prints_ratios_and_equal_losses(tmp_path: Path) -> None:
    run = bench(
        "step.py",
        tmp_path,
        *TINY,
        "--batch",
        "1",
        "--tokens",
        "8",
        "--host",
        "64MiB",
        "--rounds",
        "1",
        "--steps",
        "2",
        "--warmup",
        "1",
    )
    assert run.returncode == 0, run.stderr
    for word in ("machine", "drive", "versions", "command", "model", "settings"):
        assert re.search(rf"^{word} ", run.stdout, flags=re.M), word
    lines = run.stdout.splitlines()
    table = lines[lines.index("8 tokens") + 1 :]
    assert columns(table[0])[:4] == ["side", "step s", "all steps", "/ checkpointing"]
    sides = [columns(line) for line in table[2:5]]
    assert [side[0] for side in sides] == [
        "PyTorch in memory, checkpointing",
        "PyTorch in memory",
        "LoHan 64MiB, balanced",
    ]
    assert all(float(side[-1]) < 1e-5 for side in sides), "losses differ"
    lanes = lines[lines.index("8 tokens, lanes") + 1]
    assert "ssd busy" in lanes and "binding" in lanes
    assert list(tmp_path.iterdir()) == []


def test_growth_prices_plans_and_steps_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import growth

    plan = growth.plan_cost(2, 1)
    assert plan["blocks"] == 2 and plan["schedule and simulation"] > 0 and plan["whole plan s"] > 0
    rows = [growth.run_cost(blocks, 1, tmp_path) for blocks in (1, 2)]
    assert rows[1]["tensors"] == 2 and rows[1]["attach ms"] > 0 and rows[1]["step ms"] > 0
    first, second = growth.per_each(rows, "blocks")
    assert first["step ms"] == rows[0]["step ms"]
    assert second["step ms"] == rows[1]["step ms"] - rows[0]["step ms"]


def test_imports_every_benchmark_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts and their sides can be imported; the slow tier tests what they do."""
    for folder in (ROOT / "benchmarks", ROOT / "benchmarks" / "paper"):
        monkeypatch.syspath_prepend(str(folder))
        scripts = sorted(folder.glob("*.py"))
        for path in scripts:
            runpy.run_path(str(path), run_name=path.stem)
        for path in scripts:  # some are called like a module of another folder
            if path.stem not in sys.stdlib_module_names:
                sys.modules.pop(path.stem, None)


@pytest.mark.slow
def test_launch_counts_every_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only the parts are tested, in this process, not their duration."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import launch

    result = launch.measured(tmp_path / "run", "all", 2, 6)
    assert result["lohan"] > 0 and result["checkpoint"] > 0 and result["limit"] == 2.0
    assert all(result[part] > 0 for part in launch.PARTS), result


@pytest.mark.slow
def test_adam_prints_ns_per_parameter(tmp_path: Path) -> None:
    run = bench(
        "adam.py",
        tmp_path,
        "--parameters",
        "64Ki",
        "--chunks",
        "16Ki",
        "--rounds",
        "2",
        "--threads",
        "1",
        "--json",
    )
    assert run.returncode == 0, run.stderr
    tables: dict[str, Any] = json.loads(run.stdout)["tables"]
    rows = tables["1 thread"]
    assert [row["mode"] for row in rows] == ["fp32", "bf16", "fp16"]
    for row in rows:
        assert row["lohan ns"] > 0 and row["speed / torch"] > 0 and 0 < row["of roof"] <= 1


@pytest.mark.slow
def test_checksum_prints_core_time(tmp_path: Path) -> None:
    run = bench(
        "checksum.py", tmp_path, "--chunk", "32Ki", "--rounds", "2", "--threads", "1", "--json"
    )
    assert run.returncode == 0, run.stderr
    rows = json.loads(run.stdout)["tables"]["core time, ns per parameter"]
    assert [(row["weights"], row["moments"]) for row in rows] == [
        ("bf16", "fp32"),
        ("bf16", "int8"),
        ("fp32", "fp32"),
    ]
    assert all(row["in one ns"] > 0 and row["apart ns"] > 0 for row in rows)


def test_io_prints_rates(tmp_path: Path) -> None:
    run = bench(
        "io.py",
        tmp_path,
        "--size",
        "8MiB",
        "--chunks",
        "1MiB",
        "--rounds",
        "1",
        "--seconds",
        "0.01",
        "--json",
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert list(report["tables"]) == ["read", "write", "mixed"]
    with_fio = not report["facts"]["fio"].startswith("skipped")
    for rows in report["tables"].values():
        assert len(rows) == (3 if with_fio else 1)
        assert all(row["GB/s"] > 0 for row in rows)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_activations_predicts_and_measures_every_policy(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    work = tmp_path / "work"
    run = bench(
        "activations.py",
        work,
        *TINY,
        "--tokens",
        "32",
        "--host",
        "64MiB",
        "--rounds",
        "2",
        "--policies",
        "static",
        "checkmate",
        "g10",
        "--log",
        str(tmp_path / "log.jsonl"),
        "--json",
    )
    assert run.returncode == 0, run.stderr
    rows = json.loads(run.stdout)["tables"]["32 tokens, 64MiB"]
    assert [row["policy"] for row in rows] == ["static", "checkmate", "g10"]
    assert all(row["step s"] > 0 and row["predicted s"] > 0 for row in rows)
    assert len({row["loss first .. last"] for row in rows}) == 1
    assert rows[0]["speed / static"] == 1 and rows[1]["speed / static"] > 0
    assert rows[2]["on SSD MiB"] > 0 and rows[1]["kept MiB"] > rows[0]["kept MiB"]
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 3
    assert list(work.iterdir()) == []


@pytest.mark.slow
def test_forecast_compares_with_profiles_before_and_after(tmp_path: Path) -> None:
    run = bench(
        "forecast.py",
        tmp_path,
        *TINY,
        "--tokens",
        "8",
        "32",
        "--host",
        "64MiB",
        "--rounds",
        "1",
        "--steps",
        "2",
        "--json",
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("profiling the machine") == 3
    rows = json.loads(run.stdout)["tables"]["predicted and measured"]
    assert [row["setting"] for row in rows] == ["64MiB, 8 tokens", "64MiB, 32 tokens"]
    for row in rows:
        ratio = row["predicted s"] / row["measured s"]
        assert row["predicted / measured"] == pytest.approx(ratio) and ratio > 0
        assert row["rounds"] == f"{ratio:.2f} .. {ratio:.2f}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_swapped_bytes_draws_a_curve(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    work = tmp_path / "work"
    run = bench(
        "swapped_bytes.py",
        work,
        *TINY,
        "--batch",
        "2",
        "--tokens",
        "16",
        "--host",
        "32MiB",
        "--device-memory",
        "64",
        "--seconds",
        "0.05",
        "--steps",
        "1",
        "--warmup",
        "2",
        "--points",
        "3",
        "--plot",
        str(tmp_path / "curve.png"),
        "--json",
    )
    assert run.returncode == 0, run.stderr
    (curve,) = json.loads(run.stdout)["tables"].values()
    assert curve[0]["swapped MiB"] < curve[-1]["swapped MiB"] and curve[0]["step / first"] == 1
    assert len({row["loss first .. last"] for row in curve}) == 1
    assert (tmp_path / "curve.png").stat().st_size > 0
    assert list(work.iterdir()) == []


@pytest.mark.slow
def test_emulated_predicts_and_measures(tmp_path: Path) -> None:
    run = bench(
        "emulated.py",
        tmp_path,
        *TINY,
        "--batch",
        "2",
        "--tokens",
        "16",
        "--host",
        "32MiB",
        "--device-memory",
        "64",
        "--seconds",
        "0.05",
        "--steps",
        "1",
        "--warmup",
        "2",
        "--modes",
        "balanced",
        "--json",
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    (rows,) = report["tables"].values()
    (row,) = rows
    assert row["updates"] == "balanced" and row["measured s"] > 0 and row["predicted s"] > 0
    assert "GFLOP/s" in report["facts"]["rates"] and "link" in report["facts"]["measured"]
    assert {f"{lane} busy" for lane in ("compute", "h2d", "d2h", "ssd", "optimizer")} <= set(row)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_defaults_against_no_clipping(tmp_path: Path) -> None:
    run = bench(
        "defaults.py",
        tmp_path,
        *TINY,
        "--batch",
        "2",
        "--tokens",
        "16",
        "--share",
        "50",
        "--device-memory",
        "64",
        "--seconds",
        "0.05",
        "--steps",
        "1",
        "--warmup",
        "2",
        "--models-there",
        "qwen3-14b",
        "--json",
    )
    assert run.returncode == 0, run.stderr
    (rows,) = json.loads(run.stdout)["tables"].values()
    assert [row["settings"] for row in rows] == [
        "default, no step clipped",
        "default, every step clipped",
        "--clip 0",
    ]
    assert rows[0]["loss"] == rows[2]["loss"] != rows[1]["loss"]  # a limit that is never reached
    assert not rows[0]["rolled_back"] and not rows[1]["speculated"]
    assert rows[1]["there / last"] <= rows[0]["there / last"]


@pytest.mark.slow
def test_commit_intervals_write_less(tmp_path: Path) -> None:
    run = bench(
        "defaults.py",
        tmp_path,
        *TINY,
        "--batch",
        "2",
        "--tokens",
        "16",
        "--share",
        "150",
        "--device-memory",
        "64",
        "--seconds",
        "0.05",
        "--models-there",
        "qwen3-8b",
        "--sides",
        "commits",
        "--json",
    )
    assert run.returncode == 0, run.stderr
    (rows,) = json.loads(run.stdout)["tables"].values()
    assert rows[2]["settings"] == "--commit-every 4"
    assert rows[2]["written MiB"] < rows[-1]["written MiB"]
    assert len({row["loss"] for row in rows}) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_memory_prints_the_peak(tmp_path: Path) -> None:
    run = bench(
        "memory.py",
        tmp_path,
        *TINY,
        "--kv-heads",
        "2",
        "--host",
        "64MiB",
        "--limit",
        "2GiB",
        "--seq",
        "8",
        "--no-cgroup",
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"peak VmHWM .* ok$", run.stdout, flags=re.M)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="deepspeed is here")
def test_the_peer_is_asked_for_by_name(tmp_path: Path) -> None:
    run = bench("vs_zero_infinity.py", tmp_path)
    assert run.returncode == 2
    assert "--peer-python" in run.stderr and "pip install" in run.stderr


@pytest.mark.slow
def test_verify_fails_with_each_silent_bug(tmp_path: Path) -> None:
    rows = json.loads(bench("silent_bugs.py", tmp_path, "--json").stdout)
    healthy, *planted = rows
    assert healthy["pass"] and healthy["wrong_tensors"] == 0
    for row in planted:
        assert not row["pass"] and row["wrong_tensors"] > row["tensors"] // 2
        # The losses show nothing: the first is right, and the last is far below it.
        assert row["first_loss"] == healthy["first_loss"]
        assert row["last_loss"] < 0.7 * row["first_loss"]
    assert list(tmp_path.iterdir()) == []
