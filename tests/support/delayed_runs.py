"""Small models whose blocks cover every case of the schedule, with any plan and any delays."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

import lohan
from lohan.device.emulated import EmulatedDevice
from lohan.engine.lanes import Lanes
from lohan.model.layout import RESIDENT, Blocks
from lohan.model.plan import MOST_CLIPPED, Plan
from lohan.planner.planner import Planned, PlanProblem, closed_form_plan, make_plan
from lohan.schedule.actions import Action
from lohan.schedule.placement import Gate, gate_of
from lohan.store.io_engine import IOEngine
from tests.support.memory_engine import MemoryEngine
from tests.support.small_models import attached, batches, stored_bytes

WIDTH = 48
CHUNK = 4096  # elements: most groups below have several chunks
STREAMS = ("compute", "h2d", "d2h", "slices")  # of the emulated device
ANOTHER_ORDER = 1e-12  # of sums in double precision: 4096 terms are added one by one at most


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.out(torch.tanh(self.linear(self.norm(x)))))


class Net(nn.Module):
    """A small network with shared weights and optional blocks.

    `tied`: entry and exit share a matrix, which makes one group with two sites. `several`: the
    second block shares a matrix with the first, which makes a site with two groups, and the
    first block runs twice. A parameter outside the blocks is resident. `skip` leaves a block
    out of a step; `still` stops gradients in front of it.
    """

    def __init__(self, kind: str = "plain", dropout: float = 0.0) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(4))
        self.exit = nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(0.1 * torch.randn(WIDTH))
        self.repeat = kind == "several"
        if kind == "tied":
            self.exit.weight = self.entry.weight
        if kind == "several":
            self.blocks[1].linear.weight = self.blocks[0].linear.weight

    def forward(
        self,
        x: torch.Tensor,
        target: torch.Tensor,
        skip: torch.Tensor | None = None,
        still: torch.Tensor | None = None,
    ) -> torch.Tensor:
        hidden = self.entry(x) + self.shift
        for number, block in enumerate(self.blocks):
            if skip is None or int(skip) != number:
                result = block(hidden)
                if still is not None and int(still) == number:
                    result = hidden + (result - hidden).detach()
                hidden = result
        if self.repeat:
            hidden = self.blocks[0](hidden)
        return nn.functional.mse_loss(self.exit(hidden), target)


SIZES = {"use_cache": False, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
LANGUAGE = {  # with the sliced head
    "llama": LlamaConfig(
        **SIZES,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    ),
    "gpt2": GPT2Config(
        **SIZES,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
}


def net(
    kind: str = "plain", *, dtype: torch.dtype = torch.float32, dropout: float = 0.0
) -> nn.Module:
    torch.manual_seed(3)
    if kind in LANGUAGE:
        return AutoModelForCausalLM.from_config(LANGUAGE[kind]).to(dtype).train()
    return Net(kind, dropout).to(dtype).train()


def data(
    steps: int,
    *,
    kind: str = "plain",
    dtype: torch.dtype = torch.float32,
    skip: dict[int, int] | None = None,
    still: dict[int, int] | None = None,
) -> list[dict[str, torch.Tensor]]:
    """`skip`: step -> block left out; `still`: step -> block that gets no gradient."""
    if kind in LANGUAGE:
        return batches(steps, batch=4, seq=12, vocab=64)
    generator = torch.Generator().manual_seed(5)
    created = []
    for step in range(steps):
        batch = {
            name: torch.randn(4, 3, WIDTH, generator=generator).to(dtype)
            for name in ("x", "target")
        }
        for name, steps in (("skip", skip), ("still", still)):
            if steps and step in steps:
                batch[name] = torch.tensor(steps[step])
        created.append(batch)
    return created


# -- plans ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What a plan is changed to; models here are so small that every budget would hold them."""

    window: int = 1
    slots: int = 2  # more than the widest site needs
    ring: int = 2
    grads: int = 1
    cached: float = 0.0  # share of the groups and chunks that stay in memory
    spilled: float = 1.0  # share of the held gradients that go to SSD
    deferred: float = 0.5  # share of the groups that `balanced` updates in the next forward
    own_thread: bool = False  # for updates, instead of the caller's
    device_slots: int = 0  # more than the widest site needs, on a device with its own memory
    device_grads: int = 1
    most_clipped: float = MOST_CLIPPED

    def apply(self, plan: Plan, blocks: Blocks) -> Plan:
        keys = [group.key for group in blocks.groups if group.key != RESIDENT]
        widest = max(len(site.groups) for site in blocks.sites)
        chunks = [(g.key, c) for g in blocks.groups for c in range(-(-g.numel // CHUNK))]

        def some(items: list[Any], share: float) -> tuple[Any, ...]:
            """Spread over all of them: neighbours differ."""
            return tuple(x for i, x in enumerate(items) if int((i + 1) * share) > int(i * share))

        weights, state = some(keys, self.cached), some(chunks, self.cached)
        balanced = plan.update_mode == "balanced" and plan.overlap and gate_of(plan) is Gate.NONE
        return replace(
            plan,
            chunk_params=CHUNK,
            weight_slots=widest + self.slots,
            window=self.window,
            ring=self.ring,
            grad_groups=self.grads,
            host_cached_weights=weights,
            host_cached_state=state,
            spilled_gradients=some(keys, self.spilled) if gate_of(plan) is Gate.NORM else (),
            deferred=some(keys, self.deferred) if balanced else (),
            device_slots=widest + self.device_slots if plan.device_slots else 0,
            device_grads=self.device_grads,
            most_clipped=self.most_clipped,
        )


def tuned(monkeypatch: pytest.MonkeyPatch, tuning: Tuning) -> None:
    def planned(problem: PlanProblem) -> Planned:
        if problem.in_one_memory:
            return make_plan(problem)
        return Planned(tuning.apply(closed_form_plan(problem), problem.blocks), None)

    def lanes(*args: Any, **kwargs: Any) -> Lanes:
        has_own_memory = kwargs["device"].has_own_memory
        return Lanes(
            *args, **{**kwargs, "updates_on_caller": not (tuning.own_thread or has_own_memory)}
        )

    monkeypatch.setattr("lohan.engine.attach.make_plan", planned)
    monkeypatch.setattr("lohan.engine.executor.Lanes", lanes)


# -- delays ---------------------------------------------------------------------------------------


def random_delay(seed: int) -> Callable[..., None]:
    """Mostly nothing, now and then long enough that every other lane overtakes."""
    draw = random.Random(seed)
    return lambda *_: time.sleep(draw.choice((0, 0, 0, 0, 0.0005, 0.003)))


def delay_actions(session: lohan.Session, delay: Callable[[Action], None]) -> None:
    """Call `delay` with every action of a lane's thread before the runner gets it."""
    runner = session.executor.runner
    submit, run = runner.submit, runner.run

    def delayed_submit(action: Action) -> Any:
        delay(action)
        return submit(action)

    def delayed_run(action: Action, scalars: Any) -> None:
        delay(action)
        run(action, scalars)

    runner.submit, runner.run = delayed_submit, delayed_run  # type: ignore[method-assign]


def delay_lanes(session: lohan.Session, seed: int) -> None:
    late: dict[str, Callable[..., None]] = {}

    def delay(action: Action) -> None:
        late.setdefault(action.lane, random_delay(hash((seed, action.lane)) % 2**31))()

    delay_actions(session, delay)
    if isinstance(session.context.device, EmulatedDevice):
        streams = {lane: random_delay(seed + i) for i, lane in enumerate(STREAMS)}
        session.context.device.delay = lambda lane: streams[lane]()
    for site in session.executor.blocks.sites:  # the compute lane is the model's own code
        inner = session.model.get_submodule(site.name)
        leaf = next(iter(inner.children()), inner)
        leaf.register_forward_pre_hook(random_delay(seed + len(site.name)))


# -- runs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """Everything that must not depend on how a run was scheduled."""

    losses: list[float]
    norms: list[float | None]
    stored: dict[str, bytes]
    progress: object

    def check(self, other: Result) -> None:
        assert list(map(repr, self.losses)) == list(map(repr, other.losses))  # nan equals nan
        assert list(map(repr, self.norms)) == list(map(repr, other.norms))
        assert self.progress == other.progress
        assert self.stored.keys() == other.stored.keys()
        assert [k for k in self.stored if self.stored[k] != other.stored[k]] == []

    def check_there(self, other: Result) -> None:
        """Check a run on an accelerator against one on the CPU.

        The device sums squares in another order, in double precision. This affects only
        what needs the norm.
        """
        if self.norms[0] is not None:
            assert self.norms == pytest.approx(other.norms, rel=ANOTHER_ORDER, nan_ok=True)
        self.check(replace(other, norms=self.norms))


def memory_engine(files: dict[str, bytearray] | None = None) -> IOEngine:
    return MemoryEngine(files=files)


def train(
    model: nn.Module,
    made: list[dict[str, torch.Tensor]],
    place: Path,
    *,
    seed: int | None = None,
    between: Callable[[nn.Module, int], None] = lambda model, step: None,
    scale: Callable[[int], float] = lambda step: 1.0,
    **options: Any,
) -> Result:
    """One run. `seed` delays every lane; `between` is called before each step."""
    options.setdefault("engine", memory_engine())
    losses, norms = [], []
    with attached(model, place, **options) as session:
        session.executor.lanes.stall_s = 15.0  # a lock-up fails within the test's patience
        if seed is not None:
            delay_lanes(session, seed)
        torch.manual_seed(11)
        for step, batch in enumerate(made):
            between(model, step)
            loss = model(**batch)
            loss = loss if isinstance(loss, torch.Tensor) else loss.loss
            (loss * scale(step)).backward()
            losses.append(loss.item())
            norms.append(session.grad_norm)
        return Result(losses, norms, stored_bytes(session), session.executor.record.train_state)
