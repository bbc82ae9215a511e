"""Plans of one micro-batch size: the smallest that works, then what memory is spent on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from lohan.model.layout import GROUP_ALIGN, Blocks
from lohan.model.machine import Profile
from lohan.model.plan import BatchWorkload, Kept, Plan, PlanOptions
from lohan.model.state import FLOAT, chunks
from lohan.planner.activations import Choice, choose, resolve_activation_policy
from lohan.planner.memory import LOGIT_COPIES, MemoryModel
from lohan.util.units import EVERY_STEP, MiB, align_up

# -- What memory that is left over is spent on, each as far as the budgets go ----------------------


class GreedyFill:
    """Grows plans of one ledger within a host `limit`; `fits` knows all budgets."""

    def __init__(self, memory: MemoryModel, limit: int, fits: Callable[[Plan], bool]) -> None:
        self._memory, self._limit, self._fits = memory, limit, fits

    def if_fits(self, plan: Plan, **change: object) -> Plan:
        grown = self._memory.with_ledger(replace(plan, **change))  # type: ignore[arg-type]
        return grown if self._fits(grown) else plan

    def unspill(self, plan: Plan) -> Plan:
        """Held gradients stay in memory, the first blocks' first: they are held for the least
        time and needed the soonest."""
        spilled = set(plan.spilled_gradients)
        first = [group.key for group in self._memory.trained if group.key in spilled]

        def without(count: int) -> dict[str, object]:
            gone = set(first[:count])
            return {
                "spilled_gradients": tuple(key for key in plan.spilled_gradients if key not in gone)
            }

        return self._largest_change(plan, len(first), without)

    def defer(self, plan: Plan, share: float) -> Plan:
        """The last blocks' updates wait for the next forward, which reaches them last."""
        allowed = share * sum(group.numel for group in self._memory.trained)
        deferred: list[str] = []
        for group in reversed(self._memory.trained):
            allowed -= group.numel
            if allowed < 0:
                break
            deferred.append(group.key)
        return self._largest_change(
            plan, len(deferred), lambda count: {"deferred": tuple(deferred[:count])}
        )

    def _largest_change(
        self, plan: Plan, limit: int, change: Callable[[int], dict[str, object]]
    ) -> Plan:
        """The plan with as much of a change as fits; half of it takes less than all of it."""
        best, low, high = plan, 0, limit + 1
        tried = limit  # often all of it fits
        while low + 1 < high:
            grown = self.if_fits(plan, **change(tried))
            best, low, high = (best, low, tried) if grown is plan else (grown, tried, high)
            tried = (low + high) // 2
        return best

    def cache_on_device(self, plan: Plan) -> Plan:
        """More weight slots on the device: the last blocks of forward need not be loaded again.
        What compute needs must be known, or they would take its room."""
        while (
            self._memory.has_own_memory
            and self._memory.workload is not None
            and plan.device_slots < len(self._memory.moving)
        ):
            grown = self.if_fits(plan, device_slots=plan.device_slots + 1)
            if grown is plan:
                break
            plan = grown
        return plan

    def cache_groups(self, plan: Plan) -> Plan:
        """Weights and state of as many groups as fit: they need not be read, and where updates
        wait, they are written during backward. Large ones first or, where `_spreads`, spread."""
        groups = [g for g in self._memory.trained if g.key not in plan.host_cached_weights]
        if not (even := _spreads(plan)):
            groups.sort(key=lambda group: -group.numel)
        names = [group.key for group in groups]
        of_group = {
            g.key: [(g.key, chunk.index) for chunk in chunks(g, plan.chunk_params)] for g in groups
        }

        def some(count: int) -> dict[str, object]:
            keys = spread(names, count) if even else names[:count]
            state = (chunk for key in keys for chunk in of_group[key])
            return {
                "host_cached_weights": (*plan.host_cached_weights, *keys),
                "host_cached_state": tuple(state),
            }

        return self._largest_change(plan, len(groups), some)

    def cache_weights(self, plan: Plan) -> Plan:
        """Large groups first. Of groups of one size as many as fit."""
        cached = plan.host_cached_weights
        by_size: dict[int, list[str]] = {}
        for group in sorted(self._memory.moving, key=lambda group: -group.numel):
            if group.key not in cached:
                by_size.setdefault(group.numel, []).append(group.key)
        for keys in by_size.values():
            plan = self._cache_some(plan, keys)
        return plan

    def _cache_some(self, plan: Plan, keys: Sequence[str]) -> Plan:
        before = plan.host_cached_weights
        return self._largest_change(
            plan, len(keys), lambda count: {"host_cached_weights": (*before, *keys[:count])}
        )

    def cache_state(self, plan: Plan) -> Plan:
        """As much as fits, the first groups first or, where `_spreads`, spread over all groups."""
        sizes = {
            (group.key, chunk.index): self._memory.state_format.state_size(chunk.stop - chunk.start)
            for group in self._memory.blocks.trained
            for chunk in chunks(group, plan.chunk_params)
        }
        left, total, seen = self._limit - plan.tier_bytes("host"), sum(sizes.values()), 0
        room, cached = left, set(plan.host_cached_state)
        for even in (True, False) if _spreads(plan) else (False,):
            for key, size in sizes.items():
                seen += size
                due = not even or (room - left + size) * total <= room * seen
                if key not in cached and size <= left and due:
                    left -= size
                    cached.add(key)
        in_order = tuple(key for key in sizes if key in cached)
        return self._memory.with_ledger(replace(plan, host_cached_state=in_order))


def _spreads(plan: Plan) -> bool:
    """All updates wait for the next forward, in every step: if what stays in memory is spread over
    the model, forward never waits for many chunks in a row."""
    return plan.commits_by_interval and plan.needs_all_gradients


# -- Sizer ----------------------------------------------------------------------------------------


SMALLEST_CHUNK, LARGEST_CHUNK = 2**17, 2**26  # parameters
MOST_CHUNKS = 128  # in which a group is cut
SMALLEST_HEAD = 16  # tokens
HEAD_BYTES = 128 * MiB  # of the head for one slice, when the budget allows
DEVICE_HEAD = 1024  # tokens of a slice: as fast as any larger one on a device
MOST_DEFERRED = 0.25  # of the parameters, with `balanced`, on an unknown machine
ACT_BUFFERS = 3  # blocks' activations in flight between a device and SSD, in host memory
DEVICE_SLOTS = 3  # weights on the device: in use, arriving, and one free


class Sizer:
    """Plans of one micro-batch size, from the smallest upwards."""

    def __init__(
        self,
        blocks: Blocks,
        options: PlanOptions,
        workload: BatchWorkload | None,
        micro_batch: int | None,
        profile: Profile | None,
        device: int,
    ) -> None:
        self.blocks, self.options, self.workload, self.profile = blocks, options, workload, profile
        self.micro_batch, self.device = micro_batch, device
        self.memory = MemoryModel(
            blocks, options.dtype, workload, micro_batch, has_own_memory=self.device > 0,
            generations=2 if options.two_generations else 1,
            gradients_on_ssd=options.gradients_on_ssd, kind=options.kind, world=options.world,
            device_overhead=options.device_overhead, grad_dtype=options.grad_dtype,
        )  # fmt: skip
        self.moving = self.memory.moving

    def smallest(self, host_bytes: int) -> Plan:
        """One block at a time and small buffers; the head slice as large as it may be."""
        options = self.options
        widest = max((len(site.groups) for site in self.blocks.sites), default=1)
        small = self._small_groups()
        slots = self._widest_without(small)
        plan = Plan(
            dtype=options.dtype, micro_batch=self.micro_batch, tiles=self._tiles,
            overlap=options.overlap,
            update_mode=options.update_mode, clip=options.clip, clip_by=options.clip_by,
            grad_dtype=options.grad_dtype,
            kind=options.kind, can_rerun=options.can_rerun, commit=options.commit or EVERY_STEP,
            chunk_params=options.chunk_params or self._first_chunk(host_bytes),
            head_tokens=options.head_tokens or _head_tokens(self.workload, self.device),
            weight_slots=slots, host_cached_weights=small, window=0, ring=1, grad_groups=1,
            device_slots=min(2 * widest, DEVICE_SLOTS) if self.device else 0,
            staying=self.memory.staying, world=options.world,
        )  # fmt: skip
        if plan.needs_all_gradients:
            plan = replace(
                plan, spilled_gradients=tuple(group.key for group in self.memory.trained)
            )
            if options.gradients_on_ssd is False:
                plan = replace(plan, spilled_gradients=())
        plan = self.memory.with_ledger(plan)
        while (change := self._smaller(plan, host_bytes)) is not None:
            plan = self.memory.with_ledger(replace(plan, **change))  # type: ignore[arg-type]
        return self._with_spilled_sites(plan, host_bytes)

    @property
    def _tiles(self) -> int:
        if self.workload is not None:
            return self.workload.tiles
        return self.options.tiles if isinstance(self.options.tiles, int) else 0

    def _small_groups(self) -> tuple[str, ...]:
        """Groups that are small next to another of every site they belong to, as adapters are: they
        stay in memory if that takes less than slots for them, which have the largest one's size."""
        by_key = self.blocks.by_key
        main = {max(s.groups, key=lambda k: by_key[k].numel) for s in self.blocks.sites if s.groups}
        small = tuple(group.key for group in self.moving if group.key not in main)
        saved = self._widest_without(()) - self._widest_without(small)
        largest = max((group.numel for group in self.moving), default=0)
        return small if sum(by_key[key].numel for key in small) < saved * largest else ()

    def _widest_without(self, cached: tuple[str, ...]) -> int:
        """Weight slots that one block needs, besides what is cached."""
        sites = self.blocks.sites
        return max((sum(key not in cached for key in site.groups) for site in sites), default=1)

    def _smaller(self, plan: Plan, host_bytes: int) -> dict[str, object] | None:
        """The next change that saves memory in a tier that has too little, or None."""
        head = plan.head_tokens // 2
        if plan.tier_bytes("device") > self.device:
            if plan.staying:
                return {"staying": ()}
            if head >= SMALLEST_HEAD and self.options.head_tokens is None:
                return {"head_tokens": head}
            if plan.device_grads > 1:
                return {"device_grads": 1} if plan.head_alone else {"head_alone": True}
            fewer = plan.device_slots - 1
            widest = max((len(site.groups) for site in self.blocks.sites), default=1)
            return {"device_slots": fewer} if self._last_resort and fewer >= widest else None
        if plan.tier_bytes("host") > host_bytes:
            if self.options.chunk_params is None and plan.chunk_params > self._smallest_chunk():
                return {"chunk_params": align_up(plan.chunk_params // 2, GROUP_ALIGN)}
            if head >= SMALLEST_HEAD and not self.device and self.options.head_tokens is None:
                return {"head_tokens": head}
        return None

    @property
    def _last_resort(self) -> bool:
        """No smaller micro-batch is left to be tried."""
        return (
            self.workload is None or self.micro_batch == 1 or self.options.micro_batch is not None
        )

    def _fits(self, plan: Plan, limit: int) -> bool:
        return plan.tier_bytes("host") <= limit and plan.tier_bytes("device") <= self.device

    def _with_spilled_sites(self, plan: Plan, limit: int) -> Plan:
        """Activations go to SSD of as many blocks as it takes, spread over all of them: the drives
        are busy evenly then."""
        names = [name for name in self.memory.block_sites if name not in plan.staying]
        few, many = 0, len(names)
        while plan.tier_bytes("host") > limit and few < many:
            middle = (few + many) // 2
            tried = self.memory.with_ledger(replace(plan, spilled_sites=spread(names, middle)))
            few, many = (few, middle) if tried.tier_bytes("host") <= limit else (middle + 1, many)
        moved = self.memory.with_ledger(replace(plan, spilled_sites=spread(names, few)))
        # Where nothing is enough, small inputs take less than the buffers that they leave through.
        return min(moved, plan, key=lambda p: max(limit, p.tier_bytes("host")))

    def chosen(self, plan: Plan, limit: int) -> tuple[Plan, Choice | None]:
        """With memory for overlap, and what is best kept then, where the machine is known."""
        fill = self._fill(limit)
        if plan.overlap and self.device:  # one fills, one leaves, one free
            plan = fill.if_fits(plan, act_buffers=ACT_BUFFERS)
        if plan.overlap:
            for change in (
                {"ring": 2}, {"weight_slots": plan.weight_slots + 1, "window": 1}, {"ring": 3},
                {"weight_slots": plan.weight_slots + 2, "window": 1}, {"grad_groups": 2},
                {"ring": 4}, {"weight_slots": plan.weight_slots + 3, "window": 2},
            ):  # fmt: skip
                plan = fill.if_fits(plan, **change)
        choice = self._choice(plan, limit, self._by_policy(plan, limit))
        if choice is None or not self.device or plan.device_grads == 1:
            return plan, choice
        # With fewer gradients on the device there is more room for activations.
        for fewer in ({"head_alone": True}, {"head_alone": True, "device_grads": 1}):
            changed = self.memory.with_ledger(replace(plan, **fewer))
            other = self._choice(changed, limit, self._by_policy(changed, limit))
            if other is not None and other.step_s < choice.step_s:
                plan, choice = changed, other
        return plan, choice

    def grown(self, plan: Plan, choice: Choice | None, limit: int) -> Plan:
        """Spends what is left, in the order of what it is worth."""
        kept = self._by_policy(plan, limit)
        if kept is None:
            kept = choice.kept if choice else ()
        plan, fill = self._keep(plan, kept, limit), self._fill(limit)
        if plan.needs_all_gradients:
            plan = plan if self.options.spill_all else fill.unspill(plan)
        elif plan.update_mode == "balanced" and plan.overlap:
            plan = fill.defer(plan, MOST_DEFERRED if choice is None else choice.deferred)
        plan = fill.cache_on_device(plan)
        if self.options.cache_groups:
            plan = fill.cache_groups(plan)
        return fill.cache_state(fill.cache_weights(plan))

    def _fill(self, limit: int) -> GreedyFill:
        return GreedyFill(self.memory, limit, lambda plan: self._fits(plan, limit))

    def _keep(self, plan: Plan, kept: Kept, limit: int) -> Plan:
        """With these classes kept, or as many of them as fit, the most beneficial first."""
        while kept:
            grown = self.memory.relieved(replace(plan, kept=kept, spilled_sites=()), self.device)
            if grown is not None and self._fits(grown := self._placed(grown, limit), limit):
                return grown
            kept = kept[:-1]
        return plan

    def _placed(self, plan: Plan, limit: int) -> Plan:
        """In host memory as far as that goes, or all of it on SSD, as G10 has it."""
        if self.options.activations != "g10":
            return self._with_spilled_sites(self.memory.with_ledger(plan), limit)
        names = (name for name in self.memory.block_sites if name not in plan.staying)
        return self.memory.with_ledger(replace(plan, spilled_sites=tuple(names)))

    def _by_policy(self, plan: Plan, limit: int) -> Kept | None:
        """What the user wants kept, class by class; None: whatever is best."""
        return resolve_activation_policy(
            self.options.activations, self.memory, self.workload, plan, limit=limit,
            profile=self.profile,
        )  # fmt: skip

    def _choice(self, plan: Plan, limit: int, kept: Kept | None) -> Choice | None:
        if self.profile is None or self.workload is None or not self.memory.block_sites:
            return None
        return choose(
            self.profile, self.memory, self.workload, plan, limit=limit,
            two_generations=self.options.two_generations, minimise=self.options.minimise,
            kept=kept, spill_all=self.options.spill_all,
        )  # fmt: skip

    def _smallest_chunk(self) -> int:
        largest = max(group.numel for group in self.blocks.groups)
        return max(SMALLEST_CHUNK, largest // MOST_CHUNKS)

    def _first_chunk(self, host_bytes: int) -> int:
        """4 Mi parameters at 1 GiB, in proportion, and no larger than the largest group needs."""
        cap = min(LARGEST_CHUNK, max(self._smallest_chunk(), host_bytes // 256))
        largest = max(group.numel for group in self.blocks.groups)
        size = SMALLEST_CHUNK
        while size * 2 <= cap and size < largest:
            size *= 2
        return min(size, largest)


def spread(names: Sequence[str], count: int) -> tuple[str, ...]:
    return tuple(name for i, name in enumerate(names) if i * count % len(names) < count)


def _head_tokens(workload: BatchWorkload | None, device: int) -> int:
    if workload is None or not workload.vocabulary:
        return 256
    wanted = DEVICE_HEAD if device else HEAD_BYTES // (LOGIT_COPIES * FLOAT * workload.vocabulary)
    return max(SMALLEST_HEAD, min(wanted, workload.batch * workload.seq))
