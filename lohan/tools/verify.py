"""`lohan verify`: the first steps of a run, of the model or of a copy that fits, in every mode."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lohan.capture.blocks import cut
from lohan.config import Config
from lohan.engine.attach import load, load_of
from lohan.errors import BudgetError, ConfigError
from lohan.schedule.phases import GRAD_MODES
from lohan.settings import SampleConfig
from lohan.tools.copies import ModelCopy, copy_model, layer_count
from lohan.tools.judging import TOLERANCES, Noise, Tolerance, Verdict, judge_losses, judge_weights
from lohan.tools.reference import Recipe, Trajectory, noise_run, reference_run
from lohan.tools.through import Made, lohan_run
from lohan.train.inputs import Inputs, mode_of, open_inputs
from lohan.train.ranks import Crew, crew
from lohan.train.run_folder import RunFolder
from lohan.util.display import Display
from lohan.util.system import host_memory_bytes
from lohan.util.units import align_up, format_bytes

MOST_LAYERS = 8  # of a copy; more take time and show nothing new
BYTES = {"fp32": 8, "bf16": 12, "fp16": 12}  # per parameter: weights, gradients, masters
MOMENT_BYTES = 4  # and for each moment
NOISE_BYTES = {"fp32": 32, "bf16": 16, "fp16": 16}
LOGIT_BYTES = 16  # per logit: the logits, their fp32 copy, softmax and gradient
ALL_ACTIVATIONS = ("recompute", "all", "holistic")


@dataclass(frozen=True)
class Mode:
    """One way to run that must not change the result."""

    grad_offload: str
    activations: str
    overlap: bool

    def __str__(self) -> str:
        parts = [self.grad_offload, f"activations {Path(self.activations).name}"]
        return ", ".join(parts if self.overlap else [*parts, "no overlap"])

    def of(self, config: Config) -> Config:
        train = replace(
            config.train, grad_offload=self.grad_offload, activations=self.activations,
            overlap=self.overlap,
        )  # fmt: skip
        return replace(config, train=train)


def modes(config: Config, *, every: bool) -> list[Mode]:
    """The one that is configured; with `every` all others too, each setting in turn."""
    train = config.train
    own = Mode(train.grad_offload, train.activations, train.overlap)
    if not every:
        return [own]
    found = [own, *(replace(own, grad_offload=m, overlap=True) for m in GRAD_MODES)]
    found += [replace(own, activations=a, overlap=True) for a in ALL_ACTIVATIONS]
    return list(dict.fromkeys([*found, replace(own, overlap=False)]))


@dataclass(frozen=True)
class Compared:
    """One mode against the in-memory run."""

    mode: Mode
    free: Made  # steps overlapped, as in any run
    stepwise: Made  # every step brought to its end first
    losses: list[Verdict]
    weights: list[list[Verdict]]  # per step, every tensor
    other_bits: str  # what the run should have the same bits as and has not; "" if none

    @property
    def failures(self) -> list[Verdict]:
        every = [*self.losses, *(v for step in self.weights for v in step)]
        return [verdict for verdict in every if not verdict.passed]

    @property
    def passed(self) -> bool:
        return not self.failures and not self.other_bits


@dataclass(frozen=True)
class Verification:
    config: Config
    copy: ModelCopy
    parameters: int
    total: int
    reference_losses: list[float]
    noise: Noise | None
    tolerance: Tolerance
    compared: list[Compared]
    notes: list[str]

    @property
    def passed(self) -> bool:
        return all(each.passed for each in self.compared)


def verify(
    config: Config, display: Display, *, steps: int = 5, layers: int | None = None,
    every_mode: bool = False,
) -> Verification | None:  # fmt: skip
    """Leaves nothing behind. Of several ranks the first has the answer, the others None."""
    _check_exact(config)
    with ExitStack() as stack, crew() as ranks:
        ranks.check(config)
        places = RunFolder(Path.cwd()).places(config)
        made = ranks.once(lambda: [str(_scratch(place, stack)) for place in places])
        drives = [Path(place) for place in made]
        work, notes = drives[0], list[str]()
        facts = ranks.once(lambda: _copied(config, work / "model", layers, notes))
        copy = ModelCopy(work / "model", *facts)
        own = _alone(config, copy.folder, drives)
        inputs = ranks.in_turn(
            lambda here: open_inputs(RunFolder(own.out), own, display, resume=not here)
        )
        recipe = Recipe(
            model=own.model, train=own.train, dtype=mode_of(own), seed=own.seed, steps=steps,
            total=inputs.total, batch=lambda step: inputs.train.batch(step, own.train.batch),
        )  # fmt: skip
        trial = _Trial(recipe, own, inputs, display, _from_host(config, copy), ranks)
        beside = None
        if ranks.first:
            beside = reference_run(recipe, work / "reference", trial.advance("in memory"))
        runs = [(mode, *trial.runs(mode, beside)) for mode in modes(config, every=every_mode)]
        if beside is None:
            return None
        noise = trial.noise(beside, runs, notes)
        tolerance = TOLERANCES[recipe.dtype]
        compared = list(_judged(runs, beside, tolerance, noise))
        parameters = _parameters(recipe)
        return Verification(
            config, copy, parameters, recipe.total, beside.losses, noise, tolerance, compared, notes
        )


def _copied(config: Config, into: Path, layers: int | None, notes: list[str]) -> list[Any]:
    """Makes a copy that fits; what is to be known of it, as plain JSON."""
    count = layers or _layers(config, notes)
    copy = copy_model(config.model, into, layers=count)
    if copy.dropout:
        notes.append(f"dropout is off in both runs ({', '.join(sorted(set(copy.dropout)))})")
    return [copy.layers, copy.all_layers, list(copy.dropout)]


def _check_exact(config: Config) -> None:
    if config.train.moments != "fp32":
        raise ConfigError(
            f"--moments {config.train.moments} rounds what PyTorch keeps in fp32: there is nothing "
            "to compare such a run with; verify it with --set train.moments=fp32"
        )


def _alone(config: Config, model: Path, drives: Sequence[Path]) -> Config:
    """The settings of the steps themselves, without what a run does besides."""
    return replace(
        config, model=model, out=drives[0] / "run", sample=SampleConfig(),
        eval=replace(config.eval, data=None, every=None, early_stop=0),
        budget=replace(config.budget, ssd=tuple(drives), snapshot_every=0),
        output=replace(config.output, export=False, trace=False, export_best=False, log=()),
    )  # fmt: skip


Runs = tuple[Mode, Made, Made]


@dataclass(frozen=True)
class _Trial:
    recipe: Recipe
    config: Config
    inputs: Inputs
    display: Display
    from_host: int | None
    ranks: Crew

    def advance(self, what: str) -> Callable[[int, int], None]:
        return lambda done, total: self.display.advance(what, done, total)

    def runs(self, mode: Mode, beside: Trajectory | None) -> tuple[Made, Made]:
        """Both runs of a mode, in stores of their own that go with the work folder."""
        made = []
        for number, stepwise in enumerate((False, True)):
            out = self.config.out.with_name(f"run-{mode}-{number}".replace(" ", "-"))
            made.append(lohan_run(
                self.recipe, mode.of(replace(self.config, out=out)), self.inputs, beside,
                self.display, stepwise=stepwise, from_host=self.from_host, ranks=self.ranks,
            ))  # fmt: skip
            self.advance(str(mode))(number + 1, 2)
        return made[0], made[1]

    def noise(self, beside: Trajectory, runs: Sequence[Runs], notes: list[str]) -> Noise | None:
        """Measured only where something is beyond the plain limits."""
        dtype = self.recipe.dtype
        plain = list(_judged(runs, beside, TOLERANCES[dtype], None))
        if not any(each.failures for each in plain):
            return None
        needed = _needed(self.config, NOISE_BYTES[dtype])(layer_count(self.config.model))
        free = host_memory_bytes()
        if needed > free:
            notes.append(
                f"rounding noise could not be measured: a run in a finer type needs "
                f"{format_bytes(needed)}, {format_bytes(free)} are free; --layers takes fewer"
            )
            return None
        return Noise(*noise_run(self.recipe, beside, self.advance("rounding noise")))


def _judged(
    runs: Sequence[Runs], beside: Trajectory, tolerance: Tolerance, noise: Noise | None
) -> Iterator[Compared]:
    first: dict[tuple[object, ...], Runs] = {}
    for mode, free, stepwise in runs:
        plan = free.plan
        same = (plan.micro_batch, plan.head_tokens, plan.chunk_params)
        other = ""
        if plan.device_slots == 0:  # bit by bit where compute is the CPU's
            before = first.setdefault(same, (mode, free, stepwise))
            if free.digest != stepwise.digest:
                other = "the same run with every step brought to its end"
            elif free.digest != before[1].digest:
                other = str(before[0])
        losses = judge_losses(free.losses, beside.losses, tolerance, noise)
        losses += judge_losses(stepwise.losses, beside.losses, tolerance, noise)
        weights = judge_weights(stepwise.differences, tolerance, noise)
        yield Compared(mode, free, stepwise, losses, weights, other)


# -- what fits ------------------------------------------------------------------------------------


def _scratch(place: Path, stack: ExitStack) -> Path:
    try:
        place.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix="lohan-verify-", dir=place)
    except OSError as error:
        raise ConfigError(
            f"{place}: cannot be written to: {error.strerror}; give a folder with --ssd"
        ) from None
    return Path(stack.enter_context(made))


def _layers(config: Config, notes: list[str]) -> int | None:
    """None: the whole model fits. Else how many layers do."""
    whole = layer_count(config.model)
    moments = MOMENT_BYTES * len(config.train.kind.remembers)
    needed = _needed(config, BYTES[mode_of(config)] + moments)
    free = host_memory_bytes() * 4 // 5
    if needed(whole) <= free:
        return None
    for count in range(min(MOST_LAYERS, whole - 1), 0, -1):
        if needed(count) <= free:
            notes.append(
                f"an in-memory run of all {whole} layers needs {format_bytes(needed(whole))}, "
                f"{format_bytes(free)} can be had: this is a copy with the first {count} layers, "
                "same shapes"
            )
            return count
    raise BudgetError(
        f"an in-memory run of one layer needs {format_bytes(needed(1))}, {format_bytes(free)} can "
        "be had; lower --batch or --seq"
    )


def _needed(config: Config, bytes_per_parameter: int) -> Callable[[int], int]:
    """Bytes of an in-memory run with so many layers."""
    train = config.train
    dtype = mode_of(config)
    model = load(config.model, dtype=dtype, lora=train.adapter)
    blocks = cut(model)
    shape = torch.empty((train.batch, train.seq), dtype=torch.long, device="meta")
    asked = load_of(model, blocks, {"input_ids": shape})
    width = 8 if bytes_per_parameter == NOISE_BYTES["fp32"] else 4 if dtype == "fp32" else 2
    bytes_of = {
        group.key: group.numel * (width if group.frozen else bytes_per_parameter)
        for group in blocks.groups
    }
    inside = {key for site in blocks.sites if site.name in asked.shapes for key in site.groups}
    repeated = sum(bytes_of[key] for key in inside)
    repeated += int(sum(s.elements for s in asked.shapes.values()) * asked.tokens * width)
    besides = sum(size for key, size in bytes_of.items() if key not in inside)
    besides += asked.tokens * asked.vocabulary * LOGIT_BYTES
    whole = max(1, layer_count(config.model))
    return lambda layers: besides + repeated * layers // whole


def _from_host(config: Config, copy: ModelCopy) -> int | None:
    """A copy gets its share of the budget, so that it streams as the whole model would."""
    if not copy.shrunk or config.budget.host is None:
        return None
    return align_up(config.budget.host * copy.layers // copy.all_layers, 4096)


def _parameters(recipe: Recipe) -> int:
    return cut(load(recipe.model, dtype=recipe.dtype, lora=recipe.train.adapter)).parameters
