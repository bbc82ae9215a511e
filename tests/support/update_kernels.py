"""The optimizers in plain numpy, and the arrays that the native kernels update."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from lohan import _core

# -- reference updates -----------------------------------------------------------------------------

F, U = np.float32, np.uint32
INT8_BLOCK = 32
SIGNED = {"adamw": (True, False), "sgd": (True,), "lion": (True,)}
HYPERPARAMETERS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1},
    "sgd": {"lr": 1e-2, "momentum": 0.9, "nesterov": False, "weight_decay": 0.1},
    "lion": {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1},
}


def uniform_numbers(count: int, seed: int, first: int) -> np.ndarray:
    """Return 32 random bits for each element."""
    x = (np.arange(first, first + count, dtype=np.uint64) * 0x9E3779B1 + seed).astype(U)
    x = (x ^ (x >> U(16))) * U(0x7FEB352D)
    x = (x ^ (x >> U(15))) * U(0x846CA68B)
    return x ^ (x >> U(16))


def to_bf16(x: np.ndarray, up: np.ndarray) -> np.ndarray:
    bits = np.where(np.isnan(x), U(0x7FC00000), x.view(U))
    return ((bits + up) >> U(16)).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(U) << U(16)).view(F)


def _blocks(x: np.ndarray) -> np.ndarray:
    """Return the values as rows of one block each, with zeros behind the end."""
    padded = np.zeros(-(-x.size // INT8_BLOCK) * INT8_BLOCK, x.dtype)
    padded[: x.size] = x
    return padded.reshape(-1, INT8_BLOCK)


def to_int8(x: np.ndarray, up: np.ndarray, *, signed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return codes and scales."""
    most = F(127 if signed else 255)
    with np.errstate(all="ignore"):
        roots = _blocks(np.sqrt(np.abs(x)) if signed else np.sqrt(np.sqrt(x)))
        top = roots.max(axis=1, keepdims=True)
        finite = np.isfinite(top)
        factor = np.where(finite & (top > 0), most / top, F(0))
        roots = np.where(finite, roots, F(0))
        codes = np.minimum((roots * factor + _blocks(up).astype(F) * F(2**-16)).astype(int), most)
        if not signed:
            codes = np.maximum(codes, roots > 0)
        scales = np.where(finite, top / most, F(np.nan))[:, 0]
    flat = codes.reshape(-1)[: x.size]
    if signed:
        return np.where(np.signbit(x), -flat, flat).astype(np.int8), scales
    return flat.astype(np.uint8), scales


def from_int8(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    t = codes.astype(F) * np.repeat(scales, INT8_BLOCK)[: codes.size]
    return t * np.abs(t) if codes.dtype == np.int8 else (t * t) * (t * t)


def stepped(
    rule: str, p: np.ndarray, g: np.ndarray, m: list[np.ndarray], *, step: int, **h: Any
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return new p and moments, in float32 and rounded after every operation."""
    lr, decay = h["lr"], h["weight_decay"]
    if rule == "sgd":
        g = g + F(decay) * p
        new = F(h["momentum"]) * m[0] + g
        return p - F(lr) * (g + F(h["momentum"]) * new if h["nesterov"] else new), [new]
    b1, b2 = h["beta1"], h["beta2"]
    if rule == "lion":
        way = F(b1) * m[0] + F(1 - b1) * g
        new = F(b2) * m[0] + F(1 - b2) * g
        return p * F(1 - lr * decay) - F(lr) * np.sign(way), [new]
    first = m[0] + (g - m[0]) * F(1 - b1)
    second = F(b2) * m[1] + (F(1 - b2) * g) * g
    below = np.sqrt(second) * F(1 / np.sqrt(1 - b2**step)) + F(h["eps"])
    return p * F(1 - lr * decay) - (F(lr / (1 - b1**step)) * first) / below, [first, second]


class ReferenceUpdate:
    """One tensor in fp32, with its moments stored in the requested format."""

    def __init__(self, rule: str, moments: str, p: np.ndarray) -> None:
        self.rule, self.moments, self.p = rule, moments, p.copy()
        self.signed = SIGNED[rule]
        blocks = -(-p.size // INT8_BLOCK)
        kinds = {"fp32": [F] * 2, "bf16": [np.uint16] * 2, "int8": [np.int8, np.uint8]}[moments]
        self.stored = [np.zeros(p.size, kind) for kind, _ in zip(kinds, self.signed, strict=False)]
        self.scales = [np.zeros(blocks, F) for _ in self.signed]

    def read(self) -> list[np.ndarray]:
        if self.moments == "fp32":
            return self.stored
        if self.moments == "bf16":
            return [from_bf16(m) for m in self.stored]
        return [from_int8(m, s) for m, s in zip(self.stored, self.scales, strict=True)]

    def step(self, g: np.ndarray, step: int, *, seed: int = 0, first: int = 0) -> None:
        self.p, new = stepped(
            self.rule, self.p, g, self.read(), step=step, **HYPERPARAMETERS[self.rule]
        )
        bits = uniform_numbers(self.p.size, seed, first)
        for k, (up, x) in enumerate(zip((bits & U(0xFFFF), bits >> U(16)), new, strict=False)):
            if self.moments == "fp32":
                self.stored[k] = x
            elif self.moments == "bf16":
                self.stored[k] = to_bf16(x, up)
            else:
                self.stored[k], self.scales[k] = to_int8(x, up, signed=self.signed[k])


def aligned(count: int, dtype: Any, offset: int = 0) -> np.ndarray:
    """Return `count` zeros at an address `offset` bytes past a multiple of 64."""
    itemsize = np.dtype(dtype).itemsize
    raw = np.zeros(count * itemsize + 128, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    return raw[start : start + count * itemsize].view(dtype)


def aligned_copy(values: np.ndarray) -> np.ndarray:
    out = aligned(values.size, values.dtype)
    out[:] = values
    return out


def bf16_bits(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()


# -- arrays for the native kernels -----------------------------------------------------------------

RULES, MOMENTS = list(SIGNED), ["fp32", "bf16", "int8"]
MASTERS = ["fp32", "bf16", "fp16"]
CHECKSUM_ELEMENTS = (
    12 * 1024
)  # elements that are checksummed at a time; a thread updates twice as many
rules_and_moments = pytest.mark.parametrize(
    ("rule", "moments"), list(itertools.product(RULES, MOMENTS))
)


class KernelState:
    """Arrays of one optimizer, filled from one seed."""

    def __init__(self, rule: str, moments: str, count: int, master: str = "fp32") -> None:
        rng = np.random.default_rng(0)
        self.rule, self.moments, self.master, self.count = rule, moments, master, count
        self.p = aligned_copy(rng.standard_normal(count).astype(np.float32))
        self.w, self.r = aligned(count, "u2"), aligned(count, "i2")
        if master == "bf16":
            _core.split_bf16(self.p, self.w, self.r)
        kind = {"fp32": ("f4", "f4"), "bf16": ("u2", "u2"), "int8": ("i1", "u1")}[moments]
        self.m = [aligned(count, k) for k, _ in zip(kind, SIGNED[rule], strict=False)]
        blocks = -(-count // 32)
        self.scales = [aligned(blocks, "f4") for _ in self.m] if moments == "int8" else []

    def gradient(self, t: int) -> np.ndarray:
        """Return gradients whose neighbours differ by orders of magnitude; some are zero."""
        rng = np.random.default_rng([1, t])
        g = rng.standard_normal(self.count) * 10.0 ** rng.integers(-4, 2, self.count)
        g[rng.random(self.count) < 0.1] = 0
        return g.astype(np.float32)

    def step(self, t: int, start: int = 0, stop: int | None = None, **more: Any) -> Any:
        part, g = slice(start, stop), self.gradient(t)[start:stop]
        kernel = getattr(_core, f"{self.rule}_{self.master}")
        masters = {"fp32": [self.p], "bf16": [self.w, self.r], "fp16": [self.w, self.p]}
        numbers = HYPERPARAMETERS[self.rule] | ({"step": t} if self.rule == "adamw" else {})
        blocks = slice(start // 32, None if stop is None else -(-stop // 32))
        scales = [s[blocks] for s in self.scales]
        return kernel(
            *(a[part] for a in masters[self.master]),
            *(m[part] for m in self.m),
            g,
            scales=scales,
            seed=77 + t,
            first=start,
            **numbers | more,
        )

    def bits(self) -> list[bytes]:
        return [a.tobytes() for a in (self.p, self.w, self.r, *self.m, *self.scales)]
