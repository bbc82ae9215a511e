"""Byte sizes and times as people write them: parse "1.5GiB", print 1610612736 as "1.50 GiB"."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from lohan.errors import ConfigError

KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40
_SUFFIX = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KiB,
    "mib": MiB,
    "gib": GiB,
    "tib": TiB,
    "k": KiB,
    "m": MiB,
    "g": GiB,
    "t": TiB,
}


def parse_bytes(text: str | int | float, *, name: str = "size") -> int:
    """Return the bytes given by a number or by text such as "8GiB", "256 GB" or "1.5g"."""
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        # Larger integers might not fit into a float.
        value = float(text) if abs(text) < 2**64 else float("inf")
    else:
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", str(text))
        if match is None or match[2].lower() not in _SUFFIX:
            raise ConfigError(
                f"{name}: cannot read {text!r} as a byte size; write it like 8GiB or 256GB"
            )
        value = float(match[1]) * _SUFFIX[match[2].lower()]
    if not 0 < value < 2**63:
        raise ConfigError(f"{name}: {text!r} is not a positive byte size; write it like 8GiB")
    if value < KiB and str(text).strip().replace(".", "", 1).isdecimal():
        raise ConfigError(
            f"{name}: {text} without a unit is {value:g} bytes; did you mean {text}GiB?"
        )
    return round(value)


def format_bytes(count: int | float) -> str:
    """Format a number of bytes: 1610612736 -> "1.50 GiB"."""
    for unit, suffix in ((TiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if abs(count) >= unit:
            return f"{count / unit:.2f} {suffix}"
    return f"{count:.0f} B"


def format_bytes_up(count: int | float) -> str:
    """Format a number of bytes, rounded up to the digits that `format_bytes` shows.

    Use this for sizes that must be sufficient: 1610612737 -> "1.51 GiB".
    """
    unit = next((unit for unit in (TiB, GiB, MiB, KiB) if abs(count) >= unit), 1)
    digits = 100 if unit > 1 else 1  # Two decimal places are shown, or none for bytes.
    return format_bytes(math.ceil(count * digits / unit) / digits * unit)


# In bytes. Direct I/O and registered memory use whole pages.
PAGE = 4096


def align_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def format_seconds(seconds: float) -> str:
    """Format a duration: 95 -> "1 min 35 s"."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 100 else f"{seconds / 86400:.1f} days"


AUTO = "auto"
_INTERVAL = re.compile(r"(\d+|\d*\.\d+) *(s|sec|min|h|steps?)?")


@dataclass(frozen=True)
class Interval:
    """A number of steps or seconds, whichever is reached first; a value of 0 is ignored."""

    steps: int = 1
    seconds: float = 0.0

    @property
    def every_step(self) -> bool:
        return self == EVERY_STEP

    def __str__(self) -> str:
        parts = [counted(self.steps, "step")] if self.steps else []
        parts += [format_seconds(self.seconds)] if self.seconds else []
        return " or ".join(parts)


EVERY_STEP = Interval()


# Bounds on the number of steps from one write of the full state to the next.
LEAST_LOGGED, MOST_LOGGED = 2, 64


def log_steps(setting: str | int) -> int | None:
    """Parse the setting `log_gradients`, the number of steps between two writes of the full state.

    "off" means 0, and "auto" means None.
    """
    text = str(setting).strip().lower()
    if text in ("off", AUTO) and not isinstance(setting, bool):
        return 0 if text == "off" else None
    steps = int(text) if text.isdigit() else -1
    if not LEAST_LOGGED <= steps <= MOST_LOGGED:
        raise ConfigError(
            f"log_gradients is {setting!r}; it must be auto, off, or the number of steps from one "
            f"write of the full state to the next, {LEAST_LOGGED} to {MOST_LOGGED}"
        )
    return steps


def parse_interval(text: str | int, *, name: str) -> Interval | None:
    """Parse "step", a number of steps, or a time such as "10min"; return None for "auto"."""
    wanted = " ".join(str(text).lower().split())
    if wanted in ("step", AUTO):
        return EVERY_STEP if wanted == "step" else None
    match = _INTERVAL.fullmatch(wanted)
    if match is not None and float(match[1]) > 0 and not isinstance(text, bool):
        unit = {"s": 1, "sec": 1, "min": 60, "h": 3600}.get(match[2])
        if unit is not None and float(match[1]) * unit < 10**9:
            return Interval(0, float(match[1]) * unit)
        if unit is None and match[1].isdigit() and int(match[1]) < 10**9:
            return Interval(int(match[1]))
    raise ConfigError(
        f"{name}: got {text!r}, wants step, a number of steps, a time such as 90s, 10min or 1h, or "
        f"{AUTO}"
    )


def clock(seconds: float) -> str:
    """Format a duration as a clock: 5025 -> "1:23:45"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def counted(count: int, one: str, several: str = "") -> str:
    """Format a number with its noun: 1 -> "1 example", 2000 -> "2,000 examples"."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"
