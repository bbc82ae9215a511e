"""Memory model of a plan: bytes by tier and owner, and the peak of a step on host and device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from lohan.model.layout import Blocks, FlatGroup, Site
from lohan.model.machine import Profile
from lohan.model.plan import CACHED_STATE, CACHED_WEIGHTS, LOG, Kept, LedgerEntry, Plan
from lohan.model.shapes import BlockShape
from lohan.model.state import (
    DEQUANTISED,
    FLOAT,
    HALF,
    StateFormat,
    chunks,
    dequantised_bytes,
    dequantising_bytes,
    state_format_of,
)
from lohan.model.workload import BatchWorkload, Footprint, SiteFootprint
from lohan.optim import DEFAULT_KIND, StateKind
from lohan.schedule.placement import needs_all_gradients, needs_norm
from lohan.util.units import PAGE, MiB

# -- Peak host memory of a step: the memory of compute in forward, head and backward ---------------
#
# Inputs and kept activations grow until forward ends, and each block's backward releases its own
# while it adds gradients. The peak of the sum is therefore smaller than the sum of the peaks.


INPUTS, KEPT, WAITING = "block inputs", "kept activations", "waiting gradients"
STREAMS, WORK = "hidden state and its gradient", "work of one block or the head"
HeldBytes = dict[str, int]  # bytes by owner


@dataclass(frozen=True, kw_only=True)
class Call:
    """The memory of one call of a site, in bytes.

    `inputs` and `kept` stay in memory until the backward of the call, and `moved` until it is
    on SSD. `streams` are hidden states and their gradients; `forward` and `work` are what forward
    and backward need in addition. The head runs both at once and counts as backward.
    """

    groups: tuple[FlatGroup, ...]
    inputs: int = 0
    kept: int = 0
    moved: int = 0
    forward: int = 0
    work: int = 0
    streams: int = 0


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules by which gradients and activations wait in memory.

    The gradients of `held` groups wait until the next forward; those of other groups wait until
    `groups` more have been computed. `width` is the size of an element in bytes. `moving` is
    the number of calls whose activations may be on their way to SSD at a time, including the
    current one.
    """

    held: Collection[str]
    groups: int
    width: int
    moving: int


def peak_host(calls: Sequence[Call], rules: Rules) -> HeldBytes:
    """Return the bytes by owner at the peak of a step, under `rules`.

    `calls` are in the order of forward.
    """
    peaks = [*_forward(calls, rules), *_backward(calls, rules)]
    return max(peaks, key=lambda held: sum(held.values()), default={})


def _first_calls(calls: Sequence[Call]) -> dict[str, int]:
    numbered = reversed(list(enumerate(calls)))
    return {group.key: number for number, call in numbered for group in call.groups}


def _forward(calls: Sequence[Call], rules: Rules) -> Iterator[HeldBytes]:
    """Yield the bytes by owner during the forward of each call whose activations move to SSD.

    The peak cannot be in another call of forward, because backward holds as much and needs more
    memory for its work. The held gradients of a group are consumed before the group is needed.
    """
    sizes = {group.key: group.numel for call in calls for group in call.groups}
    first = _first_calls(calls)
    inputs = kept = 0
    moving: list[int] = []
    for number, call in enumerate(calls):
        inputs, kept = inputs + call.inputs, kept + call.kept
        if not call.moved:
            continue
        moving = [*moving, call.moved][-rules.moving :]
        held = sum(sizes[key] for key in rules.held if first.get(key, -1) > number)
        yield {
            INPUTS: inputs,
            KEPT: kept + sum(moving),
            WAITING: rules.width * held,
            STREAMS: call.streams,
            WORK: call.forward,
        }


def _backward(calls: Sequence[Call], rules: Rules) -> Iterator[HeldBytes]:
    inputs, kept = sum(call.inputs for call in calls), sum(call.kept for call in calls)
    first = _first_calls(calls)
    held, passing, unfinished = 0, list[int](), dict[str, int]()
    # Activations in flight to SSD arrive there before the first of them is read back.
    moving = sum([call.moved for call in calls if call.moved][-rules.moving :])
    for number, call in reversed(list(enumerate(calls))):
        moving = 0 if call.moved else moving
        in_flight = sum(passing[max(0, len(passing) - rules.groups + 1) :])
        waiting = rules.width * (held + in_flight) + FLOAT * sum(unfinished.values())
        yield {
            INPUTS: inputs,
            KEPT: kept + moving,
            WAITING: waiting,
            STREAMS: call.streams,
            WORK: call.work,
        }
        inputs, kept = inputs - call.inputs, kept - call.kept
        for group in call.groups:
            if group.frozen or group.resident:
                continue
            if first[group.key] < number:  # An earlier call adds to this sum.
                unfinished[group.key] = group.numel
                continue
            unfinished.pop(group.key, None)
            if group.key in rules.held:
                held += group.numel
            else:
                passing.append(group.numel)


# -- Peak memory of a device with its own memory ---------------------------------------------------
#
# This memory consists of slots and buffers that always exist, and of the peak of a step.
#
# In forward there are no gradients of blocks: a block runs after its weights were updated, and
# links transfer in order. The head has none either. In backward, gradients of earlier blocks may be
# in flight, and activations that stayed on the device are released after the first block.


GRADIENTS, STAYING = "gradients", "activations that stay"
SHARED = "inputs that blocks share"
# The numbers of hidden states in device memory: in forward, where two of them are in flight, and at
# the head, including its losses.
IN_FORWARD, AT_HEAD = 3, 5


@dataclass(frozen=True)
class SiteBytes:
    """The bytes that one site needs on the device.

    `forward` includes the results that are kept, `stays` are the activations that remain on the
    device until backward, and `gradients` are the gradients of the site's trained weights.
    """

    forward: int
    backward: int
    stays: int
    gradients: int


@dataclass(frozen=True, kw_only=True)
class CommonBytes:
    """The bytes on the device that are the same for all sites.

    `stream` is the hidden state, `other_slices` are its parts that backward holds for other slices,
    and `outside` is what is held between sites before the head. `groups` is the number of groups
    whose gradients may be present at a time. `sums` states that gradients are summed over slices;
    the sums of the current block are then counted in addition to its work.
    """

    stream: int
    other_slices: int
    outside: int
    head: int
    head_gradients: int
    groups: int
    sums: bool


def peak_device(sites: Sequence[SiteBytes], common: CommonBytes) -> HeldBytes:
    peaks = [*_forward_on_device(sites, common), *_backward_on_device(sites, common)]
    return max(peaks, key=lambda held: sum(held.values()), default={})


def _forward_on_device(sites: Sequence[SiteBytes], common: CommonBytes) -> Iterator[HeldBytes]:
    staying = sum(site.stays for site in sites)
    moving = [site.forward for site in sites if not site.stays]
    yield {STREAMS: IN_FORWARD * common.stream, WORK: max(moving, default=0)}
    at_rest = [site.forward for site in sites if site.stays]
    if at_rest:
        yield {STREAMS: IN_FORWARD * common.stream, WORK: max(at_rest), STAYING: staying}
    if common.head:
        streams = max(AT_HEAD * common.stream, common.outside + 2 * common.stream)
        yield {STREAMS: streams, WORK: common.head, STAYING: staying}


def _backward_on_device(sites: Sequence[SiteBytes], common: CommonBytes) -> Iterator[HeldBytes]:
    staying = sum(site.stays for site in sites)
    passing = [common.head_gradients]
    others = common.groups if common.sums else common.groups - 1
    seen = set[tuple[int, int, int]]()  # equal blocks have equal peaks
    for site in reversed(sites):
        current = [site.gradients] if common.sums else []
        gradients = sum([*passing, *current][-others:]) if others else 0
        if (peak := (gradients, staying, site.backward)) not in seen:
            seen.add(peak)
            yield {
                GRADIENTS: gradients,
                STAYING: staying,
                STREAMS: common.other_slices,
                WORK: site.backward,
            }
        passing = [*passing[-common.groups :], site.gradients]
        staying -= site.stays


# -- Kept activations: the sites that can keep any, the classes that a plan keeps, and their bytes -


PADDING = 2**16  # bytes of padding in the packed tensors of one site


class KeptSizes:
    """The bytes that sites keep, for one model, batch and micro-batch.

    `width` is the size of an element in bytes. Results are cached by choice, because each choice is
    looked up many times.
    """

    def __init__(
        self, workload: BatchWorkload | None, footprint: Footprint | None, *, width: int
    ) -> None:
        self._workload, self._width = workload, width
        self._footprint = footprint or Footprint()
        shapes = workload.shapes if workload is not None else {}
        names = [name for name in self._footprint.sites if name in shapes]
        # Sites whose activations may be kept, in order of forward, and those without a backward.
        self.names = [name for name in names if name not in self._footprint.no_backward]
        self.no_backward = [name for name in names if name in self._footprint.no_backward]
        kinds: dict[BlockShape, int] = {}
        self.kind = {  # sites of one kind differ in their names only
            name: kinds.setdefault(replace(shapes[name], name=""), len(kinds))
            for name in self.names
        }
        self._number = {name: i for i, name in enumerate(self.names)}
        self._classes: dict[Kept, list[frozenset[str]]] = {}
        self._bytes: dict[Kept, list[int]] = {}
        self._slices: dict[tuple[Kept, float], int] = {}

    def classes(self, kept: Kept) -> list[frozenset[str]]:
        """Return the classes that each site keeps, given the sites that keep each class.

        If the plan gives a number of sites for a class, these sites are spread evenly, which also
        loads the lanes evenly.
        """
        if kept not in self._classes:
            self._classes[kept] = self._spread(kept)
        return self._classes[kept]

    def _spread(self, kept: Kept) -> list[frozenset[str]]:
        total = len(self.names)
        everywhere = frozenset(kind for kind, which in kept if which == total)
        rest = [(kind, which) for kind, which in kept if which != total]
        if not rest:
            return [everywhere] * total
        sets: dict[tuple[str, ...], frozenset[str]] = {}  # lets equal sets share one object
        spread = []
        for n in range(total):
            classes = tuple(
                kind
                for kind, which in rest
                if (n in which if isinstance(which, tuple) else n * which % total < which)
            )
            spread.append(sets.setdefault(classes, everywhere.union(classes)))
        return spread

    def classes_of(self, kept: Kept, name: str) -> frozenset[str]:
        return self.classes(kept)[self._number[name]]

    def by_site(self, kept: Kept) -> list[int]:
        """Return the bytes that each site keeps for the whole batch, without its inputs."""
        if kept not in self._bytes:
            self._bytes[kept] = self._sums(self.classes(kept))
        return self._bytes[kept]

    def _sums(self, classes: list[frozenset[str]]) -> list[int]:
        workload = self._workload
        if workload is None:
            return []
        if workload.stored is not None:
            return [
                workload.stored(name, kept) for name, kept in zip(self.names, classes, strict=True)
            ]
        pairs = list(zip(self.kind.values(), classes, strict=True))
        by_pair: dict[tuple[int, frozenset[str]], int] = {}
        for name, pair in zip(self.names, pairs, strict=True):
            if pair not in by_pair:
                by_pair[pair] = self.bytes_with(name, pair[1]) - self.footprint(name).input_bytes
        return [by_pair[pair] for pair in pairs]

    def of_slice(self, kept: Kept, share: float) -> int:
        """Return the largest number of bytes that one site offloads for a slice.

        `share` is the slice's share of the batch.
        """
        if (kept, share) not in self._slices:
            workload, sizes = self._workload, self.by_site(kept)
            offloaded = [int(share * size) for size in sizes]
            if workload is not None and workload.offloaded is not None:
                pairs = zip(self.names, self.classes(kept), strict=True)
                offloaded = [workload.offloaded(name, classes, share) for name, classes in pairs]
            self._slices[kept, share] = max(offloaded, default=0)
        return self._slices[kept, share]

    def bytes_of(self, kept: Kept, name: str) -> int:
        number = self._number.get(name)
        return 0 if number is None else self.by_site(kept)[number]

    def bytes_with(self, name: str, classes: frozenset[str]) -> int:
        """Return the bytes of the inputs of one site and of these classes of its activations."""
        workload = self._workload
        assert workload is not None
        inputs = self.footprint(name).input_bytes
        if workload.stored is not None:
            return inputs + workload.stored(name, classes)
        parts = workload.shapes[name].activations
        elements = sum(part.elements for part in parts if part.name in classes)
        return inputs + int(elements * workload.tokens * self._width)

    def site_bytes(self, kept: Kept, name: str) -> int:
        """Return the bytes of inputs and kept activations of one site, for the whole batch."""
        return self.footprint(name).input_bytes + self.bytes_of(kept, name) + PADDING

    def footprint(self, name: str) -> SiteFootprint:
        return self._footprint.sites[name]


# -- The bytes of a plan in a device's own memory --------------------------------------------------


# The number of sites, and of slices of each, whose activations are in flight at a time.
IN_FLIGHT = 2


def _of_device(plan: Plan) -> tuple[object, ...]:
    """Return the fields of a plan that determine the memory of compute on the device."""
    grads = plan.device_grads, plan.head_alone
    return plan.kept, plan.staying, grads, plan.head_tokens, plan.world


class DeviceMemoryModel:
    def __init__(self, host: MemoryModel, at_most: dict[tuple[object, ...], HeldBytes]) -> None:
        self._host, self._moments = host, at_most

    def ledger(self, plan: Plan) -> dict[str, int]:
        """Return the bytes on the device by owner. Every rank holds complete blocks, not shards."""
        host = self._host
        resident, trained = (plan.world * count for count in host.resident)
        learning, largest = (plan.world * count for count in self._largest)
        return {
            "weights": plan.device_slots * largest * host.state_format.weight_bytes,
            **host.dequantised,
            # A message in fp32 to all ranks, and one from all ranks.
            "exchange between ranks": 2 * learning * FLOAT if plan.world > 1 else 0,
            # These gradients are exchanged once, after the last block that uses them.
            "tied gradients": plan.world * FLOAT * numel(host.tied) if plan.world > 1 else 0,
            "resident parameters": resident * host.state_format.weight_bytes + trained * FLOAT,
            "activations in flight": IN_FLIGHT * self._in_flight(plan),
            SHARED: self._shared_inputs,
            **self._peak_held(plan),
        }

    @cached_property
    def _largest(self) -> tuple[int, int]:
        """The number of parameters of the largest trained group, and of the largest group to load.

        Groups that are always in memory are not loaded.
        """
        trained = max((group.numel for group in self._host.trained), default=0)
        return trained, max(group.numel for group in self._host.moving)

    @cached_property
    def _largest_input(self) -> int:
        """The bytes of the largest input that is offloaded."""
        footprint = self._host.footprint
        return (
            max((s.offload_bytes for s in footprint.sites.values()), default=0) if footprint else 0
        )

    @cached_property
    def _shared_inputs(self) -> int:
        """The bytes of inputs that stay on the device, such as masks."""
        footprint = self._host.footprint
        return sum(s.shared_bytes for s in footprint.sites.values()) if footprint else 0

    def _in_flight(self, plan: Plan) -> int:
        """Return the bytes in flight of one site: its inputs, and kept results of some slices."""
        slices = min(IN_FLIGHT, self._host.slices)
        return self._largest_input + slices * self._host.sizes.of_slice(plan.kept, self._host.slice)

    def _peak_held(self, plan: Plan) -> HeldBytes:
        """Return the bytes by owner that compute holds on the device at its peak."""
        host = self._host
        if host.footprint is None:
            return {}
        key = _of_device(plan)
        if key not in self._moments:
            head = host.head.groups if host.head is not None else ()
            common = CommonBytes(
                stream=host.stream,
                outside=host.footprint.outside,
                head=host.head_work(plan),
                # Backward holds two gradients of the hidden state of the whole batch. The part of
                # the current slice is counted in the work of its block, so only the other slices
                # are added.
                other_slices=2 * int((1 - host.slice) * host.stream),
                head_gradients=0 if plan.head_alone else plan.world * self._gradients_of(head),
                groups=plan.device_grads,
                sums=host.slices > 1,
            )
            self._moments[key] = peak_device(self._site_bytes(plan), common)
        return self._moments[key]

    def _site_bytes(self, plan: Plan) -> list[SiteBytes]:
        """Return the bytes of each site on the device.

        The forward of a block creates what a slice keeps, and its backward fetches it again. Of
        many equal blocks in a row, only a few are included, because more blocks do not change the
        peak.
        """
        host = self._host
        kept = dict(zip(host.sizes.names, host.sizes.by_site(plan.kept), strict=True))
        sites: list[SiteBytes] = []
        before, run = None, 0
        for name, sizes in self._sites.items():
            kept_bytes, stays = int(host.slice * kept.get(name, 0)), name in plan.staying
            run = run + 1 if before == (sizes, kept_bytes, stays) else 0
            before = (sizes, kept_bytes, stays)
            if run > plan.device_grads + 1:
                continue
            forward, backward, gradients = sizes
            sites.append(
                SiteBytes(
                    forward=forward + (0 if stays else kept_bytes),
                    backward=max(0, backward - kept_bytes),
                    stays=host.site_bytes(plan, name) if stays else 0,
                    gradients=plan.world * gradients,
                )
            )
        return sites

    @cached_property
    def _sites(self) -> dict[str, tuple[int, int, int]]:
        """The bytes of each site's work in forward and in backward, and of its gradients."""
        assert self._host.footprint is not None
        groups = {site.name: site.groups for site in self._host.blocks.sites}
        return {
            name: (
                site.forward_bytes,
                max(site.peak_bytes + self._fetched[name], self._widened[name]),
                self._gradients_of(groups[name]),
            )
            for name, site in self._host.footprint.sites.items()
        }

    @cached_property
    def _fetched(self) -> Counter[str]:
        """The bytes of gradient sums that each site fetches from host memory to add to them.

        They belong to tied groups that a later site also uses. With several ranks there are none,
        because these sums stay on the device.
        """
        if self._host.world > 1:
            return Counter()
        return self._of_tied(reversed(self._host.blocks.sites), FLOAT)

    @cached_property
    def _widened(self) -> Counter[str]:
        """The bytes of gradients that each site copies to host memory in fp32, and of the copies.

        They belong to tied groups that an earlier site also uses.
        """
        return self._of_tied(self._host.blocks.sites, FLOAT + self._host.gradient_width)

    def _of_tied(self, sites: Iterable[Site], width: int) -> Counter[str]:
        """Return for each site the bytes of its tied groups that a preceding site also uses.

        `width` is the number of bytes per parameter.
        """
        tied = {group.key: group.numel * width for group in self._host.tied}
        shared, seen = Counter[str](), set[str]()
        for site in sites:
            shared[site.name] = sum(tied.get(key, 0) for key in seen.intersection(site.groups))
            seen.update(site.groups)
        return shared

    def _gradients_of(self, groups: Iterable[str]) -> int:
        """Return the bytes of the gradients of groups. Gradients of tied groups are fp32 sums."""
        members = [self._host.blocks.by_key[key] for key in groups]
        trained = [g for g in members if not g.frozen and not g.resident]
        tied = [group for group in trained if group in self._host.tied]
        width = self._host.gradient_width
        return numel(trained) * width + numel(tied) * (FLOAT - width)


# -- The ledger of a plan: bytes by tier and owner -------------------------------------------------


BUFFERS = "activation buffers"
GENERATIONS = 2  # copies of weights and state in a store: the committed one and the next
LOGIT_COPIES = 3  # copies in fp32: log-softmax, its gradient, and the gradient of the logits


# -- The overhead of a card's memory ---------------------------------------------------------------
#
# Blocks and schedule are planned to the byte. In addition, the caching allocator rounds sizes up
# and cannot use every gap; cuBLAS has a workspace for each thread that multiplies (8 MiB, 32 MiB on
# the largest cards); kernels are loaded when they first run; and pinned host memory has entries in
# the device's page tables, 8 bytes for every 4 KiB. The plan determines how much memory is pinned,
# so the free memory after pinning cannot be measured before. All of the host budget is assumed to
# be pinned.


ROUNDING = 0.05  # share of the card's memory
# The smaller of the two is assumed, because emulated devices are small.
LIBRARIES, LIBRARY_SHARE = 512 * MiB, 1 / 16
PAGE_ENTRY = 8  # bytes of a page-table entry
PAGE_TABLES_SHARE = 1 / 32  # upper limit
CARD_OWNERS = ("allocator rounding", "libraries and kernels", "page tables of pinned memory")


def card_overhead(memory: int, host_bytes: int) -> dict[str, int]:
    """Return the overhead in bytes by owner, given the device memory and the host budget."""
    libraries = min(LIBRARIES, int(LIBRARY_SHARE * memory))
    tables = min(host_bytes // PAGE * PAGE_ENTRY, int(PAGE_TABLES_SHARE * memory))
    return dict(zip(CARD_OWNERS, (int(ROUNDING * memory), libraries, tables), strict=True))


@dataclass
class _SharedMeasurements:
    """The measurements that all plans with the same batch and micro-batch share."""

    blocks: Blocks  # kept alive so that the id is not reused
    footprint: Footprint | None
    sizes: KeptSizes
    at_most: dict[tuple[object, ...], HeldBytes] = field(default_factory=dict)
    device_bytes: dict[tuple[object, ...], int] = field(default_factory=dict)
    priced: dict[tuple[Profile, Kept, bool], tuple[float, float, float]] = field(
        default_factory=dict
    )


class StateSizes:
    """The bytes of the optimizer state of all groups, and of the part that is cached."""

    def __init__(self, blocks: Blocks, state_format: StateFormat) -> None:
        self._blocks, self._format = blocks, state_format
        self._totals: dict[int, int] = {}  # keys are chunk sizes in parameters
        # The last result of `cached`: cached chunks, chunk size, and bytes of their state.
        self._last_cached: tuple[object, int, int] = ((), 0, 0)

    def total(self, chunk_params: int) -> int:
        """Return the bytes of the state of all trained groups.

        `chunk_params` is the number of parameters in a chunk.
        """
        if chunk_params not in self._totals:
            total = self._format.state_total
            sizes = (total(group.numel, chunk_params) for group in self._blocks.trained)
            self._totals[chunk_params] = sum(sizes)
        return self._totals[chunk_params]

    def cached(self, plan: Plan) -> int:
        """Return the bytes of cached state.

        The last result is cached, because plans that are derived from each other have the same
        chunks, often thousands.
        """
        cached, each, size = self._last_cached
        if cached is not plan.host_cached_state or each != plan.chunk_params:
            each, by_key = plan.chunk_params, self._blocks.by_key
            cuts = (chunks(by_key[key], each)[index] for key, index in plan.host_cached_state)
            size = sum(self._format.state_size(cut.stop - cut.start) for cut in cuts)
            self._last_cached = plan.host_cached_state, each, size
        return size


def _trained_share(blocks: Blocks, site: Site) -> float:
    """Return the share of the parameters of a site that are trained."""
    groups = [blocks.by_key[key] for key in site.groups]
    every = sum(max(group.numel, group.dequantised) for group in groups)
    return numel(g for g in groups if not g.frozen) / max(1, every)


def _staging_bytes(plan: Plan, chunk: int) -> int:
    """Return the bytes of the buffers that held or logged gradients pass through."""
    if not plan.spilled_gradients:
        return 0
    return plan.ring * chunk * FLOAT * max(1, plan.log_gradients)


class MemoryModel:
    """The ledgers of plans for one model, batch and micro-batch.

    `has_own_memory` is true if the device has its own memory. Otherwise compute uses host memory.
    """

    def __init__(
        self,
        blocks: Blocks,
        dtype: str,
        workload: BatchWorkload | None,
        micro_batch: int | None,
        *,
        has_own_memory: bool = False,
        gradients_on_ssd: bool | None = None,
        kind: StateKind = DEFAULT_KIND,
        world: int = 1,
        device_overhead: Iterable[tuple[str, int]] = (),
    ) -> None:
        self.blocks, self.workload, self.micro_batch = blocks, workload, micro_batch
        self.state_format = state_format_of(dtype, kind)
        self.world = world
        self.has_own_memory = has_own_memory
        self._held_on_ssd, self._overhead = gradients_on_ssd, dict(device_overhead)
        self.moving = [group for group in blocks.groups if not group.resident]
        self.trained = [group for group in self.moving if not group.frozen]
        shared = self._shared(dtype)
        self.footprint: Footprint | None = shared.footprint
        self.sizes = shared.sizes
        # The trained share of each site's parameters.
        self.shares = {site.name: _trained_share(blocks, site) for site in blocks.sites}
        self.unpacked = {
            s.name: sum(blocks.by_key[key].dequantised for key in s.groups) for s in blocks.sites
        }
        batch = workload.batch if workload is not None else 1
        self.slices = -(-batch // (micro_batch or batch))
        # The largest slice's share of the batch.
        self.slice = min(1.0, (micro_batch or batch) / batch)
        self._on_device = DeviceMemoryModel(self, shared.at_most)
        self._device_bytes, self.priced = shared.device_bytes, shared.priced
        self._state_sizes = StateSizes(blocks, self.state_format)

    def _shared(self, dtype: str) -> _SharedMeasurements:
        """Return the measurements that all plans of one batch share, computing them once.

        Such plans may differ in host memory, optimizer and commits.
        """
        workload, micro_batch = self.workload, self.micro_batch
        key: tuple[object, ...] = (id(self.blocks), dtype, micro_batch, self.has_own_memory)
        key = (*key, self.world)
        if workload is not None and key in workload.plan_cache:
            shared: _SharedMeasurements = workload.plan_cache[key]
            return shared
        footprint = None if workload is None else workload.measure(micro_batch or workload.batch)
        sizes = KeptSizes(workload, footprint, width=self.state_format.weight_bytes)
        shared = _SharedMeasurements(self.blocks, footprint, sizes)
        if workload is not None:
            workload.plan_cache[key] = shared
        return shared

    @classmethod
    def of(
        cls,
        blocks: Blocks,
        plan: Plan,
        workload: BatchWorkload | None,
        *,
        has_own_memory: bool = False,
    ) -> MemoryModel:
        """Return the memory model for the options of a plan."""
        workload = None if workload is None else workload.in_tiles(plan.tiles)
        return cls(
            blocks,
            plan.dtype,
            workload,
            plan.micro_batch,
            has_own_memory=has_own_memory,
            kind=plan.kind,
            world=plan.world,
        )

    def with_ledger(self, plan: Plan) -> Plan:
        device = self._on_device.ledger(plan) | self._overhead if self.has_own_memory else {}
        host = {**self._state(plan), **self.activations(plan)}
        if not self.has_own_memory and self.footprint is not None:
            host |= self._peak_held(plan)
        if not self.has_own_memory:  # A GPU with unified memory has its overhead in host memory.
            host |= self._overhead
        entries = [LedgerEntry("device", owner, count) for owner, count in device.items() if count]
        entries += [LedgerEntry("host", owner, count) for owner, count in host.items() if count]
        moved = tuple(self.site_bytes(plan, name) for name in plan.spilled_sites)
        return replace(plan, spilled_site_bytes=moved, ledger=(*entries, *self._on_ssd(plan)))

    @property
    def staying(self) -> tuple[str, ...]:
        """The sites whose activations stay on the device.

        The last block comes first in backward, so its activations can stay if there is room.
        """
        return (
            tuple(self.sizes.names[-1:]) if self.has_own_memory and self.slices <= IN_FLIGHT else ()
        )

    def relieved(self, plan: Plan, device_bytes: int) -> Plan | None:
        """Return the plan if it fits, else the plan without activations that stay on the device.

        The result is None if neither fits.
        """
        if not self.has_own_memory or self.device_bytes(plan) <= device_bytes:
            return plan
        smaller = replace(plan, staying=())
        return smaller if plan.staying and self.device_bytes(smaller) <= device_bytes else None

    def rest_bytes(self, plan: Plan) -> int:
        """Return the bytes of host memory at the peak, not counting activations."""
        ledger = self.with_ledger(plan).ledger
        activations = (INPUTS, KEPT, BUFFERS)
        return sum(e.bytes for e in ledger if e.tier == "host" and e.owner not in activations)

    def device_bytes(self, plan: Plan) -> int:
        if not self.has_own_memory:
            return 0
        cache, key = self._device_bytes, (*_of_device(plan), plan.device_slots)
        if key not in cache:
            cache[key] = sum(self._on_device.ledger(plan).values())
        return cache[key] + sum(self._overhead.values())

    @cached_property
    def dequantised(self) -> HeldBytes:
        """The bytes by owner for dequantised weights and for the work of dequantising."""
        return dequantised_ledger(self.blocks, self.state_format.weight_bytes)

    @cached_property
    def tied(self) -> list[FlatGroup]:
        """The groups that several sites use. Their gradients wait for the last of these sites."""
        uses = Counter(key for site in self.blocks.sites for key in site.groups)
        return [group for group in self.trained if uses[group.key] > 1]

    @cached_property
    def frozen(self) -> list[FlatGroup]:
        return [group for group in self.blocks.groups if group.frozen]

    @cached_property
    def resident(self) -> tuple[int, int]:
        """The number of parameters that are always in memory, and how many of them are trained."""
        groups = [group for group in self.blocks.groups if group.resident]
        return numel(groups), numel([group for group in groups if not group.frozen])

    @property
    def gradient_width(self) -> int:
        """The bytes of a gradient element. Sums over slices or over ranks are in fp32."""
        sums = self.slices > 1 or self.world > 1
        return FLOAT if sums or self.state_format.name == "fp32" else HALF

    @cached_property
    def stream(self) -> int:
        """The bytes of the hidden state of the batch."""
        work = self.workload
        return 0 if work is None else work.tokens * work.hidden * self.state_format.weight_bytes

    def site_bytes(self, plan: Plan, name: str) -> int:
        return self.sizes.site_bytes(plan.kept, name)

    # -- the head ---------------------------------------------------------------------------------

    @cached_property
    def head(self) -> Site | None:
        """The site of the head: the last site that uses the group of the head, or None."""
        key = self.workload.head_group if self.workload is not None else None
        sites = [site for site in self.blocks.sites if key in site.groups]
        return sites[-1] if sites else None

    def head_work(self, plan: Plan) -> int:
        """Return the bytes that the head needs for one slice of tokens.

        These are the logits with their gradients, then the gradients of the weights with
        their sum over earlier slices.
        """
        workload = self.workload
        if workload is None or self.head is None or not workload.vocabulary:
            return 0
        groups = [self.blocks.by_key[key] for key in self.head.groups]
        weight = plan.world * numel(group for group in groups if not group.frozen)
        tokens = min(plan.head_tokens, workload.tokens)
        gathered = weight * FLOAT if tokens < workload.tokens else 0
        logits = tokens * workload.vocabulary * FLOAT
        hidden = tokens * workload.hidden * self.state_format.weight_bytes
        gradients = logits + hidden + weight * self.state_format.weight_bytes
        return gathered + hidden + max(LOGIT_COPIES * logits, gradients)

    # -- state ------------------------------------------------------------------------------------

    def _on_ssd(self, plan: Plan) -> list[LedgerEntry]:
        trained, frozen = numel(self.blocks.trained), numel(self.frozen)
        copies, stored = GENERATIONS, trained * self.state_format.weight_bytes
        stored += self._state_sizes.total(plan.chunk_params)
        entries = [LedgerEntry("ssd", f"weights and state x{copies}", copies * stored)]
        if frozen:
            once = frozen * self.state_format.weight_bytes
            entries.append(LedgerEntry("ssd", "frozen weights", once))
        # A new store has room for all gradients if they are held, because a later plan may spill
        # more.
        room = needs_norm(plan) if self._held_on_ssd is None else self._held_on_ssd
        if room:
            entries.append(LedgerEntry("ssd", "room for held gradients", trained * FLOAT))
        if plan.log_gradients:
            # The log has one segment more than logged steps, because the next step is appended
            # while the last one is folded.
            count = (plan.log_gradients + 1) * trained * FLOAT
            entries.append(LedgerEntry("ssd", LOG, count))
        if plan.spilled_sites:
            moved = sum(self.site_bytes(plan, name) for name in plan.spilled_sites)
            entries.append(LedgerEntry("ssd", "activations", moved))
        return entries

    def _state(self, plan: Plan) -> dict[str, int]:
        fmt, by_key = self.state_format, self.blocks.by_key
        cached = set(plan.host_cached_weights)
        largest = max((g.numel for g in self.moving if g.key not in cached), default=0)
        largest_trained = max((group.numel for group in self.blocks.trained), default=0)
        chunk = min(plan.chunk_params, largest_trained)
        resident, learning = self.resident
        return {
            "weight slots": plan.weight_slots * largest * fmt.weight_bytes,
            **({} if self.has_own_memory else self.dequantised),
            "optimizer state ring": plan.ring * fmt.state_size(chunk),
            "gradient staging": _staging_bytes(plan, chunk),
            "resident parameters": learning * (fmt.weight_bytes + FLOAT),
            WAITING: self._gradient_bytes(plan),
            CACHED_WEIGHTS: fmt.weight_bytes
            * (resident + sum(by_key[key].numel for key in cached)),
            CACHED_STATE: self._state_sizes.cached(plan),
        }

    def _gradient_bytes(self, plan: Plan) -> int:
        """Return the bytes of gradients that outlive the backward of their block.

        They belong to tied weights, to blocks whose update is in flight, and to held
        groups.
        """
        width, held = self.gradient_width, self._held(plan)
        passing = sorted((g.numel for g in self.trained if g.key not in held), reverse=True)
        tied = numel(g for g in self.tied if self.has_own_memory or g.key not in held)
        kept = sum(group.numel for group in self.trained if group.key in held)
        return width * (kept + sum(passing[: plan.grad_groups])) + FLOAT * tied

    def _held(self, plan: Plan) -> set[str]:
        """Return the groups whose gradients wait in memory for the next forward."""
        if needs_all_gradients(plan):
            return {group.key for group in self.trained} - set(plan.spilled_gradients)
        return set(plan.deferred)

    # -- activations ------------------------------------------------------------------------------

    @cached_property
    def _input_bytes(self) -> int:
        """The bytes of the inputs of all sites."""
        footprint = self.footprint
        return sum(site.input_bytes for site in footprint.sites.values()) if footprint else 0

    def activations(self, plan: Plan) -> dict[str, int]:
        """Return the bytes of block inputs and kept activations in host memory."""
        if self.footprint is None:
            return {}
        moved = [self.site_bytes(plan, name) for name in plan.spilled_sites]
        buffers = plan.act_buffers * max(moved, default=0)
        moved_away = {*plan.spilled_sites, *plan.staying}
        inputs = self._input_bytes - sum(
            self.footprint.sites[name].input_bytes for name in moved_away
        )
        kept = 0
        if plan.kept:
            sizes = self.sizes
            kept = sum(sizes.by_site(plan.kept))
            kept -= sum(sizes.bytes_of(plan.kept, name) for name in moved_away)
        return {INPUTS: inputs, KEPT: kept, BUFFERS: buffers}

    # -- compute ----------------------------------------------------------------------------------

    def _peak_held(self, plan: Plan) -> HeldBytes:
        """Return the bytes by owner that compute holds in host memory at its peak."""
        footprint, by_key = self.footprint, self.blocks.by_key
        assert footprint is not None
        groups = {s.name: tuple(by_key[key] for key in s.groups) for s in self.blocks.sites}
        calls = [self._call(plan, name, groups[name]) for name in footprint.sites]
        if self.head is not None:
            streams, work = footprint.outside + self.stream, self.head_work(plan)
            calls.append(Call(groups=groups[self.head.name], streams=streams, work=work))
        rules = Rules(
            held=self._held(plan),
            groups=plan.grad_groups,
            width=self.gradient_width,
            moving=plan.act_buffers,
        )
        return peak_host(calls, rules)

    def _call(self, plan: Plan, name: str, groups: tuple[FlatGroup, ...]) -> Call:
        """Return the memory of the call of one site, which uses `groups`.

        The kept results of one slice are subtracted from the work of backward, because they are
        counted as kept.
        """
        assert self.footprint is not None
        site, kept = self.footprint.sites[name], self.sizes.bytes_of(plan.kept, name)
        moved, inputs = name in plan.spilled_sites, site.input_bytes
        return Call(
            groups=groups,
            inputs=0 if moved else inputs,
            kept=0 if moved else kept,
            moved=inputs + kept if moved else 0,
            forward=site.forward_bytes,
            work=max(0, site.peak_bytes - kept // self.slices),
            # Backward holds two gradients of the hidden state of the whole batch. The part of
            # the current slice is counted in the work of its block, so only the others are added.
            streams=2 * (self.stream - self.stream // self.slices),
        )


def dequantised_ledger(blocks: Blocks, weight_bytes: int) -> HeldBytes:
    """Return the bytes by owner for dequantised weights and for the work of dequantising."""
    work = dequantising_bytes(blocks)
    return {DEQUANTISED: dequantised_bytes(blocks, weight_bytes), "work of dequantising": work}


def numel(groups: Iterable[FlatGroup]) -> int:
    return sum(group.numel for group in groups)
