"""Presets load with plausible figures, and a wrong name gets a suggestion."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from lohan.errors import ConfigError
from lohan.model.shapes import ModelShape
from lohan.planner import presets

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
}


@pytest.mark.parametrize("name", presets.model_names())
def test_a_model_has_about_the_size_in_its_name(name):
    shape = presets.model(name)
    assert isinstance(shape, ModelShape) and shape.name == name
    size = re.search(r"-([\d.]+)b", name)
    assert size is not None
    assert shape.parameters / 1e9 == pytest.approx(float(size[1]), rel=0.16)
    assert all(block == replace(shape.blocks[0], name=block.name) for block in shape.blocks)


@pytest.mark.parametrize("name", presets.machine_names())
def test_preset_machines_have_all_figures(name):
    machine = presets.machine(name)
    assert machine.name == name and machine.has_gpu
    assert machine.usd > 0 and machine.adam > 0 and machine.ssd_read >= machine.ssd_write > 0
    for drive in machine.drives:
        assert drive.bytes > 0 and drive.endurance_bytes > 100 * drive.bytes
    assert machine.flops_at(16384) > machine.flops_at(64) > 0


def test_paper_presets_have_published_sizes_and_prices():
    machine = presets.machine("ratel-4090")
    assert len(machine.drives) == 12 and machine.drives[0].bytes == 3_840_000_000_000
    assert (machine.host_bytes, machine.device_bytes) == (768 * 10**9, 24 * 2**30)
    assert machine.usd == 14_098 + 1_600 + 12 * 308
    others = presets.machine("ratel-4080"), presets.machine("ratel-3090")
    for other in others:
        server = {"h2d", "d2h", "adam", "drives", "ssd_limit", "host_bytes", "server_usd"}
        assert all(getattr(other, key) == getattr(machine, key) for key in server)
    assert presets.machine("dgx-a100").usd == 200_000
    assert presets.machine("dgx-a100").gpus == 8


def test_loads_model_from_config_file_or_folder(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    by_file, by_folder = presets.model(file), presets.model(str(tmp_path))
    assert by_file.blocks == by_folder.blocks and len(by_file.blocks) == 2
    assert by_folder.name == str(tmp_path)


def test_loads_machine_from_toml_file(tmp_path):
    machine = replace(presets.machine("rtx3090"), name="mine")
    file = tmp_path / "mine.toml"
    file.write_text(machine.to_toml())
    assert presets.machine(file) == machine


@pytest.mark.parametrize(
    ("find", "name", "message"),
    [
        (presets.model, "gpt-175", r"model 'gpt-175'.*did you mean gpt-175b.*lohan presets"),
        (presets.model, "zzzz", r"presets are gpt-1.55b, gpt-6b"),
        (presets.machine, "ratel4090", r"machine 'ratel4090'.*did you mean ratel-4090"),
        (presets.model, "nowhere/config.json", "no such file"),
        (presets.machine, "nowhere.toml", "nowhere.toml"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(find, name, message):
    with pytest.raises(ConfigError, match=message):
        find(name)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        presets.model(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="holds list"):
        presets.model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not readable as JSON"):
        presets.model(tmp_path)
