"""What a plan costs in bytes: its ledger, by tier and owner."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property

from lohan.layout import Blocks, Group, Site
from lohan.plan import Kept, LedgerEntry, Plan
from lohan.planning.demand import Load
from lohan.planning.moments import INPUTS, KEPT, STREAMS, WORK, Call, Moment, Rules, most_held
from lohan.shapes.shape import BlockShape
from lohan.state import FLOAT, HALF, MODES, chunks

LOGIT_COPIES = 3  # in fp32: log-softmax, its gradient, and that of the logits
BUFFERS = "activation buffers"
PADDING = 2**16  # of the tensors of one site, when they are packed
IN_FLIGHT = 2  # sites, and slices of each, whose activations are on their way at a time


class Books:
    """Keeps the ledger of plans for one model, batch and micro-batch. `linked`: the device has a
    memory of its own; otherwise compute works in host memory."""

    def __init__(
        self, blocks: Blocks, mode: str, load: Load | None, micro_batch: int | None,
        *, linked: bool = False, generations: int = 2, gradients_on_ssd: bool = True,
    ) -> None:  # fmt: skip
        self.blocks, self.load, self.micro_batch = blocks, load, micro_batch
        self.mode = MODES[mode]
        self.linked, self._generations, self._held_on_ssd = linked, generations, gradients_on_ssd
        self.moving = [group for group in blocks.groups if not group.resident]
        self.trained = [group for group in self.moving if not group.frozen]
        self._found = None if load is None else load.measure(micro_batch or load.batch)
        # Sites whose activations may be kept, in order of forward.
        self.block_sites: list[str] = []
        self.still_sites: list[str] = []  # that run in forward only
        if load is not None and self._found is not None:
            names = [name for name in self._found.sites if name in load.shapes]
            self.block_sites = [name for name in names if name not in self._found.still]
            self.still_sites = [name for name in names if name in self._found.still]
        self._shares = {site.name: self._share(site) for site in blocks.sites}
        self._classes: dict[Kept, list[frozenset[str]]] = {}  # that each site keeps
        self._kept: dict[Kept, list[int]] = {}  # bytes that each site keeps
        self._sizes: dict[tuple[int, frozenset[str]], int] = {}  # by kind and classes
        kinds: dict[BlockShape, int] = {}
        self.kind = {  # sites of one kind differ in their names only
            name: kinds.setdefault(replace(load.shapes[name], name=""), len(kinds))
            for name in self.block_sites if load is not None
        }  # fmt: skip
        self.priced: dict[tuple[int, Kept], tuple[float, float, float]] = {}  # what `choices` found
        self._number = {name: i for i, name in enumerate(self.block_sites)}
        batch = load.batch if load is not None else 1
        self.slices = -(-batch // (micro_batch or batch))

    def with_ledger(self, plan: Plan) -> Plan:
        device = self._on_device(plan) if self.linked else {}
        host = {**self._state(plan), **self.activations(plan)}
        if not self.linked and self._found is not None:
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

    def relieved(self, plan: Plan, device_bytes: int) -> Plan:
        """The plan, with activations staying on the device only if there is room for them."""
        return plan if self.device_bytes(plan) <= device_bytes else replace(plan, staying=())

    def rest_bytes(self, plan: Plan) -> int:
        """Host memory that everything but activations takes when most is held."""
        ledger = self.with_ledger(plan).ledger
        own = (INPUTS, KEPT, BUFFERS)
        return sum(e.bytes for e in ledger if e.tier == "host" and e.owner not in own)

    def device_bytes(self, plan: Plan) -> int:
        return sum(self._on_device(plan).values()) if self.linked else 0

    # -- state ------------------------------------------------------------------------------------

    @cached_property
    def _input_bytes(self) -> int:
        """Of all sites."""
        found = self._found
        return sum(site.input_bytes for site in found.sites.values()) if found else 0

    @cached_property
    def _largest_input(self) -> int:
        found = self._found
        return max((s.input_bytes for s in found.sites.values()), default=0) if found else 0

    @cached_property
    def _largest(self) -> tuple[int, int]:
        """Parameters of the largest group that is trained, and of any that moves."""
        trained = max((group.numel for group in self.trained), default=0)
        return trained, max(group.numel for group in self.moving)

    @cached_property
    def frozen(self) -> list[Group]:
        return [group for group in self.blocks.groups if group.frozen]

    @cached_property
    def resident(self) -> tuple[int, int]:
        """Parameters that are always in memory, and how many of them are trained."""
        groups = [group for group in self.blocks.groups if group.resident]
        return _numel(groups), _numel([group for group in groups if not group.frozen])

    def _on_ssd(self, plan: Plan) -> list[LedgerEntry]:
        trained, frozen = _numel(self.blocks.trained), _numel(self.frozen)
        stored = self.mode.weight_bytes + self.mode.state_bytes
        copies = self._generations
        entries = [LedgerEntry("ssd", f"weights and state x{copies}", copies * trained * stored)]
        if frozen:
            once = frozen * self.mode.weight_bytes
            entries.append(LedgerEntry("ssd", "frozen weights", once))
        if plan.holds_all and self._held_on_ssd:
            entries.append(LedgerEntry("ssd", "held gradients", trained * FLOAT))
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
            (cut.stop - cut.start) * mode.state_bytes
            for key, index in plan.pinned_state
            for cut in (chunks(by_key[key], plan.chunk_params)[index],)
        )
        return {
            "weight slots": plan.weight_slots * largest * mode.weight_bytes,
            "optimizer state ring": plan.ring * chunk * mode.state_bytes,
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
        uses: dict[str, int] = {}
        for site in self.blocks.sites:
            for key in site.groups:
                uses[key] = uses.get(key, 0) + 1
        passing = sorted((g.numel for g in self.trained if g.key not in held), reverse=True)
        tied = sum(g.numel for g in self.trained if uses.get(g.key, 0) > 1 and g.key not in held)
        kept = sum(group.numel for group in self.trained if group.key in held)
        return width * (kept + sum(passing[: plan.grad_groups])) + FLOAT * tied

    def _held(self, plan: Plan) -> set[str]:
        """Groups whose gradients wait in memory for the next forward."""
        if plan.holds_all:
            return {group.key for group in self.trained} - set(plan.spilled)
        return set(plan.deferred)

    @property
    def gradient_width(self) -> int:
        return FLOAT if self.slices > 1 or self.mode.name == "fp32" else HALF

    # -- activations ------------------------------------------------------------------------------

    def activations(self, plan: Plan) -> dict[str, int]:
        """Block inputs and what else is kept until backward, in host memory."""
        if self._found is None:
            return {}
        sizes = {name: self.site_bytes(plan, name) for name in plan.moved_out}
        buffers = plan.act_buffers * max(sizes.values(), default=0)
        gone = {*plan.moved_out, *plan.staying}
        inputs = self._input_bytes - sum(self._found.sites[name].input_bytes for name in gone)
        kept = 0
        if plan.kept:
            kept = sum(self._all_kept(plan)) - sum(self._kept_bytes(plan, name) for name in gone)
        return {
            INPUTS: inputs,
            KEPT: kept,
            BUFFERS: buffers,
        }

    def site_bytes(self, plan: Plan, name: str) -> int:
        """Input and kept activations of one site, for the whole batch."""
        assert self._found is not None
        return self._found.sites[name].input_bytes + self._kept_bytes(plan, name) + PADDING

    def kept_classes(self, plan: Plan, name: str) -> frozenset[str]:
        """Classes that one site keeps. Where the plan says how many sites keep a class, those that
        do are spread evenly: the lanes are loaded evenly then."""
        if plan.kept not in self._classes:
            self._classes[plan.kept] = self._spread(plan.kept)
        return self._classes[plan.kept][self._number[name]]

    def _spread(self, kept: Kept) -> list[frozenset[str]]:
        total = len(self.block_sites)
        everywhere = frozenset(kind for kind, which in kept if which == total)
        rest = [(kind, which) for kind, which in kept if which != total]
        return [
            everywhere.union(
                kind
                for kind, which in rest
                if (n in which if isinstance(which, tuple) else n * which % total < which)
            )
            for n in range(total)
        ]

    def _kept_bytes(self, plan: Plan, name: str) -> int:
        number = self._number.get(name)
        return 0 if number is None else self._all_kept(plan)[number]

    def _all_kept(self, plan: Plan) -> list[int]:
        """Bytes that each site keeps."""
        if plan.kept not in self._kept:
            assert self.load is not None
            self._kept[plan.kept] = [
                self._sum_of_kept(name, self.kept_classes(plan, name), self.load)
                for name in self.block_sites
            ]
        return self._kept[plan.kept]

    def _sum_of_kept(self, name: str, classes: frozenset[str], load: Load) -> int:
        if load.stored is not None:
            return load.stored(name, classes)
        key = (self.kind[name], classes)
        if key not in self._sizes:
            parts = load.shapes[name].activations
            elements = sum(part.elements for part in parts if part.name in classes)
            self._sizes[key] = int(elements * load.tokens * self.mode.weight_bytes)
        return self._sizes[key]

    # -- compute ----------------------------------------------------------------------------------

    def _at_most(self, plan: Plan) -> Moment:
        """What compute holds in host memory when that is most."""
        load, found = self.load, self._found
        assert load is not None and found is not None
        by_key = self.blocks.by_key
        groups = {s.name: tuple(by_key[key] for key in s.groups) for s in self.blocks.sites}
        stream = load.tokens * load.hidden * self.mode.weight_bytes
        calls = [self._call(plan, name, groups[name], stream) for name in found.sites]
        if load.head_group is not None:
            head = groups[self._head(load.head_group).name]
            work = self._head_work(plan, load)
            calls.append(Call(groups=head, streams=found.outside + stream, work=work))
        rules = Rules(
            held=self._held(plan), groups=plan.grad_groups, width=self.gradient_width,
            moving=plan.act_buffers,
        )  # fmt: skip
        return most_held(calls, rules)

    def _call(self, plan: Plan, name: str, groups: tuple[Group, ...], stream: int) -> Call:
        """Its backward takes what is kept of a slice as its own."""
        assert self._found is not None
        site, kept = self._found.sites[name], self._kept_bytes(plan, name)
        moved, inputs = name in plan.moved_out, site.input_bytes
        return Call(
            groups=groups, inputs=0 if moved else inputs, kept=0 if moved else kept,
            moved=inputs + kept if moved else 0, ahead=site.forward_bytes,
            work=max(0, site.peak_bytes - kept // self.slices),
            # Gradients of the whole batch, where a block's work has those of a slice.
            streams=2 * (stream - stream // self.slices),
        )  # fmt: skip

    def _work(self, plan: Plan, gradients: int) -> dict[str, int]:
        """On a device. While the head works, no gradients of blocks are there."""
        load = self.load
        if load is None or self._found is None:
            return {}
        stream = load.tokens * load.hidden * self.mode.weight_bytes
        head = self._head_work(plan, load) + 2 * stream
        return {STREAMS: 3 * stream, WORK: max(self._found.peak_bytes, head - gradients)}

    def _head_work(self, plan: Plan, load: Load) -> int:
        """Of one slice of tokens: logits and their gradients, then gradients of the weights beside
        the sum of those before."""
        if load.head_group is None or not load.vocabulary:
            return 0
        groups = [self.blocks.by_key[key] for key in self._head(load.head_group).groups]
        weight = _numel(group for group in groups if not group.frozen)
        tokens = min(plan.head_tokens, load.tokens)
        gathered = weight * FLOAT if tokens < load.tokens else 0
        logits = tokens * load.vocabulary * FLOAT
        hidden = tokens * load.hidden * self.mode.weight_bytes
        made = logits + hidden + weight * self.mode.weight_bytes
        return gathered + hidden + max(LOGIT_COPIES * logits, made)

    def trained_share(self, name: str) -> float:
        """Of the parameters of a site."""
        return self._shares[name]

    def head_share(self, head_group: str) -> float:
        return self._shares[self._head(head_group).name]

    def _share(self, site: Site) -> float:
        groups = [self.blocks.by_key[key] for key in site.groups]
        return _numel(g for g in groups if not g.frozen) / max(1, _numel(groups))

    def _head(self, head_group: str) -> Site:
        """The last one, where the embedding has the same weights."""
        return [site for site in self.blocks.sites if head_group in site.groups][-1]

    def _on_device(self, plan: Plan) -> dict[str, int]:
        resident, trained = self.resident
        learning, largest = self._largest
        gradients = plan.device_grads * learning * self.gradient_width
        return {
            "weights": plan.device_slots * largest * self.mode.weight_bytes,
            "gradients": gradients,
            "resident parameters": resident * self.mode.weight_bytes + trained * FLOAT,
            "activations in flight": IN_FLIGHT * self._in_flight(plan),
            "activations that stay": sum(self.site_bytes(plan, name) for name in plan.staying),
            **self._work(plan, gradients),
        }

    def _in_flight(self, plan: Plan) -> int:
        """Of one site: its inputs, and kept results of some slices."""
        if self._found is None:
            return 0
        kept = max(self._all_kept(plan), default=0) if self.block_sites else 0
        return self._largest_input + min(IN_FLIGHT, self.slices) * kept // self.slices


def _numel(groups: Iterable[Group]) -> int:
    return sum(group.numel for group in groups)
