"""Trainings through sessions whose result must not depend on plans, overlap or delays."""

from __future__ import annotations

import functools
import random
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

import lohan
from lohan.capture.blocks import cut
from lohan.device.accelerator import AcceleratorDevice
from lohan.device.base import Passed
from lohan.device.emulated import EmulatedDevice
from lohan.engine.context import workload_of
from lohan.engine.lanes import Lanes
from lohan.model.layout import RESIDENT, Blocks
from lohan.model.machine import Drive, Profile
from lohan.model.options import PlanOptions
from lohan.model.plan import MOST_CLIPPED, Plan
from lohan.planner.activations import HOST_ONLY
from lohan.planner.planner import Planned, PlanProblem, closed_form_plan, make_plan
from lohan.schedule.actions import Action
from lohan.schedule.placement import needs_all_gradients
from lohan.store.io_engine import IOEngine
from tests.support.models import attached, batches, save_model, small_model, stored_bytes
from tests.support.stores import MemoryEngine

# -- models ----------------------------------------------------------------------------------------

NET_WIDTH = 48
CHUNK_PARAMS = 4096  # elements: most groups below have several chunks
DEVICE_STREAMS = ("compute", "h2d", "d2h", "slices")  # of the emulated device
SUM_ORDER_TOLERANCE = 1e-12  # of sums in double precision: 4096 terms are added one by one at most


class NetBlock(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(NET_WIDTH)
        self.linear = nn.Linear(NET_WIDTH, 2 * NET_WIDTH)
        self.out = nn.Linear(2 * NET_WIDTH, NET_WIDTH)
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
        self.entry = nn.Linear(NET_WIDTH, NET_WIDTH)
        self.blocks = nn.ModuleList(NetBlock(dropout) for _ in range(4))
        self.exit = nn.Linear(NET_WIDTH, NET_WIDTH)
        self.shift = nn.Parameter(0.1 * torch.randn(NET_WIDTH))
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


LANGUAGE_SIZES = {"use_cache": False, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
LANGUAGE_CONFIGS = {  # with the sliced head
    "llama": LlamaConfig(
        **LANGUAGE_SIZES,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    ),
    "gpt2": GPT2Config(
        **LANGUAGE_SIZES,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
}


def small_net(
    kind: str = "plain", *, dtype: torch.dtype = torch.float32, dropout: float = 0.0
) -> nn.Module:
    torch.manual_seed(3)
    if kind in LANGUAGE_CONFIGS:
        return AutoModelForCausalLM.from_config(LANGUAGE_CONFIGS[kind]).to(dtype).train()
    return Net(kind, dropout).to(dtype).train()


def net_batches(
    steps: int,
    *,
    kind: str = "plain",
    dtype: torch.dtype = torch.float32,
    skip: dict[int, int] | None = None,
    still: dict[int, int] | None = None,
) -> list[dict[str, torch.Tensor]]:
    """Return batches; `skip` and `still` map a step to a block left out or without gradient."""
    if kind in LANGUAGE_CONFIGS:
        return batches(steps, batch=4, seq=12, vocab=64)
    generator = torch.Generator().manual_seed(5)
    created = []
    for step in range(steps):
        batch = {
            name: torch.randn(4, 3, NET_WIDTH, generator=generator).to(dtype)
            for name in ("x", "target")
        }
        for name, steps in (("skip", skip), ("still", still)):
            if steps and step in steps:
                batch[name] = torch.tensor(steps[step])
        created.append(batch)
    return created


# -- plans ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PlanTuning:
    """Changes of a plan, for models so small that every budget would hold them."""

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
        chunks = [(g.key, c) for g in blocks.groups for c in range(-(-g.numel // CHUNK_PARAMS))]

        def some(items: list[Any], share: float) -> tuple[Any, ...]:
            """Return a share of the items, spread over all of them."""
            return tuple(x for i, x in enumerate(items) if int((i + 1) * share) > int(i * share))

        weights, state = some(keys, self.cached), some(chunks, self.cached)
        balanced = plan.update_mode == "balanced" and plan.overlap and not needs_all_gradients(plan)
        return replace(
            plan,
            chunk_params=CHUNK_PARAMS,
            weight_slots=widest + self.slots,
            window=self.window,
            ring=self.ring,
            grad_groups=self.grads,
            host_cached_weights=weights,
            host_cached_state=state,
            spilled_gradients=some(keys, self.spilled) if needs_all_gradients(plan) else (),
            deferred=some(keys, self.deferred) if balanced else (),
            device_slots=widest + self.device_slots if plan.device_slots else 0,
            device_grads=self.device_grads,
            most_clipped=self.most_clipped,
        )


def tune_plans(monkeypatch: pytest.MonkeyPatch, tuning: PlanTuning) -> None:
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
    """Return a delay that is mostly zero and sometimes lets every other lane overtake."""
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
        streams = {lane: random_delay(seed + i) for i, lane in enumerate(DEVICE_STREAMS)}
        session.context.device.delay = lambda lane: streams[lane]()
    for site in session.executor.blocks.sites:  # the compute lane is the model's own code
        inner = session.model.get_submodule(site.name)
        leaf = next(iter(inner.children()), inner)
        leaf.register_forward_pre_hook(random_delay(seed + len(site.name)))


# -- runs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunResult:
    """Everything that must not depend on how a run was scheduled."""

    losses: list[float]
    norms: list[float | None]
    stored: dict[str, bytes]
    progress: object

    def check(self, other: RunResult) -> None:
        assert list(map(repr, self.losses)) == list(map(repr, other.losses))  # nan equals nan
        assert list(map(repr, self.norms)) == list(map(repr, other.norms))
        assert self.progress == other.progress
        assert self.stored.keys() == other.stored.keys()
        assert [k for k in self.stored if self.stored[k] != other.stored[k]] == []

    def check_there(self, other: RunResult) -> None:
        """Check a run on an accelerator against one on the CPU.

        The device sums squares in another order, in double precision. This affects only
        what needs the norm.
        """
        if self.norms[0] is not None:
            assert self.norms == pytest.approx(other.norms, rel=SUM_ORDER_TOLERANCE, nan_ok=True)
        self.check(replace(other, norms=self.norms))


def memory_engine(files: dict[str, bytearray] | None = None) -> IOEngine:
    return MemoryEngine(files=files)


def train_with_delays(
    model: nn.Module,
    data: list[dict[str, torch.Tensor]],
    place: Path,
    *,
    seed: int | None = None,
    between: Callable[[nn.Module, int], None] = lambda model, step: None,
    scale: Callable[[int], float] = lambda step: 1.0,
    **options: Any,
) -> RunResult:
    """Train, with delays of every lane if there is a `seed`; call `between` before each step."""
    options.setdefault("engine", memory_engine())
    losses, norms = [], []
    with attached(model, place, **options) as session:
        session.executor.lanes.stall_s = 15.0  # a lock-up fails within the test's patience
        if seed is not None:
            delay_lanes(session, seed)
        torch.manual_seed(11)
        for step, batch in enumerate(data):
            between(model, step)
            loss = model(**batch)
            loss = loss if isinstance(loss, torch.Tensor) else loss.loss
            (loss * scale(step)).backward()
            losses.append(loss.item())
            norms.append(session.grad_norm)
        return RunResult(losses, norms, stored_bytes(session), session.executor.record.train_state)


# -- overlap, update modes and delays --------------------------------------------------------------

OVERLAP_STEPS = 4
OVERLAP_CLIP = 0.3  # below the norm of the first steps here, above that of later ones
NET_KINDS = ["plain", "tied", "several"]
SERIAL_TUNING = PlanTuning(window=0, slots=0, ring=1, spilled=0.0)


@dataclass(frozen=True, kw_only=True)
class OverlapCase:
    """What a training computes; a `PlanTuning` and an update mode say when."""

    kind: str = "plain"
    clip: float = 0.0
    dtype: torch.dtype = torch.float32
    micro_batch: int | None = None
    dropout: float = 0.0
    skip: tuple[tuple[int, int], ...] = ()  # (step, block left out)
    still: tuple[tuple[int, int], ...] = ()  # (step, block that gets no gradient)
    overflow: int = -1  # step whose loss leaves the range of fp16
    evaluated: bool = False

    def run(self, place: Path, tuning: PlanTuning, **options: object) -> RunResult:
        with pytest.MonkeyPatch.context() as patch:
            tune_plans(patch, tuning)
            model = small_net(self.kind, dtype=self.dtype, dropout=self.dropout)
            batches = net_batches(
                OVERLAP_STEPS,
                kind=self.kind,
                dtype=self.dtype,
                skip=dict(self.skip),
                still=dict(self.still),
            )
            return train_with_delays(
                model,
                batches,
                place,
                clip=self.clip,
                micro_batch=self.micro_batch,
                scale=lambda step: 1e9 if step == self.overflow else 1.0,
                between=evaluations_between(batches) if self.evaluated else lambda *_: None,
                **options,
            )


@functools.cache
def serial_result(case: OverlapCase) -> RunResult:
    """Run the specification: no overlap, everything on SSD, one buffer of each kind."""
    with TemporaryDirectory() as place:
        return case.run(Path(place), SERIAL_TUNING, overlap=False, update_mode="serial")


def check_norm_of_device(
    device: AcceleratorDevice,
    doubles: bool,
    tuning: PlanTuning,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that the host reads no gradient to compute the norm.

    If the device has no double precision, the host computes it, with the bits of the CPU.
    """
    case = OverlapCase(kind="tied", clip=OVERLAP_CLIP)
    wanted = serial_result(case)
    assert device._has_fp64
    device._has_fp64 = doubles
    read = list[int]()
    if doubles:
        monkeypatch.setattr("lohan.engine.gradients._core.sum_squares", read.append)
    result = case.run(place, tuning, update_mode="balanced", device=device)
    assert not read
    result.check_there(wanted) if doubles else result.check(wanted)


def check_overlap(
    case: OverlapCase, place: Path, tuning: PlanTuning, *, mode: str, **options: object
) -> None:
    wanted = serial_result(replace(case, evaluated=False))
    result = case.run(place, tuning, update_mode=mode, **options)
    if result.norms[0] is None:  # only what holds gradients takes their norm
        assert not case.clip and mode != "serial" and case.dtype != torch.float16
        wanted = replace(wanted, norms=result.norms)
    result.check(wanted)


def evaluations_between(batches: list[dict[str, torch.Tensor]]) -> Callable[[nn.Module, int], None]:
    """Return what evaluates nothing, the model, the model twice, or two blocks before a step."""

    def between(model: nn.Module, step: int) -> None:
        with torch.no_grad():
            for _ in range((0, 1, 2, 0)[step]):
                model(**batches[step])
            if step == 3 and hasattr(model, "blocks"):
                model.blocks[1](model.entry(batches[0]["x"]))

    return between


# -- gradient norms that cross the clipping limit --------------------------------------------------

LARGE_SCALE, OVERFLOW_SCALE = 50.0, 1e9  # times the loss of other steps
CROSSING_SCALES = (
    1.0,
    1.0,
    LARGE_SCALE,
    1.0,
    1.0,
    LARGE_SCALE,
    1.0,
    1.0,
    1.0,
    LARGE_SCALE,
    LARGE_SCALE,
    1.0,
)
OVERFLOWING_SCALES = tuple(
    OVERFLOW_SCALE if scale == LARGE_SCALE else scale for scale in CROSSING_SCALES
)


class SpeculationCase:
    """What a training computes, and the limit that its gradient norms cross back and forth."""

    def __init__(
        self,
        kind: str = "plain",
        *,
        dtype: torch.dtype = torch.float32,
        dropout: float = 0.0,
        micro_batch: int | None = None,
        scales: tuple[float, ...] = CROSSING_SCALES,
    ) -> None:
        self.kind, self.dtype, self.dropout = kind, dtype, dropout
        self.micro_batch, self.scales = micro_batch, scales

    def model(self):
        return small_net(self.kind, dtype=self.dtype, dropout=self.dropout)

    def data(self):
        return net_batches(len(self.scales), kind=self.kind, dtype=self.dtype)

    @functools.cached_property
    def waiting(self) -> tuple[float, RunResult]:
        """The clipping limit, and the result of a run without overlap."""
        if OVERFLOW_SCALE in self.scales:
            return 0.0, self._waits(0.0)
        norms = list(zip(self._waits(1e9).norms, self.scales, strict=True))
        small = max(norm for norm, scale in norms if scale == 1)
        assert 2 * small < min(norm for norm, scale in norms if scale != 1)
        return 1.5 * small, self._waits(1.5 * small)

    def _waits(self, clip: float) -> RunResult:
        with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as place:
            tune_plans(patch, PlanTuning())
            return train_with_delays(
                self.model(),
                self.data(),
                Path(place),
                clip=clip,
                overlap=False,
                micro_batch=self.micro_batch,
                scale=self.scales.__getitem__,
            )


PLAIN_CASE, TIED_CASE, SEVERAL_CASE, LLAMA_CASE = map(
    SpeculationCase, ("plain", "tied", "several", "llama")
)
DROPOUT_CASE = SpeculationCase(dtype=torch.bfloat16, dropout=0.3, micro_batch=2)
HALF_CASE = SpeculationCase("gpt2", dtype=torch.float16, scales=OVERFLOWING_SCALES)


# -- sessions of a model with tied weights ---------------------------------------------------------

TIED_STEPS = 5


def open_tied_session(place: Path, **options: Any) -> lohan.Session:
    place.mkdir(exist_ok=True)
    budget = lohan.Budget(host="256MiB", ssd=[place])
    return attached(small_net("tied"), place, budget=budget, **options)


def train_until(session: lohan.Session, until: int = TIED_STEPS) -> None:
    batches = net_batches(until)
    while session.step < until:
        session.model(**batches[session.step]).backward()


def committed_bytes(session: lohan.Session) -> dict[str, bytes]:
    """Commit and return the stored bytes."""
    session.commit()
    return stored_bytes(session)


def finished_bytes(place: Path, steps: int = TIED_STEPS) -> dict[str, bytes]:
    """Return the contents after `steps` steps without overlap."""
    with pytest.MonkeyPatch.context() as patch:
        tune_plans(patch, PlanTuning())
        with open_tied_session(place, overlap=False) as session:
            train_until(session, until=steps)
            return committed_bytes(session)


# -- accelerators without one kind of wait ---------------------------------------------------------


class NeverWaits(AcceleratorDevice):
    """An accelerator whose compute does not wait for copies."""

    def wait(self, event: Any) -> None:
        return


class CopiesAtOnce(AcceleratorDevice):
    """An accelerator whose copies do not wait for compute."""

    def copy(self, lane: str, pairs: Any, *, after: Any = None) -> Any:
        return super().copy(lane, pairs)


class CopiesCountAsDone(AcceleratorDevice):
    """An accelerator whose lanes do not wait for their own copies."""

    def copy(self, lane: str, pairs: Any, *, after: Any = None) -> Any:
        super().copy(lane, pairs, after=after)
        return _PassedEvent()

    def wait(self, event: Any) -> None:
        if not isinstance(event, _PassedEvent):
            super().wait(event)


class ComputeCountsAsDone(AcceleratorDevice):
    """An accelerator that reports compute as done as soon as it is queued."""

    def mark(self) -> Any:
        return _PassedEvent()

    def copy(self, lane: str, pairs: Any, *, after: Any = None) -> Any:
        return super().copy(lane, pairs, after=None if isinstance(after, _PassedEvent) else after)


class _PassedEvent(Passed):
    """An event that has passed when it is created."""


MISSING_WAITS = [  # how late copies and operators must be, in microseconds, for it to show
    (NeverWaits, 10_000, 0),
    (CopiesAtOnce, 0, 500),
    (CopiesCountAsDone, 5000, 0),
    (ComputeCountsAsDone, 0, 500),
]


def train_with_kept_slices(device: AcceleratorDevice | str) -> RunResult:
    """Train a model whose blocks have four slices, two of them on the device at a time."""
    train_batches = batches(2, batch=4, seq=24)
    with TemporaryDirectory() as place:
        return train_with_delays(
            small_model("llama"),
            train_batches,
            Path(place),
            batch=train_batches[0],
            micro_batch=1,
            activations="all",
            device=device,
        )


@functools.cache
def result_with_all_waits() -> RunResult:
    return train_with_kept_slices(AcceleratorDevice())


LATENESS_FACTORS = (1, 5, 25)  # times as late: on a busy machine the host itself is late


def missing_wait_shows(careless: type[AcceleratorDevice], late: Callable[[int], None]) -> bool:
    """Return whether a run without these waits has another result or a device error.

    `late` delays the streams; it is called with several factors.
    """
    wanted = result_with_all_waits()
    for times in LATENESS_FACTORS:
        late(times)
        try:
            actual = train_with_kept_slices(careless())
        except RuntimeError:  # its clock is asked for what has not come
            return True
        same = list(map(repr, actual.losses)) == list(map(repr, wanted.losses))
        if not same or actual.stored != wanted.stored:
            return True
    return False


# -- blocks that keep activations ------------------------------------------------------------------

KEPT_SEQ = 48
KEPT_STEPS = 3


@pytest.fixture(scope="module", name="folder")
def folder_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a Llama of five thin blocks."""
    path = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
        use_cache=False,
        tie_word_embeddings=False,
    )
    save_model(path, config, seed=7)
    return path


def kept_batch(model: torch.nn.Module, seq: int = KEPT_SEQ) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, model.config.vocab_size, (4, seq), generator=generator)


def train_with_kept_activations(
    folder: Path,
    ssd: Path,
    *,
    host: str = "64MiB",
    delays: int | None = None,
    between=None,
    seq: int = KEPT_SEQ,
    **options,
):
    """Return losses and checksums after some steps, the last plan, and the bytes moved."""
    model = lohan.load(folder).train()
    ids = kept_batch(model, seq)
    ssd.mkdir()
    with (
        lohan.attach(
            model,
            optimizer=lohan.AdamW(lr=1e-2),
            batch={"input_ids": ids},
            budget=lohan.Budget(host=host, ssd=[ssd]),
            **options,
        ) as session,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        losses = []
        for step in range(KEPT_STEPS):
            if delays is not None:
                delay_at_random(session, delays)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.item())
            if between is not None and step == 1:
                between(session)
        session.flush()
        acts = session.executor.runner.activation_spill
        moved = acts.moved_bytes if acts is not None else 0
        store = session.store
        sums = [
            store.checksum(region.key, chunk)
            for region in store.layout.regions
            if not region.scratch
            for chunk in range(len(region.chunks))
        ]
        plan = session.plan
    return (losses, sums), plan, moved


def delay_at_random(session: lohan.Session, seed: int) -> None:
    """Delay a tenth of the actions by up to two milliseconds."""
    chance = random.Random(seed)

    def delay(action: Action) -> None:
        if chance.random() < 0.1:
            time.sleep(chance.random() * 0.002)

    delay_actions(session, delay)


# Whatever can be kept is worth it on this machine.
SLOW_PROFILE = Profile(
    name="slow",
    device="cpu",
    compute=((1.0, 1e6),),
    host_bytes=2**30,
    adam=1e12,
    drives=(Drive(name="fast", read=1e11, write=1e11, mixed=1e11),),
)


def budget_that_spills(
    folder: Path,
    micro_batch: int | None,
    clip: float,
    overlap: bool = True,
    policy: str = "all",
    seq: int = KEPT_SEQ,
) -> str:
    """Return a budget that holds a part of what a policy keeps."""
    model = lohan.load(folder).train()
    blocks = cut(model)
    workload = workload_of(model, blocks, {"input_ids": kept_batch(model, seq).to("meta")})
    options = PlanOptions(
        dtype="fp32", micro_batch=micro_batch, clip=clip, activations=policy, overlap=overlap
    )
    size = 2**26
    while size > 2**16:
        plan = closed_form_plan(
            PlanProblem(blocks, options, host_bytes=size, workload=workload, profile=SLOW_PROFILE)
        )
        if plan.spilled_sites and (plan.kept or policy in HOST_ONLY):
            return f"{size}b"
        size = size * 24 // 25
    raise AssertionError("no budget made activations move")
