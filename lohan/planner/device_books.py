"""What a plan costs in bytes of a device's own memory."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from lohan.model.plan import Plan
from lohan.model.state import FLOAT
from lohan.planner.facts import Facts, numel
from lohan.planner.moments import Moment
from lohan.planner.on_device import Around, Stop, most_on_device

IN_FLIGHT = 2  # sites, and slices of each, whose activations are on their way at a time


class DeviceBooks:
    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._moments: dict[tuple[object, ...], Moment] = {}

    def ledger(self, plan: Plan) -> dict[str, int]:
        """Blocks are whole there, whoever has them in host memory and on SSD."""
        facts = self._facts
        resident, trained = (plan.world * count for count in facts.resident)
        learning, largest = (plan.world * count for count in self._largest)
        return {
            "weights": plan.device_slots * largest * facts.mode.weight_bytes,
            # A message in fp32 to all ranks, and theirs.
            "exchange between ranks": 2 * learning * FLOAT if plan.world > 1 else 0,
            # They wait for their last block here, to be exchanged once.
            "tied gradients": plan.world * FLOAT * numel(facts.tied) if plan.world > 1 else 0,
            "resident parameters": resident * facts.mode.weight_bytes + trained * FLOAT,
            "activations in flight": IN_FLIGHT * self._in_flight(plan),
            "inputs that blocks share": self._shared_inputs,
            **self._at_most(plan),
        }

    @cached_property
    def _largest(self) -> tuple[int, int]:
        """Parameters of the largest group that is trained, and of any that moves."""
        trained = max((group.numel for group in self._facts.trained), default=0)
        return trained, max(group.numel for group in self._facts.moving)

    @cached_property
    def _largest_input(self) -> int:
        """Of those that travel over the link."""
        found = self._facts.found
        return max((s.travel_bytes for s in found.sites.values()), default=0) if found else 0

    @cached_property
    def _shared_inputs(self) -> int:
        """Masks and the like, which do not travel."""
        found = self._facts.found
        return sum(s.input_bytes - s.travel_bytes for s in found.sites.values()) if found else 0

    def _in_flight(self, plan: Plan) -> int:
        """Of one site: its inputs, and kept results of some slices."""
        kept = max(self._facts.sizes.by_site(plan.kept), default=0)
        return self._largest_input + int(min(1.0, IN_FLIGHT * self._facts.slice) * kept)

    def _at_most(self, plan: Plan) -> Moment:
        """What compute holds there when that is most."""
        facts = self._facts
        if facts.found is None:
            return {}
        key = (plan.kept, plan.staying, plan.device_grads, plan.head_tokens, plan.world)
        if key not in self._moments:
            head = facts.head.groups if facts.head is not None else ()
            around = Around(
                stream=facts.stream, outside=facts.found.outside, head=facts.head_work(plan),
                # Gradients of the whole batch, where a block's work has those of a slice.
                beside=2 * int((1 - facts.slice) * facts.stream),
                head_gradients=plan.world * self._gradients_of(head), groups=plan.device_grads,
                sums=facts.slices > 1,
            )  # fmt: skip
            self._moments[key] = most_on_device(self._stops(plan), around)
        return self._moments[key]

    def _stops(self, plan: Plan) -> list[Stop]:
        """A block's forward makes what is kept of a slice, its backward finds it in flight. Of many
        equal blocks in a row a few are enough: more of them hold no more."""
        facts = self._facts
        kept = dict(zip(facts.block_sites, facts.sizes.by_site(plan.kept), strict=True))
        stops: list[Stop] = []
        before, run = None, 0
        for name, sizes in self._sites.items():
            own, stays = int(facts.slice * kept.get(name, 0)), name in plan.staying
            run = run + 1 if before == (sizes, own, stays) else 0
            before = (sizes, own, stays)
            if run > plan.device_grads + 1:
                continue
            ahead, back, gradients = sizes
            stops.append(
                Stop(
                    ahead=ahead + (0 if stays else own),
                    back=max(0, back - own),
                    stays=facts.site_bytes(plan, name) if stays else 0,
                    gradients=plan.world * gradients,
                )
            )
        return stops

    @cached_property
    def _sites(self) -> dict[str, tuple[int, int, int]]:
        """Bytes of each site's work in forward and in backward, and of its gradients."""
        assert self._facts.found is not None
        groups = {site.name: site.groups for site in self._facts.blocks.sites}
        return {
            name: (site.forward_bytes, site.peak_bytes, self._gradients_of(groups[name]))
            for name, site in self._facts.found.sites.items()
        }

    def _gradients_of(self, groups: Iterable[str]) -> int:
        members = [self._facts.blocks.by_key[key] for key in groups]
        trained = numel(g for g in members if not g.frozen and not g.resident)
        return trained * self._facts.gradient_width
