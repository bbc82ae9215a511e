"""The profiler measures through real parts, cleans up after itself, and reports its progress.

The figures depend on the machine. They are compared with each other or with another count of the
same thing, never with a clock.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lohan.device.base import CpuDevice
from lohan.device.emulated import EmulatedDevice
from lohan.engine.probes import (
    BlockProbe,
    Sizes,
    bus_rate,
    busy_links,
    effort_for,
    end,
    opened,
    profile,
    requests,
    under_load,
)
from lohan.errors import ConfigError, LohanError, StoreError
from lohan.model.shapes import gpt_shape
from lohan.planner import presets
from lohan.util.units import GiB, MiB
from tests.support.models import PROBE_SIZES, QUICK_EFFORT


def test_a_profile_has_every_figure_and_leaves_nothing_behind(tmp_path):
    seen: list[tuple[str, int, int]] = []
    result = profile([tmp_path], progress=lambda *step: seen.append(step), effort=QUICK_EFFORT)
    assert [tokens for tokens, _ in result.compute] == [4, 16]
    assert [tokens for tokens, _ in result.backward] == [4, 16]
    figures = [rate for _, rate in (*result.compute, *result.backward)]
    figures += [result.head_flops, result.adam, result.action_s, result.commit_s, result.host_bytes]
    assert all(figure > 0 for figure in figures)
    (drive,) = result.drives
    assert drive.name == str(tmp_path) and drive.bytes > 0
    assert min(drive.read, drive.write, drive.mixed) > 0
    assert 0 <= result.io_share < 1 and 0 <= result.compute_share < 1 and result.ssd_limit == 0
    assert not result.has_link and result.device == "cpu"
    assert list(tmp_path.iterdir()) == []
    for task in {task for task, _, _ in seen}:
        counts = [(done, total) for name, done, total in seen if name == task]
        assert counts == [(done, counts[0][1]) for done in range(counts[0][1] + 1)]


def test_device_is_measured_through_its_interface(tmp_path):
    """The measured compute and link rates of a device are those that it was given.

    A link makes up for 2 ms at most, a twentieth of what these copies take.
    """
    device = EmulatedDevice(256 * MiB, h2d=2e8, d2h=1e8, flops=1e9)
    try:
        result = profile(
            [tmp_path], effort=replace(QUICK_EFFORT, link_bytes=8 * MiB), device=device
        )
    finally:
        device.close()
    assert result.device == "emulated" and result.has_link
    assert result.device_bytes == 256 * MiB and result.io_share == 0
    assert 0 < result.h2d <= 2e8 * 1.1 and 0 < result.d2h <= 1e8 * 1.1
    assert result.host_rate > 0
    rates = [rate for _, rate in (*result.compute, *result.backward)]
    assert all(0 < rate <= 1.1e9 for rate in (*rates, result.head_flops))
    assert device.memory.peak <= 256 * MiB


def test_folders_of_one_drive_do_not_add_up(tmp_path):
    """Two folders of one drive: together they reach a finite rate, or no limit is claimed."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    result = profile(folders, effort=QUICK_EFFORT)
    assert [drive.name for drive in result.drives] == list(map(str, folders))
    assert result.ssd_limit < sum(drive.mixed for drive in result.drives)


def test_profiles_a_machine_without_drives():
    result = profile([], effort=QUICK_EFFORT)
    assert result.drives == () and result.io_share == 0 and result.ssd_limit == 0


def test_a_slow_machine_measures_fewer_points():
    result = profile([], effort=replace(QUICK_EFFORT, compute_seconds=0.0))
    assert [tokens for tokens, _ in result.compute] == [4]


@pytest.mark.parametrize("fits", [8, 0])
def test_blocks_that_the_device_cannot_hold_are_left_out(fits, monkeypatch):
    """A quick machine gets to more tokens than a small device has memory for."""
    forward_s = BlockProbe.forward_s

    def limited(probe: BlockProbe, tokens: int) -> float:
        if tokens > fits:
            raise torch.OutOfMemoryError("no room")
        return forward_s(probe, tokens)

    monkeypatch.setattr(BlockProbe, "forward_s", limited)
    if fits:
        result = profile([], effort=QUICK_EFFORT)
        assert [tokens for tokens, _ in result.compute] == [4]
        assert [tokens for tokens, _ in result.backward] == [4]
    else:
        with pytest.raises(LohanError, match=r"4 tokens does not fit into .* --device-memory"):
            profile([], effort=QUICK_EFFORT)


def test_a_probe_that_does_not_end_is_an_error(monkeypatch):
    monkeypatch.setattr("lohan.engine.probes.PROBE_END_S", 0.01)
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait, name="drive probe", daemon=True)
    thread.start()
    with pytest.raises(LohanError, match="the drive probe has not ended after"):
        end(thread)
    go_on.set()


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere: no such folder"):
        profile([tmp_path / "nowhere"], effort=QUICK_EFFORT)


def test_a_drive_without_room_is_refused_and_left_clean(tmp_path):
    effort = replace(QUICK_EFFORT, drive_bytes=3 * 2**50, chunk_bytes=2**50)
    with pytest.raises(StoreError, match=r"the store needs 6144\.00 TiB .* are free there"):
        profile([tmp_path], effort=effort)
    assert list(tmp_path.iterdir()) == []


def test_flops_of_the_probe_block_equal_those_executed():
    sizes = Sizes(hidden=512, inner=1408, heads=8, vocabulary=96, copies=1)
    probe = BlockProbe(sizes)
    with FlopCounterMode(display=False) as counter:
        probe.forward_s(4)
    assert counter.get_total_flops() == pytest.approx(probe.flops(4), rel=0.02)
    with FlopCounterMode(display=False) as counter:
        probe.backward_s(4)
    # forward once, backward twice as much
    assert counter.get_total_flops() == pytest.approx(3 * probe.flops(4), rel=0.02)


def test_the_block_is_causal():
    """A later token changes nothing before it: the attention is that of a language model."""
    probe = BlockProbe(PROBE_SIZES)
    weights = next(probe._weights)
    x = torch.randn(1, 6, PROBE_SIZES.hidden)
    changed = x.clone()
    changed[0, -1] += 1
    before, after = probe.run(x, weights), probe.run(changed, weights)
    torch.testing.assert_close(before[:, :-1], after[:, :-1])
    assert not torch.allclose(before[:, -1], after[:, -1])


def test_mixed_drive_probe_reads_and_writes_in_the_ratio_of_a_step():
    """In fp32, a step reads 16 bytes and writes 12 bytes per parameter."""
    verbs = [verb for verb, _ in requests("mixed", 12)]
    assert verbs.count("read") * 12 == verbs.count("write") * 16
    for kind in ("read", "write", "mixed"):
        written = [index for verb, index in requests(kind, 12) if verb == "write"]
        assert sorted(written) == ([] if kind == "read" else list(range(12)))


def test_busy_context_keeps_the_drives_working(tmp_path):
    with opened([tmp_path], total_bytes=MiB, chunk_bytes=MiB // 4) as probe:
        moved = probe._moved()
        with probe.busy("mixed"):
            pass
        assert probe._moved() > moved


def test_error_of_a_background_probe_is_raised(tmp_path):
    with opened([tmp_path], total_bytes=MiB, chunk_bytes=MiB // 4) as probe:
        probe.close()
        with pytest.raises(StoreError, match="closed"), probe.busy("mixed"):
            pass


def test_a_large_card_is_measured_at_the_width_of_its_models(monkeypatch):
    card = CpuDevice()
    card.torch_device = torch.device("meta")  # stands for one
    for memory, hidden in ((4 * GiB, 1024), (24 * GiB, 4096)):
        monkeypatch.setattr(card, "memory_bytes", lambda memory=memory: memory, raising=False)
        assert effort_for(card).sizes.hidden == hidden
    assert effort_for(CpuDevice()).sizes.hidden == 1024


def test_main_memory_is_what_slows_down_under_load():
    alone = 50e9, 20e9  # both links, and updates
    assert bus_rate(60e9, alone, (50e9, 20e9)) == 70e9  # nothing is slower: at least as much
    assert bus_rate(90e9, alone, (50e9, 20e9)) == 90e9  # a copy has shown more
    assert bus_rate(90e9, alone, (50e9, 12e9)) == 62e9  # updates had to wait for it
    assert bus_rate(90e9, alone, (30e9, 20e9)) == 50e9  # or copies had


def test_both_links_are_busy_while_updates_run():
    device = EmulatedDevice(64 * MiB, h2d=1e9, d2h=1e9)
    try:
        alone, shared = under_load(device, PROBE_SIZES, size=MiB, seconds=0.02)
        with busy_links(device, size=MiB) as moved:
            while moved() < 3 * MiB:
                time.sleep(0.001)
    finally:
        device.close()
    assert alone[1] > 0 and shared[1] > 0 and min(alone[0], shared[0]) >= 0


def test_raises_the_error_of_a_link_that_fails_during_a_probe():
    device = EmulatedDevice(64 * MiB)
    device.copy = lambda *_, **__: 1 / 0
    with pytest.raises(ZeroDivisionError), busy_links(device, size=MiB):
        pass
    device.close()


def test_blocks_are_as_wide_as_those_of_the_model():
    model = presets.model("llama-3-8b")
    sizes = Sizes.of(model)
    assert (sizes.hidden, sizes.heads, sizes.vocabulary) == (4096, 32, 128256)
    probe_flops = 2 * (4 * sizes.hidden**2 + 3 * sizes.hidden * sizes.inner)
    assert probe_flops == pytest.approx(model.blocks[0].flops, rel=1e-3)
    small = gpt_shape(2, 4, 64, vocabulary=96, positions=64)
    result = profile([], model=small, effort=replace(QUICK_EFFORT, sizes=Sizes.of(small)))
    assert result.block_width == 64
    with pytest.raises(ConfigError, match=r"llama-3-8b.*more than half of .*leave --model out"):
        effort_for(EmulatedDevice(256 * MiB), model)
    assert effort_for(EmulatedDevice(4 * GiB), model).sizes.copies == 1
