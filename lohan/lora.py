"""Adapters a user asks for: few parameters that learn beside a base that stays as it is."""

from __future__ import annotations

from dataclasses import dataclass

from lohan.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Two thin matrices of `rank` beside every layer that `targets` names, or beside all linear
    layers of the blocks. Their product counts `alpha / rank` times; not given, twice."""

    rank: int
    alpha: float | None = None
    targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"Lora rank is {self.rank}; it must be at least 1")
