"""Profiles are measured once for a machine and its drives, and reused with what is free now."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lohan.device.base import CpuDevice
from lohan.device.emulated import EmulatedDevice
from lohan.engine import profile as profile_command
from lohan.engine.attach import machine_with
from lohan.engine.probes import profile
from lohan.engine.profile import (
    CPU,
    ComputePlace,
    cache_file,
    cached_profile,
    describe,
    latest_profile,
    run_profile,
)
from lohan.errors import ConfigError
from lohan.model.machine import Profile
from lohan.planner.presets import machine as machine_of
from lohan.util import memory
from tests.support.models import QUICK_EFFORT


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def ssd(tmp_path) -> Path:
    (tmp_path / "ssd").mkdir()
    return tmp_path / "ssd"


class Measure:
    """Measures the machine, and counts the measurements."""

    count = 0

    def __call__(self, folders) -> Profile:
        self.count += 1
        return profile(folders, effort=QUICK_EFFORT)


def test_second_profile_comes_from_the_cache(ssd):
    measure = Measure()
    first = cached_profile([ssd], measure=measure)
    again = cached_profile([ssd], measure=measure)
    assert measure.count == 1
    now = {"host_bytes": 0, "drives": ()}
    assert replace(again, **now) == replace(first, **now)
    assert again.drives[0].read == first.drives[0].read
    cached_profile([ssd], measure=measure, fresh=True)
    assert measure.count == 2


def test_a_profile_of_another_number_of_drives_is_measured_again(ssd):
    first = cached_profile([ssd], measure=Measure())
    file = profile_command.cache_file([ssd])
    file.write_text(replace(first, drives=first.drives * 2).to_toml())
    measure = Measure()
    assert len(cached_profile([ssd], measure=measure).drives) == 1 and measure.count == 1


def test_latest_profile_ignores_other_formats(ssd, monkeypatch):
    assert latest_profile() is None
    with monkeypatch.context() as before:
        before.setattr(profile_command, "PREFIX", "machine-1-")
        cached_profile([ssd], measure=Measure())
    assert latest_profile() is None
    profile = cached_profile([ssd], measure=Measure())
    latest = latest_profile()
    assert latest is not None and latest.adam == profile.adam


def test_caches_one_profile_per_device(ssd):
    measure = Measure()
    links = [
        ComputePlace("emulated", 2**30, 1e9),
        ComputePlace("emulated", 2**29, 2e9),
        ComputePlace("accelerator"),
    ]
    for where in (CPU, *links):
        cached_profile([ssd], place=where, measure=measure)
    assert measure.count == 4
    # memory is free
    cached_profile([ssd], place=ComputePlace("emulated", 2**29, 1e9), measure=measure)
    assert measure.count == 4


def test_plan_uses_the_rate_of_an_emulated_link():
    preset = machine_of("ratel-4090")
    device = EmulatedDevice(2**20, h2d=2e9, d2h=1e9)
    profile = machine_with(device, preset)
    device.close()
    assert (profile.h2d, profile.d2h, profile.device_bytes) == (2e9, 1e9, 2**20)
    assert machine_with(CpuDevice(), preset) is None, "a GPU's speed says nothing of the cpu's"


def test_free_memory_is_looked_up_each_time(ssd, monkeypatch):
    measure = Measure()
    cached_profile([ssd], measure=measure)
    monkeypatch.setattr(profile_command, "host_memory_bytes", lambda: 12345)
    assert cached_profile([ssd], measure=measure).host_bytes == 12345
    assert memory.host_memory_bytes() != 12345


def test_another_folder_of_the_same_drive_has_the_same_figures(ssd):
    measure = Measure()
    cached_profile([ssd], measure=measure)
    other = ssd / "deeper"
    other.mkdir()
    actual = cached_profile([other], measure=measure)
    assert measure.count == 1 and actual.drives[0].name == str(other)
    cached_profile([ssd, other], measure=measure)
    assert measure.count == 2


@pytest.mark.parametrize("damage", ["", "name = ", "[drives]", 'adam = "x"'])
def test_a_damaged_cache_is_measured_anew(ssd, damage):
    measure = Measure()
    cached_profile([ssd], measure=measure)
    cache_file([ssd]).write_text(damage)
    assert cached_profile([ssd], measure=measure).adam > 0
    assert measure.count == 2


def test_unwritable_profile_cache_is_ignored(ssd, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cached_profile([ssd], measure=Measure()).adam > 0


def test_profile_depends_on_the_number_of_threads(ssd, monkeypatch):
    file = cache_file([ssd])
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    assert cache_file([ssd]) != file


def test_the_command_writes_a_file_that_can_be_used(ssd, tmp_path):
    out = tmp_path / "machine.toml"
    text = run_profile([ssd], out=out, measure=Measure())
    assert str(ssd) in text and "AdamW" in text
    assert machine_of(out).drives[0].name == str(ssd)
    data = json.loads(run_profile([ssd], as_json=True, measure=Measure()))
    assert data["drives"][0]["read"] > 0 and len(data["compute"]) == 2


def test_rejects_missing_and_unwritable_places(ssd, tmp_path):
    with pytest.raises(ConfigError, match="nowhere: no such folder"):
        cached_profile([tmp_path / "nowhere"], measure=Measure())
    with pytest.raises(ConfigError, match="choose another -o"):
        run_profile([ssd], out=tmp_path / "no" / "m.toml", measure=Measure())


def test_describes_drive_and_ssd_limit_of_a_preset():
    machine = replace(machine_of("ratel-4090"), ssd_limit=12.5e9)
    text = "\n".join(describe(machine))
    assert "p5510" in text and "12.50 GB/s at most" in text


def test_the_command_measures_at_the_width_of_a_model(ssd, lohan, monkeypatch):
    """Through the whole command, with a smaller effort."""
    requests = []

    def tiny(device, model=None):
        requests.append(model)
        return QUICK_EFFORT

    monkeypatch.setattr("lohan.engine.probes.effort_for", tiny)
    ended = lohan("profile", "--ssd", ssd, "--device", "cpu", "--model", "llama-3-8b")
    assert ended.code == 0, ended
    assert requests[0].hidden == 4096
    assert f"a block of {QUICK_EFFORT.sizes.hidden} features" in ended.out
    refused = lohan("profile", "--ssd", ssd, "--device", "cpu", "--model", "lama-3-8b")
    assert refused.code == 2 and "llama-3-8b" in refused.err
