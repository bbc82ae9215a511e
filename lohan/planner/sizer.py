"""Plans for one micro-batch size: the smallest plan, and how the remaining memory is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from lohan.model.layout import GROUP_ALIGN, Blocks
from lohan.model.machine import Profile
from lohan.model.options import PlanOptions
from lohan.model.plan import Kept, Plan
from lohan.model.state import FLOAT, chunks
from lohan.model.workload import BatchWorkload
from lohan.planner.activations import Choice, choose, resolve_activation_policy
from lohan.planner.host_memory import FillOrder, Use
from lohan.planner.memory import LOGIT_COPIES, MemoryModel
from lohan.schedule.placement import needs_all_gradients
from lohan.util.units import EVERY_STEP, MiB, align_up

# -- Uses of the remaining memory, each as far as the budgets allow --------------------------------


class GreedyFill:
    """The steps that extend a plan as long as it fits.

    `limit` is in bytes of host memory; `fits` checks all tiers.
    """

    def __init__(self, memory: MemoryModel, limit: int, fits: Callable[[Plan], bool]) -> None:
        self._memory, self._limit, self._fits = memory, limit, fits

    def use_host_memory(self, plan: Plan, deferred: float, order: FillOrder) -> Plan:
        """Return the plan extended to use the free host memory in the order of `Use`.

        If updates do not need all gradients, the share `deferred` of them runs in the next forward,
        and their gradients wait.
        """
        for use in Use:
            match use:
                case Use.GRADIENTS if needs_all_gradients(plan):
                    spills = order.spill_all or plan.log_gradients > 0
                    plan = plan if spills else self.unspill(plan)
                case Use.GRADIENTS:
                    plan = self.defer(plan, deferred)
                case Use.WEIGHTS:
                    plan = self.cache_groups(plan) if order.whole_groups else plan
                    plan = self.cache_weights(plan)
                case Use.STATE:
                    plan = self.cache_state(plan)
        return plan

    def if_fits(self, plan: Plan, **change: object) -> Plan:
        grown = self._memory.with_ledger(replace(plan, **change))  # type: ignore[arg-type]
        return grown if self._fits(grown) else plan

    def unspill(self, plan: Plan) -> Plan:
        """Return the plan with as many held gradients in memory instead of on SSD as fit.

        The first blocks have priority: the next forward needs their gradients first, so they are
        held for the shortest time.
        """
        spilled = set(plan.spilled_gradients)
        first = [group.key for group in self._memory.trained if group.key in spilled]

        def without(count: int) -> dict[str, object]:
            removed = set(first[:count])
            return {
                "spilled_gradients": tuple(
                    key for key in plan.spilled_gradients if key not in removed
                )
            }

        return self._largest_change(plan, len(first), without)

    def defer(self, plan: Plan, share: float) -> Plan:
        """Return the plan with up to `share` of the updates deferred to the next forward.

        The last blocks are deferred first, because the next forward reaches them last.
        """
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
        """Return the plan with the largest change that fits, by binary search.

        `limit` is the largest `count`. The search assumes that `change(count)` needs more memory
        for a larger `count`.
        """
        best, low, high = plan, 0, limit + 1
        tried = limit  # The whole change is tried first, because it often fits.
        while low + 1 < high:
            grown = self.if_fits(plan, **change(tried))
            best, low, high = (best, low, tried) if grown is plan else (grown, tried, high)
            tried = (low + high) // 2
        return best

    def cache_on_device(self, plan: Plan) -> Plan:
        """Return the plan with more weight slots on the device, as many as fit.

        Backward then need not load the last blocks again. Nothing is added if the memory that
        compute needs is not known.
        """
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
        """Return the plan that caches the weights and the state of as many whole groups as fit.

        Cached groups need not be read and, if all updates wait for forward, they are written during
        backward. If `_spreads(plan)`, the cached groups are spread evenly over the model; otherwise
        the largest groups are cached first.
        """
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
        """Return the plan that caches the weights of as many groups as fit, large groups first."""
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
        """Return the plan that caches as many state chunks as fit.

        The chunks are spread evenly if `_spreads(plan)`; otherwise the first ones are cached. With
        a log, state is cached only for groups whose weights are cached, because all other groups
        begin every step with their last full state.
        """
        in_memory = {group.key for group in self._memory.blocks.groups if group.resident}
        in_memory.update(plan.host_cached_weights)
        sizes = {
            (group.key, chunk.index): self._memory.state_format.state_size(chunk.stop - chunk.start)
            for group in self._memory.blocks.trained
            if not plan.log_gradients or group.key in in_memory
            for chunk in chunks(group, plan.chunk_params)
        }
        free_bytes, total, seen = self._limit - plan.tier_bytes("host"), sum(sizes.values()), 0
        room, cached = free_bytes, set(plan.host_cached_state)
        for even in (True, False) if _spreads(plan) else (False,):
            for key, size in sizes.items():
                seen += size
                due = not even or (room - free_bytes + size) * total <= room * seen
                if key not in cached and size <= free_bytes and due:
                    free_bytes -= size
                    cached.add(key)
        in_order = tuple(key for key in sizes if key in cached)
        return self._memory.with_ledger(replace(plan, host_cached_state=in_order))


def _spreads(plan: Plan) -> bool:
    """Return whether cached chunks should be spread evenly over the model.

    They should if all updates of every step wait for the next forward: forward then never waits for
    many uncached chunks in a row.
    """
    return not plan.commit.every_step and needs_all_gradients(plan)


# -- Sizer ----------------------------------------------------------------------------------------


SMALLEST_CHUNK, LARGEST_CHUNK = 2**17, 2**26  # parameters
MOST_CHUNKS = 128  # largest number of chunks of a group, if the planner chooses their size
SMALLEST_HEAD = 16  # smallest number of tokens in a slice of the head
HEAD_BYTES = 128 * MiB  # logits of one slice of the head in host memory, if the budget allows it
DEVICE_HEAD = 1024  # tokens of a slice of the head on a device; larger slices are not faster
MOST_DEFERRED = 0.25  # share of the parameters that `balanced` defers on an unknown machine
ACT_BUFFERS = 3  # host buffers for activations of blocks in flight between a device and SSD
DEVICE_SLOTS = 3  # weight slots on the device: one in use, one being loaded, one free


class Sizer:
    """A builder of plans for one micro-batch size, which starts from the smallest plan.

    In all methods, `limit` is the budget of host memory in bytes.
    """

    def __init__(
        self,
        blocks: Blocks,
        options: PlanOptions,
        workload: BatchWorkload | None,
        micro_batch: int | None,
        profile: Profile | None,
        device: int,
        order: FillOrder,
    ) -> None:
        self.blocks, self.options, self.workload, self.profile = blocks, options, workload, profile
        self.micro_batch, self.device, self.order = micro_batch, device, order
        self.memory = MemoryModel(
            blocks,
            options.dtype,
            workload,
            micro_batch,
            has_own_memory=self.device > 0,
            gradients_on_ssd=options.gradients_on_ssd,
            kind=options.kind,
            world=options.world,
            device_overhead=options.device_overhead,
        )
        self.moving = self.memory.moving

    def smallest(self, host_bytes: int) -> Plan:
        """Return the plan that needs the least memory: one block at a time and small buffers.

        Chunks, the slice of the head and slots on the device are reduced only as far as necessary.
        The result may still exceed the budgets.
        """
        options = self.options
        widest = max((len(site.groups) for site in self.blocks.sites), default=1)
        small = self._small_groups()
        slots = max(1, self._widest_without(small))
        plan = Plan(
            **options.taken_over(),
            micro_batch=self.micro_batch,
            tiles=self._tiles,
            commit=options.commit or EVERY_STEP,
            chunk_params=options.chunk_params or self._first_chunk(host_bytes),
            head_tokens=options.head_tokens or _head_tokens(self.workload, self.device),
            weight_slots=slots,
            host_cached_weights=small,
            window=0,
            ring=1,
            grad_groups=1,
            device_slots=min(2 * widest, DEVICE_SLOTS) if self.device else 0,
            staying=self.memory.staying,
        )
        if needs_all_gradients(plan):
            plan = replace(
                plan, spilled_gradients=tuple(group.key for group in self.memory.trained)
            )
            if options.gradients_on_ssd is False and not plan.log_gradients:
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
        """Return the small groups that stay in host memory, such as adapters.

        A group is small if it is not the largest group of any site. A slot has the size of the
        largest group, so caching these groups can take less memory than slots for them. If caching
        takes more memory, the result is empty.
        """
        by_key = self.blocks.by_key
        main = {max(s.groups, key=lambda k: by_key[k].numel) for s in self.blocks.sites if s.groups}
        small = tuple(group.key for group in self.moving if group.key not in main)
        saved = self._widest_without(()) - self._widest_without(small)
        largest = max((group.numel for group in self.moving), default=0)
        return small if sum(by_key[key].numel for key in small) < saved * largest else ()

    def _widest_without(self, cached: tuple[str, ...]) -> int:
        """Return the number of weight slots that one site needs if these groups are cached."""
        sites = self.blocks.sites
        return max((sum(key not in cached for key in site.groups) for site in sites), default=1)

    def _smaller(self, plan: Plan, host_bytes: int) -> dict[str, object] | None:
        """Return the next change that saves memory in a tier that is over budget, or None."""
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
        """True if no smaller micro-batch can be tried."""
        return (
            self.workload is None or self.micro_batch == 1 or self.options.micro_batch is not None
        )

    def _fits(self, plan: Plan, limit: int) -> bool:
        return plan.tier_bytes("host") <= limit and plan.tier_bytes("device") <= self.device

    def _with_spilled_sites(self, plan: Plan, limit: int) -> Plan:
        """Return the plan with the activations of as few blocks on SSD as it needs to fit.

        The blocks are spread evenly over the model, so that the drives are evenly loaded.
        """
        names = [name for name in self.memory.sizes.names if name not in plan.staying]
        few, many = 0, len(names)
        while plan.tier_bytes("host") > limit and few < many:
            middle = (few + many) // 2
            tried = self.memory.with_ledger(replace(plan, spilled_sites=spread(names, middle)))
            few, many = (few, middle) if tried.tier_bytes("host") <= limit else (middle + 1, many)
        moved = self.memory.with_ledger(replace(plan, spilled_sites=spread(names, few)))
        # If spilling is not enough, small activations may need less memory than the buffers
        # through which they would be spilled.
        return min(moved, plan, key=lambda p: max(limit, p.tier_bytes("host")))

    def chosen(self, plan: Plan, limit: int) -> tuple[Plan, Choice | None]:
        """Return the plan with buffers for overlap, and the best choice of activations for it.

        The choice is None if the machine is not known.
        """
        fill = self._fill(limit)
        if plan.overlap and self.device:
            # One buffer is being filled, one is being written, and one is free.
            plan = fill.if_fits(plan, act_buffers=ACT_BUFFERS)
        if plan.overlap:
            for change in (
                {"ring": 2},
                {"weight_slots": plan.weight_slots + 1, "window": 1},
                {"ring": 3},
                {"weight_slots": plan.weight_slots + 2, "window": 1},
                {"grad_groups": 2},
                {"ring": 4},
                {"weight_slots": plan.weight_slots + 3, "window": 2},
            ):
                plan = fill.if_fits(plan, **change)
        choice = self._choice(plan, limit, self._by_policy(plan, limit))
        if choice is None or not self.device or plan.device_grads == 1:
            return plan, choice
        # Fewer gradients on the device leave more room for activations.
        for fewer in ({"head_alone": True}, {"head_alone": True, "device_grads": 1}):
            changed = self.memory.with_ledger(replace(plan, **fewer))
            other = self._choice(changed, limit, self._by_policy(changed, limit))
            if other is not None and other.step_s < choice.step_s:
                plan, choice = changed, other
        return plan, choice

    def grown(self, plan: Plan, choice: Choice | None, limit: int) -> Plan:
        """Return the plan extended to use the remaining memory, most valuable uses first."""
        kept = self._by_policy(plan, limit)
        if kept is None:
            kept = choice.kept if choice else ()
        plan, fill = self._keep(plan, kept, limit), self._fill(limit)
        deferred = 0.0
        if plan.update_mode == "balanced" and plan.overlap:
            deferred = MOST_DEFERRED if choice is None else choice.deferred
        plan = fill.use_host_memory(plan, deferred, self.order)
        return fill.cache_on_device(plan)

    def _fill(self, limit: int) -> GreedyFill:
        return GreedyFill(self.memory, limit, lambda plan: self._fits(plan, limit))

    def _keep(self, plan: Plan, kept: Kept, limit: int) -> Plan:
        """Return the plan that keeps as many classes of `kept` as fit, starting with the first."""
        while kept:
            grown = self.memory.relieved(replace(plan, kept=kept, spilled_sites=()), self.device)
            if grown is not None and self._fits(grown := self._placed(grown, limit), limit):
                return grown
            kept = kept[:-1]
        return plan

    def _placed(self, plan: Plan, limit: int) -> Plan:
        """Return the plan with kept activations on SSD as far as host memory cannot hold them.

        With the policy g10, all of them are on SSD.
        """
        if self.options.activations != "g10":
            return self._with_spilled_sites(self.memory.with_ledger(plan), limit)
        names = (name for name in self.memory.sizes.names if name not in plan.staying)
        return self.memory.with_ledger(replace(plan, spilled_sites=tuple(names)))

    def _by_policy(self, plan: Plan, limit: int) -> Kept | None:
        """Return the classes that the user's policy keeps; None if the planner chooses them."""
        return resolve_activation_policy(
            self.options.activations,
            self.memory,
            self.workload,
            plan,
            limit=limit,
            profile=self.profile,
        )

    def _choice(self, plan: Plan, limit: int, kept: Kept | None) -> Choice | None:
        if self.profile is None or self.workload is None or not self.memory.sizes.names:
            return None
        return choose(
            self.profile,
            self.memory,
            self.workload,
            plan,
            limit=limit,
            minimise=self.options.minimise,
            kept=kept,
            spill_all=self.order.spill_all,
        )

    def _smallest_chunk(self) -> int:
        largest = max(group.numel for group in self.blocks.groups)
        return max(SMALLEST_CHUNK, largest // MOST_CHUNKS)

    def _first_chunk(self, host_bytes: int) -> int:
        """Return the initial chunk size in parameters.

        It is a power of two of about 4 Mi parameters per GiB of host memory, within fixed limits,
        and at most the size of the largest group. With a log it is smaller, because a staging
        buffer holds a chunk of several gradients.
        """
        share = 512 * self.options.log_gradients or 256
        cap = min(LARGEST_CHUNK, max(self._smallest_chunk(), host_bytes // share))
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
