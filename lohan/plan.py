"""What the planner decides and the executor follows: frozen, printable, saved with the run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lohan.units import format_bytes


@dataclass(frozen=True)
class LedgerEntry:
    """Bytes of one owner in one tier."""

    tier: str
    owner: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    mode: str  # fp32 | bf16 | fp16
    micro_batch: int | None  # None: the whole batch at once
    chunk_params: int
    head_tokens: int
    weight_slots: int
    ledger: tuple[LedgerEntry, ...] = ()

    def tier_bytes(self, tier: str) -> int:
        return sum(entry.bytes for entry in self.ledger if entry.tier == tier)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        ledger = tuple(LedgerEntry(**entry) for entry in data["ledger"])
        return cls(**{**data, "ledger": ledger})

    def describe(self) -> list[str]:
        """The ledger as lines of text, one owner each."""
        return [f"{e.tier:5} {e.owner:28} {format_bytes(e.bytes):>12}" for e in self.ledger]
