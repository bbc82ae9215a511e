"""The performance of a machine: rates per lane and bytes per tier, measured or from a preset."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from lohan.errors import BudgetError, ConfigError
from lohan.util.settings import toml_value, wrong
from lohan.util.units import format_bytes, parse_bytes

Curve = tuple[tuple[float, float], ...]
WRITTEN_OFF_S = 3 * 365 * 86400.0  # The price of a machine is spread over three years.
POSITIVE = {"read", "write", "adam", "cores", "gpus"}  # Fields that must be greater than 0.


@dataclass(frozen=True, kw_only=True)
class Drive:
    """One SSD, or a folder on it. Rates are in bytes per second.

    A value of 0 for `bytes`, `endurance_bytes` or `usd` means that it is not known.
    """

    name: str
    read: float
    write: float
    # Combined rate of both directions when reads and writes alternate. 0 means that each direction
    # runs at its own rate.
    mixed: float = 0.0
    bytes: int = 0
    endurance_bytes: float = 0.0  # Rated endurance, in bytes written.
    usd: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The rates and sizes of one machine.

    If there are several GPUs, compute and link rates are those of one GPU. `drives` and
    `host_bytes` are those of the machine.
    """

    name: str
    device: str  # "cpu", or the name of a GPU.
    device_bytes: int = 0  # 0: compute uses host memory, and there is no link.
    # True if the GPU computes in host memory, as on a DGX Spark. `device_bytes` is 0 then.
    unified: bool = False
    # Points (tokens at once, FLOP/s) for the forward of a block, with increasing tokens.
    compute: Curve
    backward: Curve = ()  # The same for the backward of a block. Empty: use `compute`.
    block_width: int = 0  # Hidden size of the measured block. 0: no single block.
    head_flops: float = 0.0  # FLOP/s of the head. 0: the last point of `compute`.
    # Bytes/s of the memory that compute uses. It applies to sums of gradients and, if `compute` was
    # not measured on a whole block (block_width is 0), to activations. 0: `compute` includes
    # everything.
    device_rate: float = 0.0
    # Seconds of the thread that launches kernels, per slice of a block. A pass over a block lasts
    # at least this long for each slice, however fast the device is. 0: compute runs on that thread.
    forward_launch_s: float = 0.0
    backward_launch_s: float = 0.0  # includes recomputation
    h2d: float = 0.0  # bytes/s
    d2h: float = 0.0
    link_limit: float = 0.0  # Bytes/s in each direction of all GPU links together. 0: no limit.
    # Bytes/s in each direction between a GPU and the others. 0: traffic uses h2d and d2h.
    net: float = 0.0
    host_bytes: int
    host_rate: float = 0.0  # Bytes/s of main memory, shared by all users. 0: not known.
    adam: float  # Parameters/s with all cores and the state in host memory.
    cores: float = 8.0  # Cores that an update may use.
    drives: tuple[Drive, ...] = ()
    # Bytes/s of all drives together, both directions. 0: no limit.
    ssd_limit: float = 0.0
    io_share: float = 0.0  # Fraction of compute speed lost while the drives work.
    compute_share: float = 0.0  # Fraction of drive speed lost while the cores compute.
    action_s: float = 0.0  # Fixed cost of one transfer or update.
    commit_s: float = 0.0  # Duration of one commit of the store.
    gpus: int = 1
    server_usd: float = 0.0  # Price without GPUs and drives.
    gpu_usd: float = 0.0
    memory_usd: float = 0.0  # Price per GB of main memory beyond `host_bytes`.

    @property
    def has_link(self) -> bool:
        return self.device_bytes > 0

    @property
    def has_gpu(self) -> bool:
        return self.has_link or self.unified

    @property
    def usd(self) -> float:
        return self.server_usd + self.gpus * self.gpu_usd + sum(drive.usd for drive in self.drives)

    @property
    def usd_per_s(self) -> float:
        """The cost per second of everything except the drives, whose cost is per written byte."""
        return (self.usd - sum(drive.usd for drive in self.drives)) / WRITTEN_OFF_S

    @property
    def usd_per_written_byte(self) -> float:
        """The cost per written byte if all drives share the writes equally; 0 if not known."""
        prices = [d.usd / d.endurance_bytes if d.endurance_bytes else 0.0 for d in self.drives]
        return sum(prices) / len(prices) if all(prices) and prices else 0.0

    def flops_at(self, tokens: float) -> float:
        """Return the forward FLOP/s of a block that processes `tokens` at once."""
        return _at(self.compute, tokens)

    def backward_flops_at(self, tokens: float) -> float:
        """Return the backward FLOP/s of a block, without the recomputation before it."""
        return _at(self.backward or self.compute, tokens)

    @property
    def ssd_read(self) -> float:
        return self._limited(sum(drive.read for drive in self.drives))

    @property
    def ssd_write(self) -> float:
        return self._limited(sum(drive.write for drive in self.drives))

    @property
    def ssd_mixed(self) -> float:
        """Bytes/s of both directions together when they alternate.

        0 means that reads and writes run at their own rates, one after the other.
        """
        return self._limited(sum(drive.mixed for drive in self.drives))

    def _limited(self, rate: float) -> float:
        return min(rate, self.ssd_limit) if self.ssd_limit else rate

    @property
    def net_rate(self) -> float:
        """Bytes/s that a rank can receive from others while it sends to them at the same rate."""
        return self.net or min(self.h2d, self.d2h) or math.inf

    @property
    def net_over_links(self) -> bool:
        """True if traffic between ranks also uses the links to host memory."""
        return self.has_link and not self.net

    def share(self, ranks: int) -> Profile:
        """Return the machine as seen by each of `ranks` ranks on it.

        Memory, cores and drives are divided. Links are divided if they have a common limit.
        """
        if ranks == 1:
            return self
        rates = {
            name: getattr(self, name) / ranks
            for name in ("adam", "cores", "ssd_limit", "host_rate")
        }
        for name in ("h2d", "d2h"):
            common = self.link_limit / ranks or math.inf
            rates[name] = min(getattr(self, name), common)
        drives = tuple(
            replace(
                d,
                read=d.read / ranks,
                write=d.write / ranks,
                mixed=d.mixed / ranks,
                bytes=d.bytes // ranks,
            )
            for d in self.drives
        )
        divided = (
            self
            if self.has_link
            else replace(  # Other ranks compute on the same cores.
                self,
                compute=_divided(self.compute, ranks),
                backward=_divided(self.backward, ranks),
                head_flops=self.head_flops / ranks,
            )
        )
        return replace(divided, host_bytes=self.host_bytes // ranks, drives=drives, **rates)

    def check_host(self, host_bytes: int) -> None:
        """Raise BudgetError if the machine has unified memory, and less of it than `host_bytes`.

        Unified memory is part of the board and cannot be extended.
        """
        if self.unified and host_bytes > self.host_bytes:
            raise BudgetError(
                f"--host allows {format_bytes(host_bytes)}, but {self.name} has "
                f"{format_bytes(self.host_bytes)} for host and GPU together, which cannot be "
                "extended; lower --host"
            )

    def with_host(self, host_bytes: int) -> Profile:
        """Return the same machine with `host_bytes` of main memory.

        Memory beyond the machine's own adds to the price. Memory that a plan leaves unused does not
        lower it.
        """
        self.check_host(host_bytes)
        more = max(0, host_bytes - self.host_bytes) * self.memory_usd / 1e9
        return replace(self, host_bytes=host_bytes, server_usd=self.server_usd + more)

    def with_drives(self, count: int) -> Profile:
        """Return the same machine with `count` drives, all like its first."""
        if not self.drives:
            raise ConfigError(f"{self.name} has no drive to take {count} of")
        return replace(self, drives=(self.drives[0],) * count)

    def to_toml(self) -> str:
        lines = [
            f"{field.name} = {toml_value(getattr(self, field.name))}"
            for field in fields(self)
            if field.name != "drives"
        ]
        for drive in self.drives:
            table = asdict(drive).items()
            lines += ["", "[[drives]]", *(f"{key} = {toml_value(value)}" for key, value in table)]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any], *, source: str) -> Profile:
        """Create a profile from the tables of a TOML file.

        Byte counts may be text such as "24GiB".
        """
        rest = {key: value for key, value in data.items() if key != "drives"}
        drives = data.get("drives", ())
        if not isinstance(drives, (list, tuple)) or not all(isinstance(d, Mapping) for d in drives):
            raise wrong(f"{source}: drives", drives, "[[drives]] tables")
        parsed = (Drive(**_values(Drive, table, f"{source}: drive")) for table in drives)
        profile = cls(**_values(cls, rest, source), drives=tuple(parsed))
        if profile.unified and profile.device_bytes:
            raise ConfigError(
                f"{source}: device_bytes is {profile.device_bytes}, but a machine with unified "
                "memory has only host_bytes; leave device_bytes out"
            )
        return profile

    @classmethod
    def read(cls, path: Path) -> Profile:
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"machine profile {path}: {error}; correct or replace it") from None
        return cls.from_mapping(data, source=str(path))


def _divided(points: Curve, times: int) -> Curve:
    return tuple((tokens, rate / times) for tokens, rate in points)


def _at(points: Curve, tokens: float) -> float:
    """Interpolate linearly between points.

    The value is proportional to `tokens` below the first point and constant above the last. A
    single point applies everywhere.
    """
    if tokens <= points[0][0]:
        return points[0][1] * tokens / points[0][0] if len(points) > 1 else points[0][1]
    for (t0, f0), (t1, f1) in pairwise(points):
        if tokens <= t1:
            return f0 + (f1 - f0) * (tokens - t0) / (t1 - t0)
    return points[-1][1]


def _values(cls: type[Profile] | type[Drive], data: Mapping[str, Any], source: str) -> Any:
    declared = {field.name: field for field in fields(cls)}
    for key in data:
        if key not in declared:
            near = difflib.get_close_matches(key, declared, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(declared)}"
            raise ConfigError(f"{source}: unknown key {key!r}; {hint}")
    for name, field in declared.items():
        if field.default is MISSING and name not in data:
            raise ConfigError(f"{source}: {name} is missing; add it")
    return {key: _value(declared[key], value, f"{source}: {key}") for key, value in data.items()}


def _value(field: Field[Any], value: Any, name: str) -> Any:
    if field.type == "str":
        if not isinstance(value, str):
            raise wrong(name, value, "text")
        return value
    if field.type == "bool":
        if not isinstance(value, bool):
            raise wrong(name, value, "true or false")
        return value
    if field.type == "Curve":
        return _curve(value, name)
    if field.name.endswith("bytes") and isinstance(value, str):
        return parse_bytes(value, name=name)
    if not _is_number(value) or value < 0:
        raise wrong(name, value, "a number that is not negative")
    if field.name.endswith("_share") and value >= 1:
        raise wrong(name, value, "a share that is less than 1")
    if field.name in POSITIVE and not value:
        raise wrong(name, value, "a number above 0")
    if field.type == "int" and value != int(value):
        raise wrong(name, value, "a whole number")
    return int(value) if field.type == "int" else float(value)


def _curve(value: Any, name: str) -> Curve:
    expected = "pairs such as [[256, 60e12], [4096, 120e12]] with rising numbers of tokens"
    pairs = value if isinstance(value, (list, tuple)) else [value]
    for pair in pairs:
        is_pair = isinstance(pair, (list, tuple)) and len(pair) == 2
        if not is_pair or not all(_is_number(number) and number > 0 for number in pair):
            raise wrong(name, value, expected)
    if any(a[0] >= b[0] for a, b in pairwise(pairs)):
        raise wrong(name, value, expected)
    if not pairs and not name.endswith("backward"):
        raise wrong(name, value, expected)
    return tuple((float(tokens), float(rate)) for tokens, rate in pairs)


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2.0**1000
    )
