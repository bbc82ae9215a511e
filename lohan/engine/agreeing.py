"""What the ranks of a run agree on before its first step: the device they share the work on, one
plan for all, the step that their stores are at. A process that is alone agrees with itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lohan.device.base import Device
from lohan.device.linked import LinkedCpuDevice
from lohan.device.ranks import Team, least
from lohan.errors import ConfigError, StoreError
from lohan.model.demand import Load
from lohan.model.layout import Blocks
from lohan.model.machine import Profile
from lohan.model.plan import Plan
from lohan.planner.best import best_plan
from lohan.planner.one_memory import plan_in_one_memory
from lohan.planner.planner import Wishes
from lohan.store.agreement import Standing, agreed_moves, make_move, standing_of
from lohan.store.engine import Engine
from lohan.store.lock import StoreLock
from lohan.store.store import Store


@dataclass(frozen=True)
class Room:
    """Memory of a rank: of the host and, where it has one of its own, of the device."""

    host_bytes: int
    device_bytes: int | None


def rank_device(device: Device, team: Team | None) -> Device:
    """Where a rank computes: blocks are gathered there, also if it is the CPU."""
    if team is None:
        return device
    made = device if device.linked else LinkedCpuDevice()
    team.connect(made.torch_device)
    return made


def check_durability(durability: str, team: Team | None) -> None:
    if team is not None and durability != "step":
        raise ConfigError(
            f"durability = {durability!r} goes with one rank, this run has {team.world}: their "
            'commits are agreed step by step; use durability = "step"'
        )


def agreed_plan(
    team: Team | None, blocks: Blocks, wishes: Wishes, *, host_bytes: int, device: Device,
    load: Load | None, profile: Profile | None,
) -> tuple[Plan, Room]:  # fmt: skip
    """The plan that all follow, made by the first for the least memory that any has."""
    room = device.memory_bytes() if device.linked else None
    if team is None:
        plan = best_plan(
            blocks, wishes, host_bytes=host_bytes, load=load, profile=profile, device_bytes=room
        )
        return plan, Room(host_bytes, room)
    host, own = least(team, [host_bytes, room or 0])
    pieces, shared = team.ranks.shards(blocks), replace(wishes, world=team.world)

    def make() -> list[Any]:
        if isinstance(device, LinkedCpuDevice):
            plan, taken = plan_in_one_memory(pieces, shared, host_bytes=host, load=load)
            return [plan.to_json(), host - taken, taken]
        plan = best_plan(
            pieces, shared, host_bytes=host, load=load, profile=profile, device_bytes=own
        )
        return [plan.to_json(), host, own]

    made, host, own = team.from_first(make)
    if isinstance(device, LinkedCpuDevice):
        device.memory = own
    return Plan.from_json(made), Room(host, own)


def open_store(team: Team | None, dirs: Sequence[Path], *, engine: str | Engine) -> Store:
    """The store of this rank, at the commit that all agree on."""
    if team is None:
        return Store.open(dirs, engine=engine)
    with team.all_or_none():
        own = _standing(Path(dirs[0]))
    said = [Standing(*found) for found in team.exchange([own.committed, own.prepared])]
    moves = agreed_moves(said)
    if moves is None:
        raise StoreError(
            f"the stores of the {team.world} ranks were never committed; start the run again with "
            "the same `lohan train` command"
        )
    store: Store | None = None
    try:
        with team.all_or_none():
            make_move(Path(dirs[0]), moves[team.rank])
            store = Store.open(dirs, engine=engine, meet=team.meet)
    except BaseException:
        if store is not None:
            store.close()
        raise
    return store


def _standing(primary: Path) -> Standing:
    """Of a store that no other process has open: a rank of before may still be on its way out."""
    if not primary.is_dir():
        return Standing(None, None)
    lock = StoreLock([primary])
    try:
        return standing_of(primary)
    finally:
        lock.release()
