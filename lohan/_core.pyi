"""Native core: fused optimizer updates, CRC-32C, I/O engines.

Arrays are one-dimensional contiguous numpy arrays or CPU torch tensors.
Written arrays are never converted: a wrong dtype is a TypeError; a stride, a length, a read-only
flag or an address that is not a multiple of 64 is a ValueError naming the argument.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

# Moments are float32, bfloat16 (or uint16), or int8 with float32 `scales`, one array for each and
# an element for every 32 parameters; v is uint8 then. Other types than float32 are rounded
# stochastically, by a hash of `seed` and of the element's number, counted from `first`. With
# `checksums` an update returns the CRC-32C of every array that it has written, in the order of its
# arguments, scales last.

def adamw_fp32(
    p: Any,
    m: Any,
    v: Any,
    g: Any,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    scales: Sequence[Any] = (),
    seed: int = 0,
    first: int = 0,
    checksums: bool = False,
) -> list[int] | None:
    """Run one AdamW step on float32 p and its moments, in place; g is float32."""

def adamw_bf16(
    w: Any,
    r: Any,
    m: Any,
    v: Any,
    g: Any,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    scales: Sequence[Any] = (),
    seed: int = 0,
    first: int = 0,
    checksums: bool = False,
) -> list[int] | None:
    """Run one AdamW step on the float32 master with bits (w << 16) + r and its moments, in place.

    w is bfloat16 or uint16, r is int16, and g is bfloat16, uint16 or float32.
    """

def adamw_fp16(
    w: Any,
    p: Any,
    m: Any,
    v: Any,
    g: Any,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    scales: Sequence[Any] = (),
    seed: int = 0,
    first: int = 0,
    checksums: bool = False,
) -> list[int] | None:
    """Run one AdamW step on float32 p and its moments, in place, and set w to p rounded.

    w is float16 or uint16, and g is float16, uint16 or float32.
    """

def sgd_fp32(
    p: Any,
    m: Any,
    g: Any,
    *,
    lr: float,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    grad_scale: float = 1.0,
    scales: Sequence[Any] = (),
    seed: int = 0,
    first: int = 0,
    checksums: bool = False,
) -> list[int] | None:
    """Run one SGD step on float32 p and its moments, in place; g is float32."""

def sgd_bf16(
    w: Any,
    r: Any,
    m: Any,
    g: Any,
    *,
    lr: float,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    grad_scale: float = 1.0,
    scales: Sequence[Any] = (),
    seed: int = 0,
    first: int = 0,
    checksums: bool = False,
) -> list[int] | None:
    """Run one SGD step on the float32 master with bits (w << 16) + r and its moments, in place.

    w is bfloat16 or uint16, r is int16, and g is bfloat16, uint16 or float32.
    """

def sgd_fp16(
    w: Any,
    p: Any,
    m: Any,
    g: Any,
    *,
    lr: float,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    grad_scale: float = 1.0,
    scales: Sequence[Any] = (),
    seed: int = 0,
    first: int = 0,
    checksums: bool = False,
) -> list[int] | None:
    """Run one SGD step on float32 p and its moments, in place, and set w to p rounded.

    w is float16 or uint16, and g is float16, uint16 or float32.
    """

def lion_fp32(
    p: Any,
    m: Any,
    g: Any,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    grad_scale: float = 1.0,
    scales: Sequence[Any] = (),
    seed: int = 0,
    first: int = 0,
    checksums: bool = False,
) -> list[int] | None:
    """Run one Lion step on float32 p and its moments, in place; g is float32."""

def lion_bf16(
    w: Any,
    r: Any,
    m: Any,
    g: Any,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    grad_scale: float = 1.0,
    scales: Sequence[Any] = (),
    seed: int = 0,
    first: int = 0,
    checksums: bool = False,
) -> list[int] | None:
    """Run one Lion step on the float32 master with bits (w << 16) + r and its moments, in place.

    w is bfloat16 or uint16, r is int16, and g is bfloat16, uint16 or float32.
    """

def lion_fp16(
    w: Any,
    p: Any,
    m: Any,
    g: Any,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    grad_scale: float = 1.0,
    scales: Sequence[Any] = (),
    seed: int = 0,
    first: int = 0,
    checksums: bool = False,
) -> list[int] | None:
    """Run one Lion step on float32 p and its moments, in place, and set w to p rounded.

    w is float16 or uint16, and g is float16, uint16 or float32.
    """

# The functions RULE_MASTER_updates apply one update for each gradient, in order, in one pass over
# memory and with the same bits as one call of RULE_MASTER for each. `updates` holds the keywords of
# these calls: those of the rule, grad_scale and seed. A missing or unknown keyword is a TypeError.

def adamw_fp32_updates(
    p: Any,
    m: Any,
    v: Any,
    gradients: Sequence[Any],
    *,
    updates: Sequence[dict[str, Any]],
    scales: Sequence[Any] = (),
    first: int = 0,
    checksums: bool = False,
) -> list[int] | None: ...
def adamw_bf16_updates(
    w: Any,
    r: Any,
    m: Any,
    v: Any,
    gradients: Sequence[Any],
    *,
    updates: Sequence[dict[str, Any]],
    scales: Sequence[Any] = (),
    first: int = 0,
    checksums: bool = False,
) -> list[int] | None: ...
def adamw_fp16_updates(
    w: Any,
    p: Any,
    m: Any,
    v: Any,
    gradients: Sequence[Any],
    *,
    updates: Sequence[dict[str, Any]],
    scales: Sequence[Any] = (),
    first: int = 0,
    checksums: bool = False,
) -> list[int] | None: ...
def sgd_fp32_updates(
    p: Any,
    m: Any,
    gradients: Sequence[Any],
    *,
    updates: Sequence[dict[str, Any]],
    scales: Sequence[Any] = (),
    first: int = 0,
    checksums: bool = False,
) -> list[int] | None: ...
def sgd_bf16_updates(
    w: Any,
    r: Any,
    m: Any,
    gradients: Sequence[Any],
    *,
    updates: Sequence[dict[str, Any]],
    scales: Sequence[Any] = (),
    first: int = 0,
    checksums: bool = False,
) -> list[int] | None: ...
def sgd_fp16_updates(
    w: Any,
    p: Any,
    m: Any,
    gradients: Sequence[Any],
    *,
    updates: Sequence[dict[str, Any]],
    scales: Sequence[Any] = (),
    first: int = 0,
    checksums: bool = False,
) -> list[int] | None: ...
def lion_fp32_updates(
    p: Any,
    m: Any,
    gradients: Sequence[Any],
    *,
    updates: Sequence[dict[str, Any]],
    scales: Sequence[Any] = (),
    first: int = 0,
    checksums: bool = False,
) -> list[int] | None: ...
def lion_bf16_updates(
    w: Any,
    r: Any,
    m: Any,
    gradients: Sequence[Any],
    *,
    updates: Sequence[dict[str, Any]],
    scales: Sequence[Any] = (),
    first: int = 0,
    checksums: bool = False,
) -> list[int] | None: ...
def lion_fp16_updates(
    w: Any,
    p: Any,
    m: Any,
    gradients: Sequence[Any],
    *,
    updates: Sequence[dict[str, Any]],
    scales: Sequence[Any] = (),
    first: int = 0,
    checksums: bool = False,
) -> list[int] | None: ...
def sum_squares(x: Any) -> float:
    """Return the sum of squares of float32, bfloat16 or float16 elements, in double precision."""

def split_bf16(p: Any, w: Any, r: Any) -> None:
    """Write w, the bfloat16 nearest to p, ties away from zero, and the remainder r.

    (w << 16) + r are the bits of p. NaN becomes the quiet NaN.
    """

def join_bf16(w: Any, r: Any, p: Any) -> None:
    """Write the p whose bits are (w << 16) + r."""

def to_fp16(p: Any, w: Any) -> None:
    """Write w, p rounded to the nearest float16, ties to even."""

def crc32c(buffer: Any, seed: int = 0) -> int:
    """Return the CRC-32C of a buffer; crc32c(b, crc32c(a)) is the checksum of a + b."""

def crc32c_around(buffer: Any, parts: Sequence[tuple[int, int, int]]) -> int:
    """Return the CRC-32C of an array of bytes, some of whose parts have known checksums.

    `parts` are (begin, end, CRC-32C) in order; their bytes are not read.
    """

def isa() -> str:
    """Return the instruction set of the kernels: plain, avx2 or avx512. All give the same bits."""

def set_isa(name: str) -> None:
    """Force an instruction set, or raise ValueError if this processor lacks it."""

def supported_isas() -> list[str]:
    """Return the instruction sets that work here, the fastest last."""

def threads() -> int:
    """Return the number of threads that one kernel call may use."""

def set_threads(count: int) -> None:
    """Set the number of threads of one kernel call; the result does not depend on it."""

class _NativeEngine:
    @property
    def name(self) -> str: ...
    @property
    def direct(self) -> bool:
        """True while every file opened so far uses O_DIRECT."""

    def open(self, path: str, *, size: int, create: bool) -> int: ...
    def read(self, file: int, offset: int, buffer: npt.NDArray[np.uint8]) -> int: ...
    def write(self, file: int, offset: int, buffer: npt.NDArray[np.uint8]) -> int: ...
    def wait(self, ticket: int, timeout_s: float) -> None: ...
    def sync(self, file: int) -> None: ...
    def close(self, timeout_s: float = 60.0) -> None: ...

class UringEngine(_NativeEngine):
    """io_uring: one thread owns the ring; `depth` pieces of `piece_bytes` in flight."""

    def __init__(self, *, depth: int = 32, piece_bytes: int = 1048576) -> None: ...

class ThreadEngine(_NativeEngine):
    """pread and pwrite on `threads` threads."""

    def __init__(self, *, threads: int = 4, piece_bytes: int = 1048576) -> None: ...
