"""A profile round-trips, interpolates, and refuses what it cannot read by name."""

from __future__ import annotations

import tomllib

import pytest

from lohan.errors import ConfigError
from lohan.model.machine import Drive, Profile

GOOD = {
    "name": 'desk "two"',
    "device": "RTX 3090",
    "device_bytes": "24GiB",
    "compute": [[256, 30e12], [1024, 50e12]],
    "host_bytes": "128GB",
    "adam": 1e9,
    "drives": [{"name": "a", "read": 7e9, "write": 2e9, "bytes": "2TB"}],
}


def read(**changes: object) -> Profile:
    return Profile.from_mapping({**GOOD, **changes}, source="desk.toml")


def test_round_trips_through_toml(tmp_path):
    profile = read(backward=[[64, 1.5e12]], ssd_limit=9.25e9, gpus=2)
    assert profile.device_bytes == 24 * 2**30 and profile.drives[0].bytes == 2 * 10**12
    file = tmp_path / "desk.toml"
    file.write_text(profile.to_toml())
    assert Profile.read(file) == profile
    assert Profile.from_mapping(tomllib.loads(profile.to_toml()), source="x") == profile


def test_compute_between_below_and_above_its_points():
    profile = read()
    assert profile.flops_at(640) == 40e12
    assert profile.flops_at(128) == 15e12
    assert profile.flops_at(4096) == 50e12
    assert read(compute=[[256, 30e12]]).flops_at(1) == 30e12


def test_backward_is_as_forward_unless_measured():
    assert read().backward_flops_at(640) == 40e12
    assert read(backward=[[256, 10e12], [1024, 30e12]]).backward_flops_at(640) == 20e12


def test_drives_add_up_to_the_limit_and_no_further():
    profile = read(ssd_limit=10e9).with_drives(3)
    assert (profile.ssd_read, profile.ssd_write) == (10e9, 6e9)
    assert read().with_drives(3).ssd_read == 21e9
    with pytest.raises(ConfigError, match="no drive"):
        read(drives=[]).with_drives(2)


def test_price_is_the_sum_of_the_parts():
    profile = read(
        server_usd=1000,
        gpu_usd=500,
        gpus=2,
        drives=[{"name": "a", "read": 1, "write": 1, "usd": 100}] * 3,
    )
    assert profile.usd == 2300
    assert profile.drives[0] == Drive(name="a", read=1.0, write=1.0, usd=100.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adm": 1}, "desk.toml: unknown key 'adm'; did you mean adam"),
        ({"qqqqqqqq": 1}, "the keys are name, device"),
        ({"adam": "fast"}, "adam: got text"),
        ({"adam": -1}, "adam"),
        ({"adam": float("nan")}, "adam"),
        ({"adam": True}, "adam"),
        ({"adam": 0}, "adam: got 0, wants a number above 0"),
        ({"gpus": 0}, "gpus: got 0"),
        ({"gpus": 1.5}, "gpus: got 1.5, wants a whole number"),
        ({"drives": [{"name": "a", "read": 0, "write": 1e9}]}, "drive: read: got 0"),
        ({"io_share": 1.0}, "io_share: got 1.0.*less than 1"),
        ({"compute_share": 1.5}, "compute_share: got 1.5.*less than 1"),
        ({"name": 3}, "name"),
        ({"host_bytes": "much"}, "host_bytes"),
        ({"compute": []}, "compute"),
        ({"compute": [[1024, 1e12], [256, 2e12]]}, "rising"),
        ({"compute": [[256]]}, "compute"),
        ({"compute": 1e12}, "compute"),
        ({"drives": {"name": "a"}}, "drives"),
        ({"drives": [{"name": "a", "read": 1e9}]}, "drive: write is missing"),
        ({"drives": [{"name": "a", "read": 1e9, "wrote": 1e9}]}, "did you mean write"),
    ],
)
def test_rejects_wrong_values_by_key(changes, message):
    with pytest.raises(ConfigError, match=message):
        read(**changes)


def test_rejects_missing_key():
    data = {key: value for key, value in GOOD.items() if key != "compute"}
    with pytest.raises(ConfigError, match="compute is missing"):
        Profile.from_mapping(data, source="x")


def test_a_file_that_is_not_toml_is_named(tmp_path):
    file = tmp_path / "machine.toml"
    for text in (None, "a = [", b"\xff\xfe"):
        if text is not None:
            file.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(ConfigError, match=r"machine\.toml"):
            Profile.read(file)
