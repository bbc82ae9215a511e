"""What a machine can do: rates per lane and bytes per tier, measured or from a preset."""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from lohan.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Drive:
    """One SSD (or folder on it). Rates in bytes per second; 0 bytes or USD: not known."""

    name: str
    read: float
    write: float
    mixed: float = 0.0  # total of both directions when reads and writes alternate; 0: harmonic
    bytes: int = 0
    endurance_bytes: float = 0.0  # writes it is rated for
    usd: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Rates are of one GPU where there are several; `drives` and `host_bytes` are the machine's."""

    name: str
    device: str  # "cpu", or the name of a GPU
    device_bytes: int = 0  # 0: compute works in host memory, there is no link
    compute: tuple[tuple[float, float], ...]  # (tokens at once, FLOP/s) of a block, rising tokens
    head_flops: float = 0.0  # FLOP/s of the head; 0: as the last point of `compute`
    h2d: float = 0.0  # bytes/s
    d2h: float = 0.0
    host_bytes: int
    adam: float  # parameters/s with all cores, state in host memory
    drives: tuple[Drive, ...] = ()
    ssd_limit: float = 0.0  # bytes/s of all drives together, both directions; 0: no limit
    io_share: float = 0.0  # of compute speed, lost while the drives work
    action_s: float = 0.0  # fixed cost of one transfer or update
    gpus: int = 1
    server_usd: float = 0.0  # without GPUs and drives
    gpu_usd: float = 0.0

    @property
    def has_link(self) -> bool:
        return self.device_bytes > 0

    @property
    def usd(self) -> float:
        return self.server_usd + self.gpus * self.gpu_usd + sum(drive.usd for drive in self.drives)

    def flops_at(self, tokens: float) -> float:
        """FLOP/s of a block that sees so many tokens at once; linear between the points."""
        points = self.compute
        if tokens <= points[0][0]:
            return points[0][1] * tokens / points[0][0] if len(points) > 1 else points[0][1]
        for (t0, f0), (t1, f1) in zip(points, points[1:], strict=False):
            if tokens <= t1:
                return f0 + (f1 - f0) * (tokens - t0) / (t1 - t0)
        return points[-1][1]

    @property
    def ssd_read(self) -> float:
        return self._limited(sum(drive.read for drive in self.drives))

    @property
    def ssd_write(self) -> float:
        return self._limited(sum(drive.write for drive in self.drives))

    def _limited(self, rate: float) -> float:
        return min(rate, self.ssd_limit) if self.ssd_limit else rate

    def with_drives(self, count: int) -> Profile:
        """The same machine with so many drives, all like its first."""
        if not self.drives:
            raise ConfigError(f"{self.name} has no drive to take {count} of")
        return replace(self, drives=(self.drives[0],) * count)

    def to_toml(self) -> str:
        lines = [
            f"{field.name} = {_toml(getattr(self, field.name))}"
            for field in fields(self)
            if field.name != "drives"
        ]
        for drive in self.drives:
            lines += ["", "[[drives]]", *(f"{k} = {_toml(v)}" for k, v in asdict(drive).items())]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_mapping(cls, data: dict[str, Any], *, source: str) -> Profile:
        known = {field.name for field in fields(cls)}
        for key in data:
            if key not in known:
                raise ConfigError(f"{source}: {key!r} is not a field of a machine profile")
        values = {**data, "drives": tuple(Drive(**drive) for drive in data.get("drives", ()))}
        values["compute"] = tuple((float(t), float(f)) for t, f in data["compute"])
        return cls(**values)

    @classmethod
    def read(cls, path: Path) -> Profile:
        try:
            data = tomllib.loads(path.read_text())
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"machine profile {path}: {error}") from None
        return cls.from_mapping(data, source=str(path))


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return repr(value)
