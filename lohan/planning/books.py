"""What a plan costs in bytes: its ledger, by tier and owner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property

from lohan.layout import Blocks, Group, Site
from lohan.optim import USUAL, StateKind
from lohan.plan import Kept, LedgerEntry, Plan
from lohan.planning.demand import Load
from lohan.planning.moments import INPUTS, KEPT, Call, Moment, Rules, most_held
from lohan.planning.on_device import Around, Stop, most_on_device
from lohan.planning.sizes import KeptSizes
from lohan.state import FLOAT, HALF, chunks, mode_with

LOGIT_COPIES = 3  # in fp32: log-softmax, its gradient, and that of the logits
BUFFERS = "activation buffers"
IN_FLIGHT = 2  # sites, and slices of each, whose activations are on their way at a time


class Books:
    """Keeps the ledger of plans for one model, batch and micro-batch. `linked`: the device has a
    memory of its own; otherwise compute works in host memory."""

    def __init__(
        self, blocks: Blocks, mode: str, load: Load | None, micro_batch: int | None,
        *, linked: bool = False, generations: int = 2, gradients_on_ssd: bool | None = None,
        kind: StateKind = USUAL, world: int = 1,
    ) -> None:  # fmt: skip
        self.blocks, self.load, self.micro_batch = blocks, load, micro_batch
        self.mode, self._world = mode_with(mode, kind), world
        self.linked, self._generations, self._held_on_ssd = linked, generations, gradients_on_ssd
        self.moving = [group for group in blocks.groups if not group.resident]
        self.trained = [group for group in self.moving if not group.frozen]
        self._found = None if load is None else load.measure(micro_batch or load.batch)
        self.sizes = KeptSizes(load, self._found, width=self.mode.weight_bytes)
        self.block_sites = self.sizes.names  # whose activations may be kept, in order of forward
        self.shares = {site.name: self._share(site) for site in blocks.sites}  # that are trained
        self.priced: dict[tuple[int, Kept], tuple[float, float, float]] = {}  # what `choices` found
        self._moments: dict[tuple[object, ...], Moment] = {}  # of compute on a device
        batch = load.batch if load is not None else 1
        self.slices = -(-batch // (micro_batch or batch))
        self._slice = min(1.0, (micro_batch or batch) / batch)  # share of the largest one

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
        return sum(self._on_device(plan).values()) if self.linked else 0

    # -- state ------------------------------------------------------------------------------------

    @cached_property
    def _input_bytes(self) -> int:
        """Of all sites."""
        found = self._found
        return sum(site.input_bytes for site in found.sites.values()) if found else 0

    @cached_property
    def _largest_input(self) -> int:
        """Of those that travel over the link."""
        found = self._found
        return max((s.travel_bytes for s in found.sites.values()), default=0) if found else 0

    @cached_property
    def _shared_inputs(self) -> int:
        """Masks and the like, which do not travel."""
        sites = self._found.sites.values() if self._found else ()
        return sum(site.input_bytes - site.travel_bytes for site in sites)

    @cached_property
    def _groups(self) -> dict[str, tuple[str, ...]]:
        return {site.name: site.groups for site in self.blocks.sites}

    @cached_property
    def _largest(self) -> tuple[int, int]:
        """Parameters of the largest group that is trained, and of any that moves."""
        trained = max((group.numel for group in self.trained), default=0)
        return trained, max(group.numel for group in self.moving)

    @cached_property
    def _tied(self) -> list[Group]:
        """Groups that several sites use: their gradients wait for the last of them."""
        uses = Counter(key for site in self.blocks.sites for key in site.groups)
        return [group for group in self.trained if uses[group.key] > 1]

    @cached_property
    def _trained_sizes(self) -> list[int]:
        return [group.numel for group in self.blocks.trained]

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
        tied = _numel(g for g in self._tied if self.linked or g.key not in held)
        kept = sum(group.numel for group in self.trained if group.key in held)
        return width * (kept + sum(passing[: plan.grad_groups])) + FLOAT * tied

    def _held(self, plan: Plan) -> set[str]:
        """Groups whose gradients wait in memory for the next forward."""
        if plan.holds_all:
            return {group.key for group in self.trained} - set(plan.spilled)
        return set(plan.deferred)

    @property
    def gradient_width(self) -> int:
        """Sums, over slices or over ranks, are fp32."""
        sums = self.slices > 1 or self._world > 1
        return FLOAT if sums or self.mode.name == "fp32" else HALF

    # -- activations ------------------------------------------------------------------------------

    def activations(self, plan: Plan) -> dict[str, int]:
        """Block inputs and what else is kept until backward, in host memory."""
        if self._found is None:
            return {}
        moved = [self.site_bytes(plan, name) for name in plan.moved_out]
        buffers = plan.act_buffers * max(moved, default=0)
        gone = {*plan.moved_out, *plan.staying}
        inputs = self._input_bytes - sum(self._found.sites[name].input_bytes for name in gone)
        kept = 0
        if plan.kept:
            sizes = self.sizes
            kept = sum(sizes.by_site(plan.kept))
            kept -= sum(sizes.bytes_of(plan.kept, name) for name in gone)
        return {
            INPUTS: inputs,
            KEPT: kept,
            BUFFERS: buffers,
        }

    def site_bytes(self, plan: Plan, name: str) -> int:
        return self.sizes.site_bytes(plan.kept, name)

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
        site, kept = self._found.sites[name], self.sizes.bytes_of(plan.kept, name)
        moved, inputs = name in plan.moved_out, site.input_bytes
        return Call(
            groups=groups, inputs=0 if moved else inputs, kept=0 if moved else kept,
            moved=inputs + kept if moved else 0, ahead=site.forward_bytes,
            work=max(0, site.peak_bytes - kept // self.slices),
            # Gradients of the whole batch, where a block's work has those of a slice.
            streams=2 * (stream - stream // self.slices),
        )  # fmt: skip

    def _head_work(self, plan: Plan, load: Load) -> int:
        """Of one slice of tokens: logits and their gradients, then gradients of the weights beside
        the sum of those before."""
        if load.head_group is None or not load.vocabulary:
            return 0
        groups = [self.blocks.by_key[key] for key in self._head(load.head_group).groups]
        weight = plan.world * _numel(group for group in groups if not group.frozen)
        tokens = min(plan.head_tokens, load.tokens)
        gathered = weight * FLOAT if tokens < load.tokens else 0
        logits = tokens * load.vocabulary * FLOAT
        hidden = tokens * load.hidden * self.mode.weight_bytes
        made = logits + hidden + weight * self.mode.weight_bytes
        return gathered + hidden + max(LOGIT_COPIES * logits, made)

    def head_share(self, head_group: str) -> float:
        return self.shares[self._head(head_group).name]

    def _share(self, site: Site) -> float:
        groups = [self.blocks.by_key[key] for key in site.groups]
        return _numel(g for g in groups if not g.frozen) / max(1, _numel(groups))

    def _head(self, head_group: str) -> Site:
        """The last one, where the embedding has the same weights."""
        return [site for site in self.blocks.sites if head_group in site.groups][-1]

    def _on_device(self, plan: Plan) -> dict[str, int]:
        """Blocks are whole there, whoever has them in host memory and on SSD."""
        resident, trained = (plan.world * count for count in self.resident)
        learning, largest = (plan.world * count for count in self._largest)
        return {
            "weights": plan.device_slots * largest * self.mode.weight_bytes,
            # A message in fp32 to all ranks, and theirs.
            "exchange between ranks": 2 * learning * FLOAT if plan.world > 1 else 0,
            # They wait for their last block here, to be exchanged once.
            "tied gradients": plan.world * FLOAT * _numel(self._tied) if plan.world > 1 else 0,
            "resident parameters": resident * self.mode.weight_bytes + trained * FLOAT,
            "activations in flight": IN_FLIGHT * self._in_flight(plan),
            "inputs that blocks share": self._shared_inputs,
            **self._at_most_there(plan),
        }

    def _in_flight(self, plan: Plan) -> int:
        """Of one site: its inputs, and kept results of some slices."""
        kept = max(self.sizes.by_site(plan.kept), default=0)
        return self._largest_input + int(min(1.0, IN_FLIGHT * self._slice) * kept)

    def _at_most_there(self, plan: Plan) -> Moment:
        """What compute holds on the device when that is most."""
        load, found = self.load, self._found
        if load is None or found is None:
            return {}
        key = (plan.kept, plan.staying, plan.device_grads, plan.head_tokens, plan.world)
        if key not in self._moments:
            stream = load.tokens * load.hidden * self.mode.weight_bytes
            head = self._head(load.head_group).groups if load.head_group is not None else ()
            around = Around(
                stream=stream, outside=found.outside, head=self._head_work(plan, load),
                # Gradients of the whole batch, where a block's work has those of a slice.
                beside=2 * int((1 - self._slice) * stream),
                head_gradients=plan.world * self._gradients_of(head), groups=plan.device_grads,
                sums=self.slices > 1,
            )  # fmt: skip
            self._moments[key] = most_on_device(self._stops(plan), around)
        return self._moments[key]

    def _stops(self, plan: Plan) -> list[Stop]:
        """A block's forward makes what is kept of a slice, its backward finds it in flight. Of many
        equal blocks in a row a few are enough: more of them hold no more."""
        kept = dict(zip(self.block_sites, self.sizes.by_site(plan.kept), strict=True))
        stops: list[Stop] = []
        before, run = None, 0
        for name, sizes in self._sites.items():
            own, stays = int(self._slice * kept.get(name, 0)), name in plan.staying
            run = run + 1 if before == (sizes, own, stays) else 0
            before = (sizes, own, stays)
            if run > plan.device_grads + 1:
                continue
            ahead, back, gradients = sizes
            stops.append(
                Stop(
                    ahead=ahead + (0 if stays else own),
                    back=max(0, back - own),
                    stays=self.site_bytes(plan, name) if stays else 0,
                    gradients=plan.world * gradients,
                )
            )
        return stops

    @cached_property
    def _sites(self) -> dict[str, tuple[int, int, int]]:
        """Bytes of each site's work in forward and in backward, and of its gradients."""
        assert self._found is not None
        return {
            name: (site.forward_bytes, site.peak_bytes, self._gradients_of(self._groups[name]))
            for name, site in self._found.sites.items()
        }

    def _gradients_of(self, groups: Iterable[str]) -> int:
        members = [self.blocks.by_key[key] for key in groups]
        trained = _numel(g for g in members if not g.frozen and not g.resident)
        return trained * self.gradient_width


def _numel(groups: Iterable[Group]) -> int:
    return sum(group.numel for group in groups)
