"""Tests that every I/O engine passes, and tests of single engines."""

from __future__ import annotations

import gc
import itertools
import os
import random
import resource
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lohan.errors import ConfigError, StorageIOError
from lohan.store.io_engine import aligned_buffer, open_engine
from lohan.util.units import PAGE
from tests.support import HANG_S
from tests.support.faults import EngineFault, FaultyEngine
from tests.support.stores import MemoryEngine

MiB = 2**20
KINDS = ["uring", "threads", "memory"]
NATIVE = ["uring", "threads"]


def open_or_skip(kind: str, **options: Any) -> Any:
    if kind == "memory":
        return MemoryEngine(**options)
    try:
        return open_engine(kind, **options)
    except StorageIOError as error:
        pytest.skip(str(error))


def random_bytes(size: int, seed: int) -> np.ndarray:
    buffer = aligned_buffer(size)
    buffer[:] = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    return buffer


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    engine = open_or_skip(request.param)
    yield engine
    engine.close()


@pytest.fixture(params=NATIVE)
def native(request: pytest.FixtureRequest) -> Iterator[Any]:
    engine = open_or_skip(request.param)
    yield engine
    engine.close()


def truncate(engine: Any, path: str, size: int) -> None:
    if isinstance(engine, MemoryEngine):
        del engine.files[path][size:]
    else:
        os.truncate(path, size)


def test_round_trip_of_many_tickets_out_of_order(engine: Any, tmp_path: Path) -> None:
    rng = random.Random(1)
    path, pages = str(tmp_path / "x"), 4096
    file = engine.open(path, size=pages * PAGE, create=True)
    cuts = [0, *sorted(rng.sample(range(1, pages), 60)), pages]
    data = random_bytes(pages * PAGE, seed=2)
    ranges = [(a * PAGE, b * PAGE) for a, b in itertools.pairwise(cuts)]
    for operation, buffer in ((engine.write, data), (engine.read, aligned_buffer(data.size))):
        rng.shuffle(ranges)
        tickets = [operation(file, a, buffer[a:b]) for a, b in ranges]
        rng.shuffle(tickets)
        for ticket in tickets:
            engine.wait(ticket, 30.0)
        assert np.array_equal(buffer, data)
    engine.sync(file)


def test_small_depth_and_pieces_still_move_everything(tmp_path: Path) -> None:
    data = random_bytes(3 * MiB, seed=3)
    for kind, options in (("uring", {"depth": 1}), ("threads", {"threads": 1})):
        engine = open_or_skip(kind, piece_bytes=PAGE * 3, **options)
        file = engine.open(str(tmp_path / kind), size=data.size, create=True)
        back = aligned_buffer(data.size)
        engine.wait(engine.write(file, 0, data), 30.0)
        engine.wait(engine.read(file, 0, back), 30.0)
        assert np.array_equal(back, data)
        engine.close()


def test_several_files_and_reopen(engine: Any, tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in "abc"]
    files = [engine.open(path, size=8 * PAGE, create=True) for path in paths]
    data = [random_bytes(8 * PAGE, seed) for seed in range(3)]
    for file, part in zip(files, data, strict=True):
        engine.wait(engine.write(file, 0, part), 30.0)
    again = [engine.open(path, size=8 * PAGE, create=False) for path in paths]
    for file, part in zip(again, data, strict=True):
        back = aligned_buffer(8 * PAGE)
        engine.wait(engine.read(file, 0, back), 30.0)
        assert np.array_equal(back, part)


def test_create_sets_the_exact_size_and_keeps_what_is_there(native: Any, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"a" * (3 * PAGE))
    native.open(str(path), size=2 * PAGE, create=True)
    assert path.read_bytes() == b"a" * (2 * PAGE)
    native.open(str(path), size=4 * PAGE, create=True)
    assert path.stat().st_size == 4 * PAGE
    assert path.stat().st_blocks * 512 >= 4 * PAGE


def test_empty_buffer_completes(engine: Any, tmp_path: Path) -> None:
    file = engine.open(str(tmp_path / "x"), size=PAGE, create=True)
    engine.wait(engine.write(file, PAGE, np.empty(0, np.uint8)), 1.0)


def test_open_refuses_missing_file_and_wrong_size(engine: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    with pytest.raises(StorageIOError, match=r"x failed: ENOENT"):
        engine.open(path, size=PAGE, create=False)
    engine.open(path, size=2 * PAGE, create=True)
    with pytest.raises(StorageIOError, match=r"x failed: expected 4096 bytes, found 8192"):
        engine.open(path, size=PAGE, create=False)


@pytest.mark.parametrize("left", [3 * MiB, 5000, 0])
def test_truncated_file_is_a_short_read_with_numbers(
    engine: Any, tmp_path: Path, left: int
) -> None:
    path = str(tmp_path / "x")
    file = engine.open(path, size=4 * MiB, create=True)
    engine.wait(engine.write(file, 0, random_bytes(4 * MiB, 0)), 30.0)
    truncate(engine, path, left)
    ticket = engine.read(file, 0, aligned_buffer(4 * MiB))
    message = rf"read of 4194304 bytes at offset 0 of .*x .*expected 4194304, got {left}; "
    with pytest.raises(StorageIOError, match=message):
        engine.wait(ticket, 30.0)


def test_misaligned_arguments_are_named(engine: Any, tmp_path: Path) -> None:
    file = engine.open(str(tmp_path / "x"), size=16 * PAGE, create=True)
    buffer = aligned_buffer(4 * PAGE)
    for operation in (engine.read, engine.write):
        with pytest.raises(ValueError, match="offset 512 is not a multiple of 4096"):
            operation(file, 512, buffer)
        with pytest.raises(ValueError, match="buffer length 4095 is not a multiple"):
            operation(file, 0, buffer[:4095])
        with pytest.raises(ValueError, match=r"buffer address .* is not a multiple"):
            operation(file, 0, buffer[1024 : 1024 + PAGE])
        with pytest.raises(ValueError, match="offset must not be negative"):
            operation(file, -PAGE, buffer)
        with pytest.raises(ValueError, match="ends after the file's 65536 bytes"):
            operation(file, 14 * PAGE, buffer)
        with pytest.raises(ValueError, match="file 7 is not open"):
            operation(7, 0, buffer)
        with pytest.raises(ValueError, match="contiguous"):
            operation(file, 0, buffer[::2])
        with pytest.raises(TypeError, match="uint8"):
            operation(file, 0, buffer.view(np.float32))
    buffer.flags.writeable = False
    engine.wait(engine.write(file, 0, buffer), 30.0)
    with pytest.raises(ValueError, match="read-only"):
        engine.read(file, 0, buffer)


def test_a_ticket_is_waited_for_once(engine: Any, tmp_path: Path) -> None:
    file = engine.open(str(tmp_path / "x"), size=PAGE, create=True)
    ticket = engine.write(file, 0, random_bytes(PAGE, 0))
    engine.wait(ticket, 30.0)
    with pytest.raises(ValueError, match=f"ticket {ticket} is unknown or was waited for"):
        engine.wait(ticket, 30.0)


def test_close_is_idempotent_and_final(engine: Any, tmp_path: Path) -> None:
    file = engine.open(str(tmp_path / "x"), size=64 * MiB, create=True)
    ticket = engine.write(file, 0, aligned_buffer(64 * MiB))
    engine.close()
    engine.close()
    for call in (
        lambda: engine.open(str(tmp_path / "y"), size=PAGE, create=True),
        lambda: engine.read(file, 0, aligned_buffer(PAGE)),
        lambda: engine.wait(ticket, 1.0),
        lambda: engine.sync(file),
    ):
        with pytest.raises(StorageIOError, match="engine is closed; open a new one"):
            call()


def test_missed_deadline_then_success(native: Any, tmp_path: Path) -> None:
    file = native.open(str(tmp_path / "x"), size=128 * MiB, create=True)
    ticket = native.write(file, 0, aligned_buffer(128 * MiB))
    message = r"write of 134217728 bytes at offset 0 of .*x missed its deadline of 0 s; "
    with pytest.raises(StorageIOError, match=message):
        native.wait(ticket, 0.0)
    native.wait(ticket, 60.0)


def test_missed_deadline_in_memory() -> None:
    engine = MemoryEngine(delay_s=1.0)
    file = engine.open("x", size=PAGE, create=True)
    ticket = engine.write(file, 0, aligned_buffer(PAGE))
    with pytest.raises(StorageIOError, match=r"missed its deadline of 0\.01 s"):
        engine.wait(ticket, 0.01)
    engine.wait(ticket, 60.0)


def test_memory_engine_moves_bytes_only_at_wait() -> None:
    files: dict[str, bytearray] = {}
    engine = MemoryEngine(files=files)
    file = engine.open("x", size=PAGE, create=True)
    ticket = engine.write(file, 0, aligned_ones())
    assert not any(files["x"])
    engine.wait(ticket, 1.0)
    assert all(files["x"])


def aligned_ones() -> np.ndarray:
    buffer = aligned_buffer(PAGE)
    buffer[:] = 1
    return buffer


def test_failed_write_names_path_offset_and_errno(native: Any, tmp_path: Path) -> None:
    """The file size limit makes the kernel fail a write half-way through the request."""
    path = tmp_path / "x"
    path.write_bytes(b"")
    file = native.open(str(path), size=8 * MiB, create=True)
    os.truncate(path, 0)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MiB, old[1]))
    try:
        ticket = native.write(file, 0, random_bytes(8 * MiB, 0))
        message = r"write of 8388608 bytes at offset 0 of .*x failed after 4194304 bytes: EFBIG"
        with pytest.raises(StorageIOError, match=message):
            native.wait(ticket, 30.0)
        unwaited = native.write(file, 4 * MiB, random_bytes(MiB, 0))
        assert unwaited > ticket
        with pytest.raises(StorageIOError, match=r"write of 1048576 bytes at offset 4194304"):
            native.close()
        with pytest.raises(StorageIOError, match=r"allocating 8388608 bytes for .*y failed: EFBIG"):
            open_engine("threads").open(str(tmp_path / "y"), size=8 * MiB, create=True)
        assert not (tmp_path / "y").exists()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_no_space_names_wanted_and_free_bytes(native: Any, tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    wanted = free.f_blocks * free.f_frsize * 2
    message = rf"allocating {wanted} bytes for .*x failed: E(NOSPC|FBIG).*, \d+ bytes free; "
    with pytest.raises(StorageIOError, match=message):
        native.open(str(tmp_path / "x"), size=wanted, create=True)
    assert not (tmp_path / "x").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open anything")
def test_read_only_file_is_refused(native: Any, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(PAGE))
    path.chmod(0o400)
    with pytest.raises(StorageIOError, match=r"x failed: EACCES.*permissions"):
        native.open(str(path), size=PAGE, create=False)


def test_folder_and_missing_folder_are_refused(native: Any, tmp_path: Path) -> None:
    with pytest.raises(StorageIOError, match="EISDIR"):
        native.open(str(tmp_path), size=PAGE, create=False)
    with pytest.raises(StorageIOError, match=r"ENOENT.*the folder must exist"):
        native.open(str(tmp_path / "no" / "x"), size=PAGE, create=True)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs")
def test_file_system_without_direct_io(native: Any) -> None:
    path = Path(f"/dev/shm/lohan-test-{os.getpid()}-{native.name}")
    try:
        file = native.open(str(path), size=4 * MiB, create=True)
        data, back = random_bytes(4 * MiB, 5), aligned_buffer(4 * MiB)
        native.wait(native.write(file, 0, data), 30.0)
        native.wait(native.read(file, 0, back), 30.0)
        assert np.array_equal(back, data)
        assert isinstance(native.direct, bool)
    finally:
        path.unlink(missing_ok=True)


def test_engine_keeps_the_buffer_until_the_ticket_is_waited_for(
    native: Any, tmp_path: Path
) -> None:
    class Owned(np.ndarray):
        """A view that can be watched."""

    file = native.open(str(tmp_path / "x"), size=MiB, create=True)
    buffer = aligned_buffer(MiB).view(Owned)
    watch = weakref.ref(buffer)
    ticket = native.write(file, 0, buffer)
    del buffer
    gc.collect()
    assert watch() is not None
    native.wait(ticket, 30.0)
    gc.collect()
    assert watch() is None


def test_many_threads_share_an_engine(engine: Any, tmp_path: Path) -> None:
    count, size = 6, 2 * MiB
    file = engine.open(str(tmp_path / "x"), size=count * size, create=True)
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for round_ in range(5):
                data, back = random_bytes(size, index * 100 + round_), aligned_buffer(size)
                engine.wait(engine.write(file, index * size, data), 30.0)
                engine.wait(engine.read(file, index * size, back), 30.0)
                assert np.array_equal(data, back)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors


def run_python(code: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "x")],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )


PRELUDE = """
import os, signal, sys, threading, time
import numpy as np
from lohan.errors import StorageIOError
from lohan.store.io_engine import aligned_buffer, open_engine
engine = open_engine(KIND)
file = engine.open(sys.argv[1], size=2**27, create=True)
buffer = aligned_buffer(2**27)
"""


@pytest.mark.parametrize("kind", NATIVE)
def test_exit_without_wait_or_close(kind: str, tmp_path: Path) -> None:
    open_or_skip(kind).close()
    code = PRELUDE.replace("KIND", repr(kind)) + "engine.write(file, 0, buffer)\n"
    result = run_python(code, tmp_path)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("kind", NATIVE)
def test_child_process_must_open_its_own_engine(kind: str, tmp_path: Path) -> None:
    open_or_skip(kind).close()
    code = PRELUDE.replace("KIND", repr(kind)) + (
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try:\n"
        "        engine.write(file, 0, buffer)\n"
        "    except StorageIOError as error:\n"
        "        assert 'open a new one after fork' in str(error)\n"
        "        engine.close(); del engine; sys.exit(7)\n"
        "    sys.exit(8)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7\n"
        "engine.wait(engine.write(file, 0, buffer), 30.0)\n"
        "engine.close()\n"
    )
    result = run_python(code, tmp_path)
    assert (result.returncode, result.stderr) == (0, "")


def test_wait_can_be_interrupted(tmp_path: Path) -> None:
    """Ctrl-C interrupts a wait for a read that never completes.

    The descriptor of the engine is replaced by a pipe that nobody writes to.
    """
    open_or_skip("uring").close()
    code = PRELUDE.replace("KIND", repr("uring")) + (
        "number = next(int(n) for n in os.listdir('/proc/self/fd')\n"
        "    if os.path.realpath('/proc/self/fd/' + n) == os.path.realpath(sys.argv[1]))\n"
        "ends = os.pipe()\n"
        "os.dup2(ends[0], number)\n"
        "ticket = engine.read(file, 0, buffer[:4096])\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # jobs may ignore it
        "try:\n"
        "    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "    engine.wait(ticket, 30.0)\n"
        "except KeyboardInterrupt:\n"
        "    try:\n"
        "        engine.close(timeout_s=0.1)\n"
        "    except StorageIOError as error:\n"
        "        assert 'not complete after 0.1 s' in str(error)\n"
        "        print('interrupted', flush=True)\n"
        "        os._exit(0)\n"
    )
    result = run_python(code, tmp_path)
    assert (result.stdout, result.stderr) == ("interrupted\n", "")


def test_open_engine_names_the_choices(tmp_path: Path) -> None:
    assert open_engine("auto").name in NATIVE
    with pytest.raises(ConfigError, match="'uringg' is unknown; choose auto, uring"):
        open_engine("uringg")
    with pytest.raises(ValueError, match="depth must be between 1 and 4096"):
        open_engine("uring", depth=0)
    with pytest.raises(ValueError, match="piece_bytes 1000 is not a multiple"):
        open_engine("threads", piece_bytes=1000)


FAULTS = [
    (EngineFault("eio", "read", 2), "read of 16384 bytes at offset 0 of .*x failed: EIO"),
    (EngineFault("short_read", "read", 2), "came back short: expected 16384, got 8192"),
    (EngineFault("enospc", "write", 2), "write of 16384 bytes at offset 0 of .*x failed: ENOSPC"),
    (EngineFault("torn_write", "write", 2), "write of 16384 bytes at offset 0 of .*x failed: EIO"),
    (EngineFault("eio", "sync", 2), "fdatasync of .*x failed: EIO"),
]


@pytest.mark.parametrize(("fault", "message"), FAULTS, ids=[f[0].kind + f[0].op for f in FAULTS])
def test_faulty_engine_fails_the_chosen_operation(
    engine: Any, tmp_path: Path, fault: EngineFault, message: str
) -> None:
    faulty = FaultyEngine(engine, fault, max_delay_s=0.001)
    file = faulty.open(str(tmp_path / "x"), size=4 * PAGE, create=True)
    old, new, back = (
        random_bytes(4 * PAGE, 0),
        random_bytes(4 * PAGE, 1),
        aligned_buffer(4 * PAGE),
    )

    def rounds() -> None:
        for data in (old, new):
            faulty.wait(faulty.write(file, 0, data), 10.0)
            faulty.wait(faulty.read(file, 0, back), 10.0)
            faulty.sync(file)

    with pytest.raises(StorageIOError, match=message):
        rounds()
    faulty.wait(faulty.read(file, 0, back), 10.0)
    if fault.kind == "torn_write":
        assert np.array_equal(back[: 2 * PAGE], new[: 2 * PAGE])
        assert np.array_equal(back[2 * PAGE :], old[2 * PAGE :])
    if fault.kind == "enospc":
        assert np.array_equal(back, old)
