"""`lohan simulate` and `lohan compare` as functions."""

from __future__ import annotations

import builtins
import json
from dataclasses import replace

import pytest

from lohan.cli import compare as compare
from lohan.cli.compare import describe_simulation, simulate_command
from lohan.config import TrainConfig, load_config
from lohan.errors import ConfigError
from lohan.planner import presets
from lohan.planner.machine_plan import plan_for_machine
from lohan.tools.plan_request import request_of

SERVER = presets.machine("ratel-4090")
GPT = presets.model("gpt-13b")


def test_simulation_result_is_json_with_trace(tmp_path):
    file = tmp_path / "trace.json"
    result = simulate_command(GPT, SERVER, "lohan", batch=16, seq=1024, trace=file)
    assert json.loads(json.dumps(result)) == result
    assert result["feasible"] and result["tokens_per_s"] == pytest.approx(16384 / result["step_s"])
    assert set(result["lane_busy_s"]) == {"compute", "h2d", "d2h", "ssd", "optimizer", "net"}
    assert set(result["peak_bytes"]) == {"device", "host", "ssd"}
    assert result["peak_bytes"]["ssd"] == 14 * GPT.parameters
    assert len(json.loads(file.read_text())["traceEvents"]) > 100


def test_describes_simulation_and_refusal_in_text():
    lines = describe_simulation(simulate_command(GPT, SERVER, "lohan", batch=16, seq=1024))
    assert lines[0].startswith("lohan: the paper as published")
    assert any(line.startswith("tokens/s") for line in lines)
    refused = describe_simulation(simulate_command(GPT, SERVER, "colossal-ai", batch=64, seq=1024))
    assert refused[-2] == "does not fit" and "device memory too small" in refused[-1]


def test_options_reach_the_policy():
    serial = simulate_command(GPT, SERVER, "lohan", batch=16, seq=1024, update_mode="serial")
    static = simulate_command(GPT, SERVER, "lohan", batch=64, seq=1024, activations="static")
    assert serial["step_s"] > 24 and static["kept_bytes"] == 2 * 64 * 1024 * 5120 * 40
    with pytest.raises(ConfigError, match="--activations: 'most'; choose holistic"):
        simulate_command(GPT, SERVER, "lohan", batch=16, seq=1024, activations="most")
    with pytest.raises(ConfigError, match="--update-mode: 'never'; choose serial"):
        simulate_command(GPT, SERVER, "lohan", batch=16, seq=1024, update_mode="never")


def test_auto_is_accepted_as_a_policy():
    result = simulate_command(GPT, SERVER, "auto", batch=8, seq=1024)
    assert result["feasible"] and result["step_s"] > 0
    tiny = replace(SERVER, host_bytes=10**9)
    refused = simulate_command(GPT, tiny, "auto", batch=8, seq=1024)
    assert not refused["feasible"] and "host" in refused["reason"]
    with pytest.raises(ConfigError, match="auto chooses activations itself"):
        simulate_command(GPT, SERVER, "auto", batch=8, seq=1024, activations="static")


def table(**changes):
    given = {"batches": [8, 32], "policies": ["lohan", "zero-offload"], "seq": 1024}
    return compare.compare_command(GPT, SERVER, **{**given, **changes})


def test_compares_policies_over_batches():
    result = table()
    assert (result["over"], result["at"]) == ("batch", [8, 32])
    assert result["policies"]["zero-offload"][1] is None and result["policies"]["lohan"][1] > 1000
    lines = compare.describe_comparison(result)
    assert lines[0] == "gpt-13b on ratel-4090: tokens/s"
    assert lines[2].split() == ["batch", "8", "batch", "32"]
    assert lines[4].split()[-1] == "-" and lines[-1].startswith("- zero-offload: device memory")


def test_compares_policies_over_host_memory_and_drives():
    hosts = table(batches=[8], hosts=[128 * 10**9, 512 * 10**9])
    assert hosts["fixed"] == {"batch": 8} and hosts["policies"]["zero-offload"][0] is None
    assert "128 GB" in compare.describe_comparison(hosts)[2]
    drives = table(batches=[8], ssds=[1, 2, 12], hosts=[256 * 10**9])
    speeds = drives["policies"]["lohan"]
    assert drives["over"] == "ssds" and speeds == sorted(speeds)
    assert "256 GB" in compare.title(drives)


def test_too_many_combinations_are_refused():
    with pytest.raises(ConfigError, match=r"--batch, --ssds: .* combinations, more than 64"):
        table(batches=[8, 16], ssds=list(range(1, 40)))
    with pytest.raises(ConfigError, match="at least one batch"):
        table(batches=[])


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_plots_comparison_to_image_file(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    file = tmp_path / f"table{suffix}"
    compare.plot(table(), file)
    content = file.read_bytes()
    assert len(content) > 5000 and content[:5] in (b"\x89PNG\r", b"<?xml")
    with pytest.raises(ConfigError, match=r"must end in \.png"):
        compare.plot(table(), tmp_path / "table.txt")


def test_plot_names_missing_matplotlib_extra(tmp_path, monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=r"pip install 'lohan\[plot\]'"):
        compare.plot(table(), tmp_path / "table.png")


def test_simulate_and_plan_agree():
    """The same settings, the defaults of both and of training, have one answer."""
    machine, model = presets.machine("rtx4090"), presets.model("gpt-13b")
    settings = load_config(None, overrides={"model": "gpt-13b", "data": ".", "out": "."})
    plan_request = request_of(model, machine, settings, "time")
    planned = plan_for_machine(plan_request)
    batch, seq = plan_request.batch, plan_request.seq
    result = simulate_command(model, machine, "auto", batch=batch, seq=seq)
    assert result["step_s"] == planned.forecast.step_s
    assert planned.plan.clip == plan_request.options.clip == TrainConfig.clip > 0
    assert planned.plan.log_gradients  # with a log, clipping costs nothing
    free = simulate_command(model, machine, "auto", batch=batch, seq=seq, clip=0.0)
    assert free["step_s"] == result["step_s"]
