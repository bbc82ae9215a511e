"""`lohan doctor` checks the machine and suggests remedies for what it finds."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from lohan.errors import StorageIOError
from lohan.store.io_engine import open_engine
from lohan.tools import doctor
from lohan.tools.doctor import OK, PROBLEM, WARNING, Finding, describe, passed
from lohan.util import drives
from lohan.util.drives import DriveFacts, Health, drives_of, mount_of, nearest_mount, read_health
from lohan.util.units import GiB
from tests.support.stores import MemoryEngine
from tests.support.training_runs import modification_times

MEMORY = Path("/dev/shm")


def states(findings: list[Finding]) -> dict[str, str]:
    return {finding.text: finding.state for finding in findings}


# -- the command ----------------------------------------------------------------------------------


def test_doctor_reports_every_subject_and_writes_nothing(lohan, tmp_path):
    ended = lohan("doctor", "--ssd", tmp_path)
    assert ended.code == 0, ended
    assert "a run can start here" in ended.out
    for subject in ("python", "torch", "native core", "device", "memory", "locked memory"):
        assert subject in ended.out
    assert f"{tmp_path}" in ended.out and " free, room for " in ended.out
    assert modification_times(tmp_path) == {}


def test_json_output_names_every_finding(lohan, tmp_path):
    ended = lohan("doctor", "--ssd", tmp_path, "--ssd", tmp_path / "none", "--json")
    assert ended.code == 1
    loaded = json.loads(ended.out)
    assert loaded["ok"] is False
    wrong = [finding for finding in loaded["findings"] if finding["state"] == "problem"]
    assert [(each["subject"], each["text"]) for each in wrong] == [
        (str(tmp_path / "none"), "no such folder")
    ]
    assert all(f["advice"] for f in loaded["findings"] if f["state"] != "ok")


# -- drives ---------------------------------------------------------------------------------------


@pytest.mark.skipif(not MEMORY.is_dir(), reason="no tmpfs at /dev/shm")
def test_warns_of_ssd_folder_in_memory():
    actual = doctor.check_ssd(MEMORY)
    assert any(f.state == WARNING and "lies in memory" in f.text for f in actual)


def test_reports_ssd_folder_that_is_not_writable():
    actual = doctor.check_ssd(Path("/proc"))
    assert actual[-1].state == PROBLEM and "cannot be written to" in actual[-1].text


def test_warns_of_two_folders_on_one_drive(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (shared,) = doctor.check_shared([tmp_path / "a", tmp_path / "b"])
    assert shared.state == WARNING and str(tmp_path / "a") in shared.text
    assert list(doctor.check_shared([tmp_path / "a"])) == []


def test_without_io_uring(tmp_path, monkeypatch):
    def refusing(kind: str):
        if kind == "uring":
            raise StorageIOError("io_uring_setup failed: EPERM")
        return open_engine(kind)

    monkeypatch.setattr(doctor, "open_engine", refusing)
    actual = [f for f in doctor.check_ssd(tmp_path) if "io_uring" in f.text]
    assert [f.state for f in actual] == [WARNING]
    assert "threads are used instead" in actual[0].text and actual[0].advice


def test_without_direct_io(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "open_engine", lambda kind: MemoryEngine())
    assert states(doctor.check_ssd(tmp_path))["the file system refuses O_DIRECT"] == WARNING


def test_bytes_that_change(tmp_path, monkeypatch):
    class Lying(MemoryEngine):
        def read(self, file, offset, buffer):
            self.files[self._paths[file]][0] ^= 1
            return super().read(file, offset, buffer)

    monkeypatch.setattr(doctor, "open_engine", lambda kind: Lying())
    assert any(
        f.state == PROBLEM and "other bytes came back" in f.text for f in doctor.check_ssd(tmp_path)
    )


@pytest.mark.parametrize(
    ("kind", "state", "word"),
    [
        ("ext4", OK, "ext4"),
        ("xfs", OK, "xfs"),
        ("tmpfs", WARNING, "memory"),
        ("nfs4", WARNING, "network"),
        ("9p", WARNING, "network"),
        ("overlay", WARNING, "container"),
        ("btrfs", WARNING, "copies"),
    ],
)
def test_kinds_of_file_systems(kind, state, word, tmp_path, monkeypatch):
    mount = drives.Mount(kind, "/dev/x", "/")
    monkeypatch.setattr(doctor, "mount_of", lambda path: mount)
    actual = doctor._kind(tmp_path)
    assert actual.state == state and word in actual.text


def test_finds_the_mount_of_a_folder():
    lines = [
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw",
        "30 22 0:5 / /data rw - tmpfs tmpfs rw",
        "31 22 259:1 / /data/my\\040disk rw - xfs /dev/nvme0n1p1 rw",
        "32 22 0:9 / /data/my\\040disk rw - nfs4 host:/x rw",
        "broken",
    ]
    kind = {
        path: nearest_mount(Path(path), lines).kind
        for path in ("/", "/home/x", "/data", "/database", "/data/my disk/run")
    }
    assert kind == {
        "/": "ext4",
        "/home/x": "ext4",
        "/data": "tmpfs",
        "/database": "ext4",
        "/data/my disk/run": "nfs4",
    }
    assert nearest_mount(Path("/x"), []) is None


def test_finds_block_device_of_folder(tmp_path):
    """Any drive can be queried; the facts come from the kernel."""
    assert mount_of(tmp_path) is not None
    for drive in drives_of(tmp_path):
        assert (Path("/sys/class/block") / drive.name).exists()


def test_partitions_and_volumes(tmp_path, monkeypatch):
    disk = tmp_path / "devices" / "nvme7n1"
    part = disk / "nvme7n1p2"
    (disk / "queue").mkdir(parents=True)
    (disk / "device").mkdir()
    (disk / "queue" / "rotational").write_text("0\n")
    (disk / "device" / "model").write_text("Good Drive 2TB  \n")
    part.mkdir()
    (part / "partition").write_text("2\n")
    volume = tmp_path / "devices" / "dm-0"
    (volume / "slaves").mkdir(parents=True)
    (volume / "slaves" / "nvme7n1p2").symlink_to(part)
    assert drives._disks(volume) == {disk}
    assert drives._disks(part) == {disk}
    facts = drives.facts_of(disk)
    assert (facts.model, facts.rotating, facts.health) == ("Good Drive 2TB", False, None)


def test_reads_the_health_log_of_a_drive():
    log = bytearray(512)
    log[3], log[5] = 97, 12
    log[48:64] = (2_000_000).to_bytes(16, "little")
    assert read_health(bytes(log)) == Health(12, 1_024_000_000_000)


@pytest.mark.parametrize(("used", "state"), [(3, OK), (85, WARNING), (104, PROBLEM)])
def test_reports_wear_of_a_drive(used, state):
    drive = DriveFacts("nvme0n1", "X", False, Health(used, 10**12))
    actual = doctor.drive_finding("/x", drive)
    assert actual.state == state and f"{used} % of its endurance" in actual.text


def test_hard_disks():
    assert doctor.drive_finding("/x", DriveFacts("sda", None, True, None)).state == WARNING


# -- machine --------------------------------------------------------------------------------------


def accelerated(
    available: bool, capability: tuple[int, int] = (8, 9), architectures: str = "sm_75 sm_80 sm_90"
) -> SimpleNamespace:
    return SimpleNamespace(
        __version__="2.13.0",
        accelerator=SimpleNamespace(
            is_available=lambda: available,
            device_count=lambda: 2,
            current_accelerator=lambda: SimpleNamespace(type="cuda"),
        ),
        cuda=SimpleNamespace(
            get_device_name=lambda number: "RTX 4090",
            get_device_capability=lambda number: capability,
            get_arch_list=architectures.split,
        ),
    )


def test_devices():
    actual = doctor.device_finding(accelerated(True), nvidia=True)
    assert actual.state == OK and "2 x RTX 4090 (cuda)" in actual.text
    actual = doctor.device_finding(accelerated(False), nvidia=True)
    assert actual.state == WARNING and "does not use it" in actual.text
    actual = doctor.device_finding(accelerated(False), nvidia=False)
    assert actual.state == WARNING and "no accelerator" in actual.text


@pytest.mark.parametrize(
    ("capability", "architectures", "state"),
    [
        ((12, 0), "sm_80 sm_90", PROBLEM),
        ((12, 0), "sm_80 sm_90 compute_90", OK),
        ((12, 1), "sm_90 sm_120", OK),
        ((8, 0), "sm_86 sm_90", PROBLEM),
        ((6, 1), "sm_75 sm_80", PROBLEM),
        ((9, 0), "sm_80 sm_90a", OK),
        ((11, 0), "gfx1100", OK),
        ((8, 9), "", OK),
    ],
)
def test_finds_a_torch_without_kernels_for_the_gpu(capability, architectures, state):
    actual = doctor.device_finding(accelerated(True, capability, architectures), nvidia=True)
    assert actual.state == state
    if state == PROBLEM:
        assert f"is {capability[0]}.{capability[1]}, but for sm_" in actual.text, actual.text


def test_wsl(monkeypatch):
    monkeypatch.setattr(doctor.platform, "release", lambda: "5.15.90.1-microsoft-standard-WSL2")
    (actual,) = doctor.check_system()
    assert actual.state == WARNING and "WSL2" in actual.text and "/mnt/c" in actual.advice


def test_cgroup_limit(monkeypatch):
    monkeypatch.setattr(doctor, "cgroup_memory_limit", lambda: 2 * GiB)
    actual = [f for f in doctor.check_memory() if f.subject == "memory limit"]
    assert [f.state for f in actual] == [WARNING] and "2.00 GiB" in actual[0].text


@pytest.mark.parametrize(("soft", "state"), [(2**16, WARNING), (resource.RLIM_INFINITY, OK)])
def test_locked_memory(soft, state, monkeypatch):
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (soft, soft))
    assert [f.state for f in doctor.check_locked(accelerator=True)] == [state]
    assert [f.state for f in doctor.check_locked(accelerator=False)] == [OK]


@pytest.mark.parametrize(("version", "state"), [("2.5.1", PROBLEM), ("2.13.0+cpu", OK)])
def test_package_versions(version, state, monkeypatch):
    collected = {"torch": version}
    monkeypatch.setattr(doctor, "version", lambda name: collected.get(name, "99.0"))
    (torch,) = [f for f in doctor.check_packages() if f.subject == "torch"]
    assert torch.state == state


def test_describes_findings_with_their_remedy():
    collected = [Finding("a", OK, "fine", "never shown"), Finding("b", PROBLEM, "bad", "mend it")]
    assert not passed(collected)
    assert describe(collected) == [
        "ok       a  fine",
        "problem  b  bad",
        "            -> mend it",
        "",
        "1 problem, no warnings",
    ]
