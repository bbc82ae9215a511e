"""Memory that was freed goes back to the system, so that a process stays near its budget."""

import subprocess
import sys

from tests.support import HANG_S

CODE = """
import ctypes, sys
from lohan.util.system import rss_bytes, set_up_libraries
if sys.argv[1] == "ours":
    set_up_libraries()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
    ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p])
def take(size):
    address = libc.malloc(size)
    ctypes.memset(address, 1, size)
    return address
libc.free(take(24 << 20))  # from here on glibc by itself puts such sizes into its heap
before = rss_bytes()
large, small = [], []
for _ in range(16):
    large.append(take(16 << 20))
    small.append(take(64 << 10))  # stays, and keeps the heap from being cut off
for address in large:
    libc.free(address)
print(rss_bytes() - before)
"""


def left_resident(who: str) -> int:
    run = subprocess.run(
        [sys.executable, "-c", CODE, who],
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_S,
    )
    return int(run.stdout)


def test_freed_tensors_do_not_stay_resident() -> None:
    assert left_resident("glibc") > 128 << 20  # what the setting is for
    assert left_resident("ours") < 16 << 20
