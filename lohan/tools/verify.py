"""The comparison of `lohan verify`: the same steps in plain PyTorch and through LoHan."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from lohan.capture.blocks import cut
from lohan.checkpoint.hf_folder import causal_config
from lohan.checkpoint.quantized import open_folder
from lohan.checkpoint.safetensors import ReadFlat
from lohan.checkpoint.store_io import gathering_reader
from lohan.config import UPDATE_MODES, Config, SampleConfig
from lohan.device.ranks import ALONE, ProcessGroup, in_turn, run_ranks
from lohan.engine.attach import load
from lohan.engine.context import workload_of
from lohan.engine.replanning import Replanner
from lohan.engine.session import Session
from lohan.errors import BudgetError, ConfigError, ModelError
from lohan.model.layout import FlatGroup
from lohan.model.plan import Plan
from lohan.tools.reference import Recipe, Trajectory, noise_run, reference_run
from lohan.train.inputs import (
    TASKS,
    Inputs,
    check_settings,
    open_inputs,
    open_session,
    task_of_model,
    training_dtype,
)
from lohan.train.logs import Meter
from lohan.train.run_folder import RunFolder
from lohan.train.task import Task
from lohan.train.trainer import one_step
from lohan.util.display import Display
from lohan.util.files import read_object
from lohan.util.memory import host_memory_bytes
from lohan.util.units import PAGE, align_up, counted, format_bytes

# -- Tolerances: when two runs count as equal ------------------------------------------------------
#
# Both runs do the same arithmetic in a different order, so they may differ only by rounding. The
# limits are those of LoHan's own tests.
#
# Loss: it may differ by 1e-5 of its value in fp32, and by four unit roundoffs in 16-bit types.
#
# Weights: AdamW divides a gradient by its own magnitude, so distances are relative to the update of
# a tensor since the start. The distance between the two runs may be 1/1000 of the update in fp32
# and four unit roundoffs of it in 16-bit types, plus the rounding of the weights themselves.
#
# Noise: some gradients are mostly rounding noise (the key bias of attention), and plain PyTorch is
# no more accurate there. Its distance from the same run in a finer type is measured, and 1.5 times
# that distance is allowed in addition.
#
# Sign flips: in the first steps, AdamW uses little more than the sign of a gradient, so noise
# appears as single weights that move in the opposite direction. If the measured noise of the median
# tensor indicates such flips, a tensor may contain a few of them by chance.


NOISE = 1.5
ROUNDING = 2.0**-23  # relative rounding error of a weight, by one update in each of the two runs
CHANCE = 0.01  # Sign flips are tolerated if at least this many are expected in the model.
# The flips in a tensor may exceed their expected number by this many, plus this many standard
# deviations.
BY_CHANCE = 3.0


@dataclass(frozen=True)
class Tolerance:
    loss: float  # relative to the loss
    update: float  # relative to the tensor's update


TOLERANCES = {
    "fp32": Tolerance(loss=1e-5, update=1e-3),
    "bf16": Tolerance(loss=4 * 2.0**-9, update=4 * 2.0**-9),
    "fp16": Tolerance(loss=4 * 2.0**-12, update=4 * 2.0**-12),
}


@dataclass(frozen=True)
class Difference:
    """The difference of one tensor between the runs after one step.

    Norms are 2-norms, and `largest` is the largest absolute difference of a single weight.
    """

    name: str
    distance: float  # norm of the difference between the runs
    largest: float
    update: float  # norm of the in-memory run's update since the start
    size: float  # norm of its weights in the in-memory run
    count: int  # number of its weights


@dataclass(frozen=True)
class Noise:
    """The distance of the in-memory run from the same run in a finer type, per step.

    `losses` has one value per step, `weights` one value per step and tensor.
    """

    losses: Sequence[float]
    weights: Sequence[dict[str, float]]


@dataclass(frozen=True)
class Verdict:
    """One compared number; `limit` has the unit of `difference`."""

    what: str
    step: int
    difference: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.limit  # False if the difference is NaN

    @property
    def share(self) -> float:
        """The difference as a share of the limit."""
        if self.limit > 0:
            return self.difference / self.limit
        return 0.0 if self.difference == 0 else float("inf")


def judge_losses(
    losses: Sequence[float], expected: Sequence[float], tolerance: Tolerance, noise: Noise | None
) -> list[Verdict]:
    return [
        Verdict(
            "loss",
            number + 1,
            abs(one - two),
            tolerance.loss * abs(two) + (NOISE * noise.losses[number] if noise else 0.0),
        )
        for number, (one, two) in enumerate(zip(losses, expected, strict=True))
    ]


def judge_weights(
    steps: Sequence[Sequence[Difference]], tolerance: Tolerance, noise: Noise | None
) -> list[list[Verdict]]:
    """Return, for each step, the verdict of every tensor: its difference and the allowed limit."""
    judged = []
    for number, step in enumerate(steps):
        noisy = _allowances(step, noise.weights[number]) if noise else [0.0] * len(step)
        judged.append(
            [
                Verdict(
                    each.name,
                    number + 1,
                    each.distance,
                    tolerance.update * each.update + ROUNDING * (number + 1) * each.size + more,
                )
                for each, more in zip(step, noisy, strict=True)
            ]
        )
    return judged


def _allowances(step: Sequence[Difference], noise: dict[str, float]) -> list[float]:
    """Return, for every tensor, the distance that noise may cause.

    If noise reverses the update of a weight, the weight is off by twice its update. The share of
    such weights is the median of the estimates for the tensors.
    """
    shares = [(noise[each.name] / each.update) ** 2 / 4 for each in step if each.update]
    share = min(1.0, median(shares)) if shares else 0.0
    enough = share * sum(each.count for each in step) >= CHANCE
    allowances = []
    for each in step:
        mean = share * each.count
        flipped = min(mean + BY_CHANCE * math.sqrt(mean) + BY_CHANCE, each.count) if enough else 0.0
        chance = 2 * each.update * math.sqrt(flipped / each.count) if each.count else 0.0
        tensor_noise = noise.get(each.name, 0.0)  # a frozen tensor has no noise
        allowances.append(max(NOISE * tensor_noise, chance))
    return allowances


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict with the largest share of its limit; NaN counts as worst."""
    return max(verdicts, key=lambda v: (v.difference != v.difference, v.share))


# -- The model that both runs start from: the user's folder with a modified config.json ------------
#
# Weights are not copied: the other files are symbolic links, and the tensors of omitted layers are
# not read. Dropout is off, because random numbers are drawn in a different order if a batch passes
# through a block in micro-batches.


LAYERS = ("num_hidden_layers", "n_layer", "num_layers")


@dataclass(frozen=True)
class ModelCopy:
    folder: Path
    layers: int
    all_layers: int
    dropout: tuple[str, ...]  # names of the dropout settings that were not zero

    @property
    def shrunk(self) -> bool:
        return self.layers < self.all_layers


def layer_count(model: Path) -> int:
    """Return the number of layers of a model folder, or 0 if its config does not name it."""
    text = causal_config(model).get_text_config()
    return int(getattr(text, "num_hidden_layers", 0) or 0)


def copy_model(model: Path, folder: Path, *, layers: int | None = None) -> ModelCopy:
    """Create a folder with links to the files of `model` and a modified config.

    The copy has the first `layers` layers, or all of them by default.
    """
    whole = layer_count(model)
    open_folder(model)  # Raises an error that names missing files.
    folder.mkdir()
    for file in model.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file.absolute())
    raw = read_object(model / "config.json", kind=ModelError, remedy="get the model's files again")
    dropout: list[str] = []
    reduced = _without_dropout(raw, dropout)
    if layers is not None and layers != whole:
        if not 1 <= layers < whole:
            raise ModelError(
                f"{model}: has {counted(whole, 'layer')}, {layers} were requested; give fewer"
            )
        reduced = _cut(reduced, whole, layers)
    (folder / "config.json").write_text(json.dumps(reduced, indent=1), encoding="utf-8")
    copy = ModelCopy(folder, layer_count(folder), whole, tuple(dropout))
    if copy.layers != (layers or whole):
        raise ModelError(
            f"{model}: cannot be cut to {layers} of {whole} layers (config.json has none of "
            f"{', '.join(LAYERS)}); verify it on a machine with more memory"
        )
    return copy


def _without_dropout(value: Any, names: list[str]) -> Any:
    """Return a copy of a model config with every dropout rate set to 0.

    The names of the rates that were not zero are appended to `names`.
    """
    if not isinstance(value, dict):
        return value
    changed: dict[str, Any] = {}
    for key, inner in value.items():
        rate = isinstance(inner, (int, float)) and not isinstance(inner, bool)
        if rate and ("drop" in key or key.endswith("pdrop")):
            if inner:
                names.append(key)
            changed[key] = 0.0
        else:
            changed[key] = _without_dropout(inner, names)
    return changed


def _cut(value: Any, whole: int, layers: int) -> Any:
    """Return a copy of a model config, cut to `layers` layers.

    Settings that hold the number of layers are replaced, and lists with one entry per layer are
    shortened.
    """
    if isinstance(value, dict):
        return {
            key: layers if key in LAYERS and inner == whole else _cut(inner, whole, layers)
            for key, inner in value.items()
        }
    if isinstance(value, list) and len(value) == whole:
        return value[:layers]
    return value


# -- The run under test: the trainer's session and step; weights are read back ---------------------


MORE_HOST = 1.25


@dataclass(frozen=True)
class RunResult:
    """The result of a run through LoHan; `differences` is per step, if steps were compared."""

    losses: tuple[float, ...]
    differences: tuple[tuple[Difference, ...], ...]
    digest: str  # SHA-256 of all weights at the end
    plan: Plan


def lohan_run(
    recipe: Recipe,
    config: Config,
    inputs: Inputs,
    reference: Trajectory | None,
    display: Display,
    *,
    stepwise: bool,
    from_host: int | None = None,
    group: ProcessGroup = ALONE,
) -> RunResult:
    """Run the recipe through LoHan.

    With `stepwise`, every step is committed before the next, and its weights are compared with the
    reference. Otherwise steps overlap as in any run, and only the final weights are read. With
    several ranks, only the first has a reference to compare with.
    """
    torch.manual_seed(recipe.seed)
    session = open_smallest(RunFolder(config.out), config, inputs, display, from_host, group)
    losses: list[float] = []
    differences: list[tuple[Difference, ...]] = []
    with session:
        meter, replanner = Meter(session, session.executor.trace), Replanner(session)
        for step in range(recipe.steps):
            row = one_step(session, config, inputs, meter)
            losses.append(row["loss"])
            if stepwise:
                session.commit()
                with reading(session) as weights:
                    deviations = (
                        compare(weights, reference, step + 1) if reference is not None else ()
                    )
                    differences.append(tuple(deviations))
            elif step + 1 < recipe.steps:
                replanner.after_step(meter.spans, step_s=row["step_s"])
        session.commit()
        with reading(session) as weights:
            whole = digest(weights)
        return RunResult(tuple(losses), tuple(differences), whole, session.plan)


def open_smallest(
    folder: RunFolder,
    config: Config,
    inputs: Inputs,
    display: Display,
    from_host: int | None,
    group: ProcessGroup,
) -> Session:
    """Open the session with the smallest sufficient host budget, starting from `from_host`.

    With a full budget, a copy with few layers would fit in memory, and nothing would stream.
    Several ranks always use the full budget.
    """
    most = config.budget.host
    host = most
    if from_host is not None and most is not None and not group.several:
        host = min(from_host, most)
    while True:
        changed = replace(config, budget=replace(config.budget, host=host))
        try:
            return open_session(folder, changed, inputs, display, resume=False, group=group)
        except BudgetError:
            if host is None or most is None or host >= most:
                raise
            host = min(most, int(host * MORE_HOST) + 1)


Weights = Iterable[tuple[str, torch.Tensor]]  # name and fp32 values of every parameter


@contextmanager
def reading(session: Session) -> Iterator[Weights]:
    """Yield the weights of the committed step, one tensor at a time.

    The other ranks send their shards to the first rank and receive an empty sequence.
    """
    groups = session.context.blocks.groups
    with gathering_reader(session.process_group, session.store) as read:
        yield () if read is None else _weights(groups, read)


def _weights(groups: Sequence[FlatGroup], read: ReadFlat) -> Weights:
    for group in groups:
        for tensor in group.tensors:
            yield tensor.name, read(tensor.name, 0, tensor.parameters).view(tensor.shape)


def digest(weights: Weights) -> str:
    whole = hashlib.sha256()
    for name, weight in weights:
        whole.update(name.encode())
        whole.update(memoryview(weight.contiguous().numpy()))  # type: ignore[arg-type]
    return whole.hexdigest()


def compare(weights: Weights, reference: Trajectory, step: int) -> Iterator[Difference]:
    """Yield the difference of every tensor from the in-memory run after the same step."""
    with reference.open(step) as after, reference.open(0) as start:
        trained = set(after.keys())
        missing = set(start.keys())
        for name, weight in weights:
            key = reference.alias.get(name, name)
            missing.discard(key)
            first = start.get_tensor(key)
            frozen = first.to(reference.dtype).float()
            wanted = after.get_tensor(key) if key in trained else frozen
            apart = weight - wanted
            yield Difference(
                name=key,
                distance=float(apart.norm()),
                largest=float(apart.abs().max()) if apart.numel() else 0.0,
                update=float((wanted - first).norm()) if key in trained else 0.0,
                size=float(wanted.norm()),
                count=wanted.numel(),
            )
    for key in sorted(missing):
        yield Difference(key, float("inf"), float("inf"), 0.0, 0.0, 0)


# -- `lohan verify` --------------------------------------------------------------------------------
#
# The first steps of a run are compared, in one mode or in every mode. The model is complete, or
# a copy with fewer layers that fits into memory.


MOST_LAYERS = 8  # maximum of a copy; more layers take longer without testing more
BYTES = {"fp32": 8, "bf16": 12, "fp16": 12}  # bytes per parameter: weights, gradients, masters
MOMENT_BYTES = 4  # additional bytes per parameter for each moment
NOISE_BYTES = {"fp32": 32, "bf16": 16, "fp16": 16}
LOGIT_BYTES = 16  # bytes per logit: the logits, their fp32 copy, softmax and gradient
ALL_ACTIVATIONS = ("recompute", "all", "holistic")


@dataclass(frozen=True)
class RunMode:
    """A combination of settings that must not change the result."""

    update_mode: str
    activations: str
    overlap: bool

    def __str__(self) -> str:
        parts = [self.update_mode, f"activations {Path(self.activations).name}"]
        return ", ".join(parts if self.overlap else [*parts, "no overlap"])

    def of(self, config: Config) -> Config:
        train = replace(
            config.train,
            update_mode=self.update_mode,
            activations=self.activations,
            overlap=self.overlap,
        )
        return replace(config, train=train)


def modes(config: Config, *, every: bool) -> list[RunMode]:
    """Return the configured mode.

    With `every`, also return the modes that differ from it in one setting.
    """
    train = config.train
    chosen = RunMode(train.update_mode, train.activations, train.overlap)
    if not every:
        return [chosen]
    candidates = [chosen, *(replace(chosen, update_mode=m, overlap=True) for m in UPDATE_MODES)]
    candidates += [replace(chosen, activations=a, overlap=True) for a in ALL_ACTIVATIONS]
    return list(dict.fromkeys([*candidates, replace(chosen, overlap=False)]))


@dataclass(frozen=True)
class Compared:
    """The result of one mode, compared with the in-memory run."""

    mode: RunMode
    free: RunResult  # with overlapping steps, as in any run
    stepwise: RunResult  # with every step committed before the next
    losses: list[Verdict]
    weights: list[list[Verdict]]  # per step, one verdict for every tensor
    # The run that should have given the same bits but did not; "" if there is none.
    other_bits: str

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
    config: Config,
    display: Display,
    *,
    steps: int = 5,
    layers: int | None = None,
    every_mode: bool = False,
) -> Verification | None:
    """Compare the first steps of a run with plain PyTorch, and return the result.

    All files are temporary and are removed. With several ranks, the first returns the result and
    the others return None.
    """
    _check_comparable(config)
    with ExitStack() as stack, run_ranks() as group:
        check_settings(group, config)
        folders = RunFolder(Path.cwd()).ssd_folders(config)
        scratch = group.broadcast_made(lambda: [str(_scratch(folder, stack)) for folder in folders])
        drives = [Path(folder) for folder in scratch]
        work, notes = drives[0], list[str]()
        facts = group.broadcast_made(lambda: _copied(config, work / "model", layers, notes))
        copy = ModelCopy(work / "model", *facts)
        trial_config = _steps_only(config, copy.folder, drives)
        inputs = in_turn(
            group,
            lambda here: open_inputs(
                RunFolder(trial_config.out), trial_config, display, resume=not here
            ),
        )
        from_host = None
        # Scale the budget, so that the copy streams as the whole model would.
        if copy.shrunk and config.budget.host is not None:
            share = config.budget.host * copy.layers // copy.all_layers
            from_host = align_up(share, PAGE)
        recipe = Recipe(
            model=trial_config.model,
            train=trial_config.train,
            dtype=training_dtype(trial_config),
            seed=trial_config.seed,
            steps=steps,
            total=inputs.total,
            batch=lambda step: inputs.train_examples.batch(step, trial_config.train.batch),
        )
        trial = _Trial(recipe, trial_config, inputs, display, from_host, group)
        reference = None
        if group.ranks.first:
            reference = reference_run(recipe, work / "reference", trial.advance("in memory"))
        runs = [(mode, *trial.runs(mode, reference)) for mode in modes(config, every=every_mode)]
        if reference is None:
            return None
        noise = trial.noise(reference, runs, notes)
        tolerance = TOLERANCES[recipe.dtype]
        compared = list(_judged(runs, reference, tolerance, noise))
        adapted = load(recipe.model, dtype=recipe.dtype, lora=recipe.train.adapter)
        parameters = cut(adapted).parameters
        return Verification(
            config,
            copy,
            parameters,
            recipe.total,
            reference.losses,
            noise,
            tolerance,
            compared,
            notes,
        )


def _check_comparable(config: Config) -> None:
    if config.train.moments != "fp32":
        raise ConfigError(
            f"--moments {config.train.moments} rounds what PyTorch keeps in fp32: there is nothing "
            "to compare such a run with; verify it with --set train.moments=fp32"
        )
    if config.init is not None:
        raise ConfigError(
            "--init: plain transformers draws other weights; verify a run of the model that was "
            "exported"
        )
    task = config.task or task_of_model(config.model)
    # A model of another library is refused by name when its folder is read.
    if TASKS[task].LIBRARY == "transformers" and type(TASKS[task]).loss is not Task.loss:
        raise ConfigError(
            f"--task {task}: plain transformers has no such loss to compare with; verify "
            "the model with --set task=language and texts as data"
        )


def _copied(config: Config, folder: Path, layers: int | None, notes: list[str]) -> list[Any]:
    """Create a copy of the model that fits into memory.

    Return the numbers of layers and the dropout settings of the copy.
    """
    count = layers or _layers(config, notes)
    copy = copy_model(config.model, folder, layers=count)
    if copy.dropout:
        notes.append(f"dropout is off in both runs ({', '.join(sorted(set(copy.dropout)))})")
    return [copy.layers, copy.all_layers, list(copy.dropout)]


def _steps_only(config: Config, model: Path, drives: Sequence[Path]) -> Config:
    """Return the settings without evaluation, samples, snapshots, export and logs."""
    return replace(
        config,
        model=model,
        out=drives[0] / "run",
        sample=SampleConfig(),
        eval=replace(config.eval, data=None, every=None, early_stop=0),
        budget=replace(config.budget, ssd=tuple(drives), snapshot_every=0),
        output=replace(config.output, export=False, trace=False, export_best=False, log=()),
    )


Runs = tuple[RunMode, RunResult, RunResult]


@dataclass(frozen=True)
class _Trial:
    recipe: Recipe
    config: Config
    inputs: Inputs
    display: Display
    from_host: int | None
    group: ProcessGroup

    def advance(self, what: str) -> Callable[[int, int], None]:
        return lambda done, total: self.display.advance(what, done, total)

    def runs(self, mode: RunMode, reference: Trajectory | None) -> tuple[RunResult, RunResult]:
        """Return the results of a mode with and without overlapping steps.

        Each of the two runs has its own temporary store.
        """
        results = []
        for number, stepwise in enumerate((False, True)):
            out = self.config.out.with_name(f"run-{mode}-{number}".replace(" ", "-"))
            results.append(
                lohan_run(
                    self.recipe,
                    mode.of(replace(self.config, out=out)),
                    self.inputs,
                    reference,
                    self.display,
                    stepwise=stepwise,
                    from_host=self.from_host,
                    group=self.group,
                )
            )
            self.advance(str(mode))(number + 1, 2)
        return results[0], results[1]

    def noise(self, reference: Trajectory, runs: Sequence[Runs], notes: list[str]) -> Noise | None:
        """Return the rounding noise of the reference, measured with a run in a finer type.

        Return None if all runs are within the limits without noise, or if the finer run needs too
        much memory. In the second case, a note is added to `notes`.
        """
        dtype = self.recipe.dtype
        plain = list(_judged(runs, reference, TOLERANCES[dtype], None))
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
        return Noise(*noise_run(self.recipe, reference, self.advance("rounding noise")))


def _judged(
    runs: Sequence[Runs], reference: Trajectory, tolerance: Tolerance, noise: Noise | None
) -> Iterator[Compared]:
    first: dict[tuple[object, ...], Runs] = {}
    for mode, free, stepwise in runs:
        plan = free.plan
        same = (plan.micro_batch, plan.tiles, plan.head_tokens, plan.chunk_params)
        other = ""
        if plan.device_slots == 0:  # Equal bits are required only on the CPU.
            before = first.setdefault(same, (mode, free, stepwise))
            if free.digest != stepwise.digest:
                other = "the same run with every step brought to its end"
            elif free.digest != before[1].digest:
                other = str(before[0])
        losses = judge_losses(free.losses, reference.losses, tolerance, noise)
        losses += judge_losses(stepwise.losses, reference.losses, tolerance, noise)
        weights = judge_weights(stepwise.differences, tolerance, noise)
        yield Compared(mode, free, stepwise, losses, weights, other)


# -- What fits into memory -------------------------------------------------------------------------


def _scratch(folder: Path, stack: ExitStack) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(prefix="lohan-verify-", dir=folder)
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be written to: {error.strerror}; give a folder with --ssd"
        ) from None
    return Path(stack.enter_context(temporary))


def _layers(config: Config, notes: list[str]) -> int | None:
    """Return how many layers fit into memory in an in-memory run, or None if all do."""
    whole = layer_count(config.model)
    moments = MOMENT_BYTES * len(config.train.kind.moment_specs)
    needed = _needed(config, BYTES[training_dtype(config)] + moments)
    free = host_memory_bytes() * 4 // 5
    if needed(whole) <= free:
        return None
    for count in range(min(MOST_LAYERS, whole - 1), 0, -1):
        if needed(count) <= free:
            notes.append(
                f"an in-memory run of all {whole} layers needs {format_bytes(needed(whole))}, "
                f"{format_bytes(free)} is available: this is a copy with the first {count} layers, "
                "same shapes"
            )
            return count
    raise BudgetError(
        f"an in-memory run of one layer needs {format_bytes(needed(1))}, {format_bytes(free)} is "
        "available; lower --batch or --seq"
    )


def _needed(config: Config, bytes_per_parameter: int) -> Callable[[int], int]:
    """Return a function that maps a number of layers to the bytes of an in-memory run."""
    train = config.train
    dtype = training_dtype(config)
    model = load(config.model, dtype=dtype, lora=train.adapter)
    blocks = cut(model)
    shape = torch.empty((train.batch, train.seq), dtype=torch.long, device="meta")
    workload = workload_of(model, blocks, {"input_ids": shape})
    width = 8 if bytes_per_parameter == NOISE_BYTES["fp32"] else 4 if dtype == "fp32" else 2
    bytes_of = {
        group.key: group.numel * (width if group.frozen else bytes_per_parameter)
        for group in blocks.groups
    }
    inside = {key for site in blocks.sites if site.name in workload.shapes for key in site.groups}
    repeated = sum(bytes_of[key] for key in inside)
    repeated += int(sum(s.elements for s in workload.shapes.values()) * workload.tokens * width)
    besides = sum(size for key, size in bytes_of.items() if key not in inside)
    besides += workload.tokens * workload.vocabulary * LOGIT_BYTES
    whole = max(1, layer_count(config.model))
    return lambda layers: besides + repeated * layers // whole
