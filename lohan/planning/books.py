"""What a plan costs in bytes: its ledger, by tier and owner."""

from __future__ import annotations

from dataclasses import replace

from lohan.layout import RESIDENT, Blocks
from lohan.plan import Kept, LedgerEntry, Plan
from lohan.planning.demand import Load
from lohan.state import FLOAT, HALF, MODES, chunks

LOGIT_COPIES = 4  # logits, their fp32 copy, log-softmax, gradient
PADDING = 2**16  # of the tensors of one site, when they are packed
IN_FLIGHT = 2  # slices whose kept activations are on the device at a time


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
        self.moving = [group for group in blocks.groups if group.key != RESIDENT]
        self._found = None if load is None else load.measure(micro_batch or load.batch)
        # Sites whose activations may be kept, in order of forward.
        self.block_sites: list[str] = []
        if load is not None and self._found is not None:
            self.block_sites = [name for name in self._found.sites if name in load.shapes]
        self._known: dict[tuple[Kept, str], int] = {}  # bytes that a site keeps
        self._number = {name: i for i, name in enumerate(self.block_sites)}

    def with_ledger(self, plan: Plan) -> Plan:
        device = self._on_device(plan) if self.linked else {}
        host = {**self._state(plan), **self.activations(plan)}
        if not self.linked:
            host |= self._work(plan)
        entries = [LedgerEntry("device", owner, count) for owner, count in device.items() if count]
        entries += [LedgerEntry("host", owner, count) for owner, count in host.items() if count]
        moved = tuple(self.site_bytes(plan, name) for name in plan.moved_out)
        return replace(plan, moved_bytes=moved, ledger=(*entries, *self._on_ssd(plan)))

    def device_bytes(self, plan: Plan) -> int:
        return sum(self._on_device(plan).values()) if self.linked else 0

    # -- state ------------------------------------------------------------------------------------

    def _on_ssd(self, plan: Plan) -> list[LedgerEntry]:
        total = sum(group.numel for group in self.blocks.groups)
        stored = self.mode.weight_bytes + self.mode.state_bytes
        copies = self._generations
        entries = [LedgerEntry("ssd", f"weights and state x{copies}", copies * total * stored)]
        if plan.holds_all and self._held_on_ssd:
            entries.append(LedgerEntry("ssd", "held gradients", total * FLOAT))
        if plan.moved_out:
            moved = sum(self.site_bytes(plan, name) for name in plan.moved_out)
            entries.append(LedgerEntry("ssd", "activations", moved))
        return entries

    def _state(self, plan: Plan) -> dict[str, int]:
        mode, by_key = self.mode, self.blocks.by_key
        pinned = set(plan.pinned_weights)
        largest = max((g.numel for g in self.moving if g.key not in pinned), default=0)
        biggest = max(group.numel for group in self.blocks.groups)
        chunk = min(plan.chunk_params, biggest)
        resident = by_key[RESIDENT].numel if RESIDENT in by_key else 0
        state = sum(
            (cut.stop - cut.start) * mode.state_bytes
            for key, index in plan.pinned_state
            for cut in (chunks(by_key[key], plan.chunk_params)[index],)
        )
        return {
            "weight slots": plan.weight_slots * largest * mode.weight_bytes,
            "optimizer state ring": plan.ring * chunk * mode.state_bytes,
            "gradient staging": plan.ring * chunk * FLOAT if plan.spilled else 0,
            "resident parameters": resident * (mode.weight_bytes + FLOAT),
            "waiting gradients": self._gradient_bytes(plan),
            "pinned weights": mode.weight_bytes
            * (resident + sum(by_key[key].numel for key in pinned)),
            "pinned optimizer state": state,
        }

    def _gradient_bytes(self, plan: Plan) -> int:
        """Gradients that outlive their block's backward: of tied weights, of blocks whose update
        is under way, and those that are held."""
        width = self.gradient_width
        uses: dict[str, int] = {}
        for site in self.blocks.sites:
            for key in site.groups:
                uses[key] = uses.get(key, 0) + 1
        held = set(plan.deferred)
        if plan.holds_all:
            held = {group.key for group in self.moving} - set(plan.spilled)
        passing = sorted((g.numel for g in self.moving if g.key not in held), reverse=True)
        tied = sum(g.numel for g in self.moving if uses.get(g.key, 0) > 1 and g.key not in held)
        kept = sum(group.numel for group in self.moving if group.key in held)
        return width * (kept + sum(passing[: plan.grad_groups])) + FLOAT * tied

    @property
    def gradient_width(self) -> int:
        several = self.load is not None and (self.micro_batch or self.load.batch) < self.load.batch
        return FLOAT if several or self.mode.name == "fp32" else HALF

    # -- activations ------------------------------------------------------------------------------

    def activations(self, plan: Plan) -> dict[str, int]:
        """Block inputs and what else is kept until backward, in host memory."""
        if self._found is None:
            return {}
        moved = set(plan.moved_out)
        sizes = {name: self.site_bytes(plan, name) for name in moved}
        buffers = plan.act_buffers * max(sizes.values(), default=0)
        inputs = sum(
            site.input_bytes for name, site in self._found.sites.items() if name not in moved
        )
        kept = 0
        if plan.kept:
            kept = sum(self._kept_bytes(plan, n) for n in self.block_sites if n not in moved)
        return {
            "block inputs": inputs,
            "kept activations": kept,
            "activation buffers": buffers,
        }

    def site_bytes(self, plan: Plan, name: str) -> int:
        """Input and kept activations of one site, for the whole batch."""
        assert self._found is not None
        return self._found.sites[name].input_bytes + self._kept_bytes(plan, name) + PADDING

    def kept_classes(self, plan: Plan, name: str) -> set[str]:
        """Classes that one site keeps. Where not all sites keep a class, those that do are spread
        evenly: the lanes are loaded evenly then."""
        number, total = self._number[name], len(self.block_sites)
        return {kind for kind, count in plan.kept if number * count % total < count}

    def _kept_bytes(self, plan: Plan, name: str) -> int:
        if self.load is None or name not in self.load.shapes:
            return 0
        key = (plan.kept, name)
        if key not in self._known:
            self._known[key] = self._sum_of_kept(plan, name, self.load)
        return self._known[key]

    def _sum_of_kept(self, plan: Plan, name: str, load: Load) -> int:
        classes = self.kept_classes(plan, name)
        elements = sum(
            part.elements for part in load.shapes[name].activations if part.name in classes
        )
        return int(elements * load.tokens * self.mode.weight_bytes)

    # -- compute ----------------------------------------------------------------------------------

    def _work(self, plan: Plan) -> dict[str, int]:
        load = self.load
        if load is None or self._found is None:
            return {}
        stream = load.tokens * load.hidden * self.mode.weight_bytes
        return {
            "hidden state and its gradient": 3 * stream,
            "work of one block or the head": max(
                self._found.peak_bytes, self._head_work(plan, load, stream)
            ),
        }

    def _head_work(self, plan: Plan, load: Load, stream: int) -> int:
        if load.head_group is None or not load.vocabulary:
            return 0
        weight = self.blocks.by_key[load.head_group].numel
        slices = -(-load.tokens // plan.head_tokens)
        grads = weight * (FLOAT + self.mode.weight_bytes if slices > 1 else self.mode.weight_bytes)
        per_token = load.vocabulary * FLOAT * LOGIT_COPIES + load.hidden * 2 * FLOAT
        return grads + plan.head_tokens * per_token + 2 * stream

    def _on_device(self, plan: Plan) -> dict[str, int]:
        largest = max(group.numel for group in self.moving)
        resident = self.blocks.by_key[RESIDENT].numel if RESIDENT in self.blocks.by_key else 0
        slices = 1
        if self.load is not None:
            slices = -(-self.load.batch // (self.micro_batch or self.load.batch))
        kept = max((self._kept_bytes(plan, name) for name in self.block_sites), default=0)
        return {
            "weights": plan.device_slots * largest * self.mode.weight_bytes,
            "gradients": plan.device_grads * largest * self.gradient_width,
            "resident parameters": resident * (self.mode.weight_bytes + FLOAT),
            "activations in flight": IN_FLIGHT * kept // slices,
            **self._work(plan),
        }
