"""`lohan` as several ranks, each a fork of the forge, as torchrun would start them."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from tests.support.forked_commands import Ended, Forge, Run


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return int(place.getsockname()[1])


def start(forge: Forge, world: int, *args: object, **options: dict[int, Any]) -> list[Run]:
    """`options`: of the forge, by rank."""
    port = free_port()
    return [
        forge.start(
            *args,
            env=environment(rank, world, port) if world > 1 else None,
            **{name: by_rank[rank] for name, by_rank in options.items() if rank in by_rank},
        )
        for rank in range(world)
    ]


def run(forge: Forge, world: int, *args: object, **options: dict[int, Any]) -> list[Ended]:
    return [process.wait() for process in start(forge, world, *args, **options)]


def said(ended: list[Ended]) -> str:
    """All that went wrong, for an assertion."""
    return "\n".join(f"rank {n} ended with {e.code}: {e.err}" for n, e in enumerate(ended))


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def case(forge: Forge, world: int, name: str, folder: Path) -> list[Ended]:
    """Run a function of team_cases.py on every rank, or without ranks if there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    port, given = free_port(), {"LOHAN_CASE": str(folder)}
    processes = [
        forge.start(
            "--help",
            before=f"team_cases:{name}",
            env=given | (environment(rank, world, port) if world > 1 else {}),
        )
        for rank in range(world)
    ]
    return [process.wait() for process in processes]


def found(folder: Path, world: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(world)]


def assembled(found: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Parameters from the shards of all ranks."""
    whole: dict[str, list[float]] = {}
    for rank in found:
        for name, (begin, values) in rank["shards"].items():
            assert not values or len(whole.get(name, [])) == begin
            whole[name] = whole.get(name, []) + values
    return whole
