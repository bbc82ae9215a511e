"""What a plan costs in bytes: its ledger, by tier and owner."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from lohan.model.demand import Load
from lohan.model.layout import Blocks, Group
from lohan.model.plan import Kept, LedgerEntry, Plan
from lohan.model.state import FLOAT, chunks
from lohan.optim import USUAL, StateKind
from lohan.planner.device_books import IN_FLIGHT, DeviceBooks
from lohan.planner.facts import Facts, numel
from lohan.planner.moments import INPUTS, KEPT, Call, Moment, Rules, most_held

BUFFERS = "activation buffers"


class Books(Facts):
    """Keeps the ledger of plans for one model, batch and micro-batch. `linked`: the device has a
    memory of its own; otherwise compute works in host memory."""

    def __init__(
        self, blocks: Blocks, mode: str, load: Load | None, micro_batch: int | None,
        *, linked: bool = False, generations: int = 2, gradients_on_ssd: bool | None = None,
        kind: StateKind = USUAL, world: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(blocks, mode, load, micro_batch, kind=kind, world=world)
        self.linked, self._generations, self._held_on_ssd = linked, generations, gradients_on_ssd
        self._on_device = DeviceBooks(self)
        self.priced: dict[tuple[int, Kept], tuple[float, float, float]] = {}  # what `choices` found

    def with_ledger(self, plan: Plan) -> Plan:
        device = self._on_device.ledger(plan) if self.linked else {}
        host = {**self._state(plan), **self.activations(plan)}
        if not self.linked and self.found is not None:
            host |= self._at_most(plan)
        entries = [LedgerEntry("device", owner, count) for owner, count in device.items() if count]
        entries += [LedgerEntry("host", owner, count) for owner, count in host.items() if count]
        moved = tuple(self.site_bytes(plan, name) for name in plan.moved_out)
        return replace(plan, moved_bytes=moved, ledger=(*entries, *self._on_ssd(plan)))

    @property
    def staying(self) -> tuple[str, ...]:
        """The last block is the first in backward: its activations need not leave the device, if
        it has the room."""
        return tuple(self.block_sites[-1:]) if self.linked and self.slices <= IN_FLIGHT else ()

    def relieved(self, plan: Plan, device_bytes: int) -> Plan | None:
        """The plan, with activations staying on the device only if there is room for them; None if
        there is no room for it without them either."""
        if not self.linked or self.device_bytes(plan) <= device_bytes:
            return plan
        left = replace(plan, staying=())
        return left if plan.staying and self.device_bytes(left) <= device_bytes else None

    def rest_bytes(self, plan: Plan) -> int:
        """Host memory that everything but activations takes when most is held."""
        ledger = self.with_ledger(plan).ledger
        own = (INPUTS, KEPT, BUFFERS)
        return sum(e.bytes for e in ledger if e.tier == "host" and e.owner not in own)

    def device_bytes(self, plan: Plan) -> int:
        return sum(self._on_device.ledger(plan).values()) if self.linked else 0

    # -- state ------------------------------------------------------------------------------------

    @cached_property
    def _trained_sizes(self) -> list[int]:
        return [group.numel for group in self.blocks.trained]

    def _on_ssd(self, plan: Plan) -> list[LedgerEntry]:
        trained, frozen = numel(self.blocks.trained), numel(self.frozen)
        copies, stored = self._generations, trained * self.mode.weight_bytes
        stored += sum(self.mode.state_total(n, plan.chunk_params) for n in self._trained_sizes)
        entries = [LedgerEntry("ssd", f"weights and state x{copies}", copies * stored)]
        if frozen:
            once = frozen * self.mode.weight_bytes
            entries.append(LedgerEntry("ssd", "frozen weights", once))
        # A store is made with room for all of them if they are held: a later plan may spill more.
        room = plan.holds_all if self._held_on_ssd is None else self._held_on_ssd
        if room:
            entries.append(LedgerEntry("ssd", "room for held gradients", trained * FLOAT))
        if plan.moved_out:
            moved = sum(self.site_bytes(plan, name) for name in plan.moved_out)
            entries.append(LedgerEntry("ssd", "activations", moved))
        return entries

    def _state(self, plan: Plan) -> dict[str, int]:
        mode, by_key = self.mode, self.blocks.by_key
        pinned = set(plan.pinned_weights)
        largest = max((g.numel for g in self.moving if g.key not in pinned), default=0)
        biggest = max((group.numel for group in self.blocks.trained), default=0)
        chunk = min(plan.chunk_params, biggest)
        resident, learning = self.resident
        state = sum(
            mode.state_size(cut.stop - cut.start)
            for key, index in plan.pinned_state
            for cut in (chunks(by_key[key], plan.chunk_params)[index],)
        )
        return {
            "weight slots": plan.weight_slots * largest * mode.weight_bytes,
            "optimizer state ring": plan.ring * mode.state_size(chunk),
            "gradient staging": plan.ring * chunk * FLOAT if plan.spilled else 0,
            "resident parameters": learning * (mode.weight_bytes + FLOAT),
            "waiting gradients": self._gradient_bytes(plan),
            "pinned weights": mode.weight_bytes
            * (resident + sum(by_key[key].numel for key in pinned)),
            "pinned optimizer state": state,
        }

    def _gradient_bytes(self, plan: Plan) -> int:
        """Gradients that outlive their block's backward: of tied weights, of blocks whose update
        is under way, and those that are held."""
        width, held = self.gradient_width, self._held(plan)
        passing = sorted((g.numel for g in self.trained if g.key not in held), reverse=True)
        tied = numel(g for g in self.tied if self.linked or g.key not in held)
        kept = sum(group.numel for group in self.trained if group.key in held)
        return width * (kept + sum(passing[: plan.grad_groups])) + FLOAT * tied

    def _held(self, plan: Plan) -> set[str]:
        """Groups whose gradients wait in memory for the next forward."""
        if plan.holds_all:
            return {group.key for group in self.trained} - set(plan.spilled)
        return set(plan.deferred)

    # -- activations ------------------------------------------------------------------------------

    @cached_property
    def _input_bytes(self) -> int:
        """Of all sites."""
        found = self.found
        return sum(site.input_bytes for site in found.sites.values()) if found else 0

    def activations(self, plan: Plan) -> dict[str, int]:
        """Block inputs and what else is kept until backward, in host memory."""
        if self.found is None:
            return {}
        moved = [self.site_bytes(plan, name) for name in plan.moved_out]
        buffers = plan.act_buffers * max(moved, default=0)
        gone = {*plan.moved_out, *plan.staying}
        inputs = self._input_bytes - sum(self.found.sites[name].input_bytes for name in gone)
        kept = 0
        if plan.kept:
            sizes = self.sizes
            kept = sum(sizes.by_site(plan.kept))
            kept -= sum(sizes.bytes_of(plan.kept, name) for name in gone)
        return {INPUTS: inputs, KEPT: kept, BUFFERS: buffers}

    # -- compute ----------------------------------------------------------------------------------

    def _at_most(self, plan: Plan) -> Moment:
        """What compute holds in host memory when that is most."""
        found, by_key = self.found, self.blocks.by_key
        assert found is not None
        groups = {s.name: tuple(by_key[key] for key in s.groups) for s in self.blocks.sites}
        calls = [self._call(plan, name, groups[name]) for name in found.sites]
        if self.head is not None:
            streams, work = found.outside + self.stream, self.head_work(plan)
            calls.append(Call(groups=groups[self.head.name], streams=streams, work=work))
        rules = Rules(
            held=self._held(plan), groups=plan.grad_groups, width=self.gradient_width,
            moving=plan.act_buffers,
        )  # fmt: skip
        return most_held(calls, rules)

    def _call(self, plan: Plan, name: str, groups: tuple[Group, ...]) -> Call:
        """Its backward takes what is kept of a slice as its own."""
        assert self.found is not None
        site, kept = self.found.sites[name], self.sizes.bytes_of(plan.kept, name)
        moved, inputs = name in plan.moved_out, site.input_bytes
        return Call(
            groups=groups, inputs=0 if moved else inputs, kept=0 if moved else kept,
            moved=inputs + kept if moved else 0, ahead=site.forward_bytes,
            work=max(0, site.peak_bytes - kept // self.slices),
            # Gradients of the whole batch, where a block's work has those of a slice.
            streams=2 * (self.stream - self.stream // self.slices),
        )  # fmt: skip
