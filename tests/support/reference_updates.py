"""The optimizers and their stored moments in plain numpy: what the kernels must do, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

F, U = np.float32, np.uint32
BLOCK = 32
SIGNED = {"adamw": (True, False), "sgd": (True,), "lion": (True,)}
HYPER: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1},
    "sgd": {"lr": 1e-2, "momentum": 0.9, "nesterov": False, "weight_decay": 0.1},
    "lion": {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1},
}


def chance(count: int, seed: int, first: int) -> np.ndarray:
    """32 bits for each element."""
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
    """As rows of a block each, zeros behind the end."""
    padded = np.zeros(-(-x.size // BLOCK) * BLOCK, x.dtype)
    padded[: x.size] = x
    return padded.reshape(-1, BLOCK)


def to_int8(x: np.ndarray, up: np.ndarray, *, signed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales."""
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
    t = codes.astype(F) * np.repeat(scales, BLOCK)[: codes.size]
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


class Reference:
    """One tensor in fp32, with its moments stored in the requested format."""

    def __init__(self, rule: str, moments: str, p: np.ndarray) -> None:
        self.rule, self.moments, self.p = rule, moments, p.copy()
        self.signed = SIGNED[rule]
        blocks = -(-p.size // BLOCK)
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
        self.p, new = stepped(self.rule, self.p, g, self.read(), step=step, **HYPER[self.rule])
        bits = chance(self.p.size, seed, first)
        for k, (up, x) in enumerate(zip((bits & U(0xFFFF), bits >> U(16)), new, strict=False)):
            if self.moments == "fp32":
                self.stored[k] = x
            elif self.moments == "bf16":
                self.stored[k] = to_bf16(x, up)
            else:
                self.stored[k], self.scales[k] = to_int8(x, up, signed=self.signed[k])


def aligned(count: int, dtype: Any, offset: int = 0) -> np.ndarray:
    """`count` zeros at an address `offset` bytes past a multiple of 64."""
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
