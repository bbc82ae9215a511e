"""Fixed regions and exported weights are synced before anything depends on them."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lohan.checkpoint.safetensors import FileTensor, ShardedWriter
from lohan.errors import StorageIOError
from lohan.store.io_engine import aligned_buffer, open_engine
from lohan.store.store import Store
from tests.support.faults import CommitRecorder, recorded_engine
from tests.support.stores import REGIONS_WITH_FIXED, write_fixed_region, write_generation


def test_fixed_regions_are_durable_before_the_first_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    recorder = CommitRecorder()
    with Store.create(
        tmp_path / "s", REGIONS_WITH_FIXED, engine=recorded_engine(recorder, {})
    ) as store:
        write_fixed_region(store)
        write_generation(store, 0)
        recorder.arm(monkeypatch)
        before = len(recorder.calls)  # empty files were synced when they were made
        store.commit({"step": 0})
    calls = recorder.calls[before:]
    assert calls.index("sync fixed.bin") < calls.index("write manifest.json.tmp")


def test_exported_shards_end_with_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    last: dict[str, str] = {}

    def noted(name: str) -> Callable:
        call = getattr(os, name)

        def wrapped(fd: int, *args):
            last[Path(f"/proc/self/fd/{fd}").readlink().name] = name
            return call(fd, *args)

        return wrapped

    for name in ("pwrite", "fsync"):
        monkeypatch.setattr(os, name, noted(name))
    specs = [FileTensor(name, torch.float32, (16,)) for name in "ab"]
    with ShardedWriter(tmp_path, tensors=specs, max_shard_bytes=64) as writer:
        for spec in specs:
            writer.write(spec.name, torch.ones(16))
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(shards) == 2 and [last[shard] for shard in shards] == ["fsync", "fsync"]


# -- the native engines ---------------------------------------------------------------------------

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, MODE_FILTER = 38, 22, 2
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
FDATASYNC = {"x86_64": 75, "aarch64": 83}
EIO = 5


def refuse_fdatasync() -> bool:
    """Make fdatasync fail with EIO in this process; return whether the system allows that."""
    load, equal, give = 0x20, 0x15, 0x06  # instructions of a seccomp filter
    program = b"".join(
        struct.pack("HBBI", *line)
        for line in (
            (load, 0, 0, 0),  # the number of the call
            (equal, 0, 1, FDATASYNC[os.uname().machine]),
            (give, 0, 0, ERRNO | EIO),
            (give, 0, 0, ALLOW),
        )
    )
    code = ctypes.create_string_buffer(program)
    whole = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 4, ctypes.addressof(code)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return (
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
        and prctl(PR_SET_SECCOMP, MODE_FILTER, whole, 0, 0) == 0
    )


@pytest.mark.parametrize("kind", ["uring", "threads"])
def test_a_sync_reaches_the_system(kind: str, tmp_path: Path):
    """The call fails in a child process; an engine that does not make it would not notice."""
    if os.uname().machine not in FDATASYNC:
        pytest.skip("the number of the call is not known here")
    child = os.fork()
    if child == 0:
        code = 9
        try:
            engine = open_engine(kind)
            file = engine.open(str(tmp_path / "data.bin"), size=4096, create=True)
            engine.wait(engine.write(file, 0, aligned_buffer(4096)), 10.0)
            engine.sync(file)
            if not refuse_fdatasync():
                os._exit(3)
            try:
                engine.sync(file)
                code = 1
            except StorageIOError as error:
                code = 0 if "fdatasync" in str(error) and "data.bin" in str(error) else 2
        finally:
            os._exit(code)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if ended == 3:
        pytest.skip("seccomp is not allowed here")
    assert ended == 0
