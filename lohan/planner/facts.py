"""What is the same for all plans of one model, batch and micro-batch: groups, sites and sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cached_property

from lohan.model.demand import Load
from lohan.model.layout import Blocks, Group, Site
from lohan.model.plan import Plan
from lohan.model.state import FLOAT, HALF, mode_with
from lohan.optim import USUAL, StateKind
from lohan.planner.sizes import KeptSizes

LOGIT_COPIES = 3  # in fp32: log-softmax, its gradient, and that of the logits


class Facts:
    def __init__(
        self, blocks: Blocks, mode: str, load: Load | None, micro_batch: int | None,
        *, kind: StateKind = USUAL, world: int = 1,
    ) -> None:  # fmt: skip
        self.blocks, self.load, self.micro_batch = blocks, load, micro_batch
        self.mode, self._world = mode_with(mode, kind), world
        self.moving = [group for group in blocks.groups if not group.resident]
        self.trained = [group for group in self.moving if not group.frozen]
        self.found = None if load is None else load.measure(micro_batch or load.batch)
        self.sizes = KeptSizes(load, self.found, width=self.mode.weight_bytes)
        self.block_sites = self.sizes.names  # whose activations may be kept, in order of forward
        self.shares = {site.name: self._share(site) for site in blocks.sites}  # that are trained
        batch = load.batch if load is not None else 1
        self.slices = -(-batch // (micro_batch or batch))
        self.slice = min(1.0, (micro_batch or batch) / batch)  # share of the largest one

    def _share(self, site: Site) -> float:
        groups = [self.blocks.by_key[key] for key in site.groups]
        return numel(g for g in groups if not g.frozen) / max(1, numel(groups))

    @cached_property
    def tied(self) -> list[Group]:
        """Groups that several sites use: their gradients wait for the last of them."""
        uses = Counter(key for site in self.blocks.sites for key in site.groups)
        return [group for group in self.trained if uses[group.key] > 1]

    @cached_property
    def frozen(self) -> list[Group]:
        return [group for group in self.blocks.groups if group.frozen]

    @cached_property
    def resident(self) -> tuple[int, int]:
        """Parameters that are always in memory, and how many of them are trained."""
        groups = [group for group in self.blocks.groups if group.resident]
        return numel(groups), numel([group for group in groups if not group.frozen])

    @property
    def gradient_width(self) -> int:
        """Sums, over slices or over ranks, are fp32."""
        sums = self.slices > 1 or self._world > 1
        return FLOAT if sums or self.mode.name == "fp32" else HALF

    @cached_property
    def stream(self) -> int:
        """Bytes of the hidden state of the batch."""
        load = self.load
        return load.tokens * load.hidden * self.mode.weight_bytes if load is not None else 0

    def site_bytes(self, plan: Plan, name: str) -> int:
        return self.sizes.site_bytes(plan.kept, name)

    # -- the head ---------------------------------------------------------------------------------

    @cached_property
    def head(self) -> Site | None:
        """The last one with its group, where the embedding has the same weights."""
        key = self.load.head_group if self.load is not None else None
        sites = [site for site in self.blocks.sites if key in site.groups]
        return sites[-1] if sites else None

    def head_work(self, plan: Plan) -> int:
        """Of one slice of tokens: logits and their gradients, then gradients of the weights beside
        the sum of those before."""
        load = self.load
        if load is None or self.head is None or not load.vocabulary:
            return 0
        groups = [self.blocks.by_key[key] for key in self.head.groups]
        weight = plan.world * numel(group for group in groups if not group.frozen)
        tokens = min(plan.head_tokens, load.tokens)
        gathered = weight * FLOAT if tokens < load.tokens else 0
        logits = tokens * load.vocabulary * FLOAT
        hidden = tokens * load.hidden * self.mode.weight_bytes
        made = logits + hidden + weight * self.mode.weight_bytes
        return gathered + hidden + max(LOGIT_COPIES * logits, made)


def numel(groups: Iterable[Group]) -> int:
    return sum(group.numel for group in groups)
