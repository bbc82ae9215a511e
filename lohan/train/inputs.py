"""The inputs of a run: its task, its data and its session."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lohan.checkpoint.hf_folder import find_diffusers_folder, kind_of, load_config
from lohan.checkpoint.quantized import without_quantization
from lohan.checkpoint.sources import MARK, mark_initial
from lohan.config import BudgetConfig, Config
from lohan.data import Encoder
from lohan.data.text import load_tokenizer, tokenizer_files
from lohan.device.base import Device
from lohan.device.choose import canonical_name, default_dtype, open_device
from lohan.device.determinism import fix_cublas_workspace
from lohan.device.ranks import ALONE, ProcessGroup
from lohan.engine.attach import attach, load
from lohan.engine.context import blocks_of
from lohan.engine.policies import Budget, OffloadPolicy, StorePolicy
from lohan.engine.profile import CPU, ComputePlace, cache_file, cached_profile
from lohan.engine.session import Session
from lohan.errors import BudgetError, ConfigError, ModelError
from lohan.model.machine import Profile
from lohan.model.options import activation_policy_of
from lohan.model.plan import Plan
from lohan.model.state import state_format_of, stored_state_format
from lohan.planner.memory import INPUTS, KEPT, STREAMS, WAITING, WORK
from lohan.store.log import read_latest
from lohan.train import supervised
from lohan.train.diffusion import Diffusion
from lohan.train.generation import encode_prompts, read_prompts
from lohan.train.language import CausalLM, VisionLanguage
from lohan.train.preference import Preference, Reward
from lohan.train.run_folder import RunFolder, sets_of
from lohan.train.streaming import Shape, batch_of, needs_of
from lohan.train.task import Batch, DataRequest, Examples, Task
from lohan.util.display import Display
from lohan.util.files import read_object, sync_folder, sync_path, write_new
from lohan.util.settings import Source
from lohan.util.units import counted, format_bytes

# -- The tasks by name; a new task needs its class and an entry here -------------------------------


TASKS: dict[str, Task[Any]] = {
    "language": CausalLM(),
    "diffusion": Diffusion(),
    "preference": Preference(),
    "reward": Reward(),
    "vision-language": VisionLanguage(),
    "image-classification": supervised.ImageClassification(),
    **{task.name: task for task in supervised.TEXT_TASKS},
}
MADE_FOR = {  # maps transformers' auto class to a task
    supervised.ImageClassification.KIND: "image-classification",
    VisionLanguage.KIND: "vision-language",
    **{kind: task.name for task in supervised.TEXT_TASKS for kind in task.encodes},
}


def task_of(config: Config) -> Task[Any]:
    """Return the configured task or, by default, the task that the model is made for."""
    task = TASKS[config.task or task_of_model(config.model)]
    task.check(config)
    return task


def task_of_model(model: Path) -> str:
    """Return the name of the task that a model folder is made for."""
    if find_diffusers_folder(model) is not None:
        return "diffusion"
    return MADE_FOR.get(kind_of(load_config(model), model), "language")


# -- Inputs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompts:
    """Sample prompts, their tokens, and the bytes needed to answer one of them."""

    texts: list[str]
    ids: list[list[int]]
    encoder: Encoder
    each_bytes: int


@dataclass(frozen=True)
class Inputs:
    """The inputs of a run: task, training and evaluation examples, prompts, and number of steps."""

    task: Task[Any]
    train_examples: Examples
    held_out: Examples | None
    prompts: Prompts | None
    total: int

    def shapes(self, config: Config, group: ProcessGroup = ALONE) -> Batch:
        """Return the largest batch of one rank on the meta device."""
        every = [self.train_examples, *([self.held_out] if self.held_out is not None else [])]
        rank_config = config.of_rank(group.ranks.world)
        return self.task.shapes(rank_config, every, dtype=training_dtype(config))


def check_machine(config: Config, group: ProcessGroup = ALONE) -> None:
    """Raise an error if the device or the memory is not available, before data is read."""
    budget = config.budget
    _open_device(config).close()
    Budget(host=budget.host, ssd=()).host_bytes(group.local_size)


def _open_device(config: Config) -> Device:
    """Open the device of a run. The first call is the first use of CUDA in the process."""
    budget = config.budget
    if config.train.deterministic and budget.device != "cpu":
        fix_cublas_workspace()
    return open_device(budget.device, memory=budget.device_memory, link=budget.link)


# -- Data ------------------------------------------------------------------------------------------


def open_inputs(
    folder: RunFolder, config: Config, display: Display, *, resume: bool = False
) -> Inputs:
    """Prepare the data, and return the inputs of the run with its number of steps.

    A resumed run keeps the data that it was started with.
    """
    task = task_of(config)
    data = DataRequest(
        sources=config.data,
        cache=folder.data,
        config=config,
        option="--data",
        resume=resume,
        progress=display.advance,
    )
    train = task.prepare(data)
    display.note(task.describe(train, config))
    held = None
    if config.eval.data is not None:
        sources, cache = [Source(config.eval.data)], folder.eval_data
        held = task.prepare(replace(data, sources=sources, cache=cache, option="--eval-data"))
    elif config.eval.split > 0:
        train, held = train.split(config.eval.split)
    if held is not None:
        display.note(f"evaluation on {counted(len(held), 'example')}")
        held = task.arrange(held, config)
    count, train = len(train), task.arrange(train, config)
    if config.train.pack:
        rows = counted(len(train), "row")
        display.note(f"{counted(count, 'example')} packed into {rows}")
    total = config.train.steps or train.steps_for(config.train.epochs, config.train.batch)
    return Inputs(task, train, held, _prompts(config), total)


def _prompts(config: Config) -> Prompts | None:
    if not config.sample.prompts:
        return None
    encoder = Encoder(config.model, template=config.train.chat_template)
    texts = read_prompts(config.sample.prompts)
    ids, dtype = encode_prompts(encoder, texts), training_dtype(config)
    model = load(config.model, dtype=dtype, lora=config.train.adapter).eval()
    longest = max(map(len, ids))
    shape = Shape(1, longest, longest + config.sample.tokens)
    blocks = blocks_of(model, batch_of(shape))
    each = sum(needs_of(model, blocks, shape, dtype, micro_batch=1, head=1).values())
    return Prompts(texts, ids, encoder, each)


# -- The session -----------------------------------------------------------------------------------


def open_session(
    folder: RunFolder,
    config: Config,
    inputs: Inputs,
    display: Display,
    *,
    resume: bool,
    group: ProcessGroup = ALONE,
) -> Session:
    train, budget = config.train, config.budget
    device = _open_device(config)
    dtype = train.dtype or device.default_dtype
    model = inputs.task.load(config, dtype=dtype).train()
    ssd_folders, name = folder.ssd_folders(config, group.ranks.rank), folder.store_name(config)

    def lr(step: int) -> float:
        return train.lr_at(step, inputs.total)

    session = attach(
        model,
        optimizer=train.optimizer_with(lr),
        param_groups=train.param_groups_with(inputs.total),
        budget=Budget(
            host=budget.host,
            ssd=ssd_folders,
            commit_every=budget.commit_every,
            log_gradients=budget.log_gradients,
        ),
        device=device,
        batch=inputs.shapes(config, group),
        clip=train.clip,
        trace=config.output.trace,
        process_group=group,
        compile=train.compile,
        base=train.base or "",
        deterministic=train.deterministic,
        offload_policy=OffloadPolicy(
            activations=activation_policy_of(train.activations),
            update_mode=train.update_mode,
            overlap=train.overlap,
            micro_batch=train.micro_batch,
            tiles=train.tiles,
            run_again=True,
            profile=cached_profile_of(ssd_folders, config.budget),
        ),
        store_policy=StorePolicy(
            store_name=name,
            resume=resume,
            progress=lambda done, all_: display.advance("loading", done, all_),
        ),
    )
    try:
        if inputs.prompts is not None:
            check_room(session.plan, inputs.prompts)
    except BudgetError:
        session.close(flush=False)
        raise
    return session


def training_dtype(config: Config) -> str:
    """Return the configured type of the parameters, or else the device's default."""
    budget = config.budget
    return config.train.dtype or default_dtype(budget.device)


def check_state_format(folder: RunFolder, config: Config) -> None:
    """Raise ConfigError if the store's state format is not the one that the settings require."""
    wanted = state_format_of(training_dtype(config), config.train.kind)
    for stores in sets_of(folder, config):
        manifest = read_latest(stores.primaries[0])
        if manifest is None or (stored := stored_state_format(manifest.meta)) == wanted:
            continue
        raise ConfigError(
            f"the store in {stores.primaries[0]} was made for {stored.kind} in {stored.name}, "
            f"{folder.config_file} asks for {wanted.kind} in {wanted.name}; put back "
            f'{stored.kind.settings}, dtype = "{stored.name}" under [train] there, or train again '
            "with another --out"
        )


def check_room(plan: Plan, prompts: Prompts) -> None:
    """Raise BudgetError if the memory that is free between steps is too small for an answer."""
    room = bytes_between_steps(plan)
    if room < prompts.each_bytes:
        raise BudgetError(
            f"--sample-prompts: an answer needs {format_bytes(prompts.each_bytes)} on top "
            f"of the weights, the plan leaves {format_bytes(room)} between steps; raise --host, or "
            "shorten the prompts or --sample-tokens"
        )


def bytes_between_steps(plan: Plan) -> int:
    """Return the bytes that the plan reserves for compute; they are free between steps."""
    tier = "device" if plan.device_slots else "host"
    compute = (INPUTS, KEPT, STREAMS, WAITING, WORK)
    return sum(e.bytes for e in plan.ledger if e.tier == tier and e.owner in compute)


def cached_profile_of(folders: Sequence[Path], budget: BudgetConfig) -> Profile | None:
    """Return the cached result of `lohan profile` for these drives and this device.

    If there is none for the device, return the one for these drives and the CPU, or else None.
    """
    if not all(folder.is_dir() for folder in folders):
        return None
    configured = ComputePlace(canonical_name(budget.device), budget.device_memory, budget.link)
    for place in (configured, CPU):
        if cache_file(folders, place).is_file():
            return cached_profile(folders, place=place)
    return None


# -- Runs from random weights: a model folder without weights, from a config and a tokenizer -------

CONFIG = "config.json"


def make_base(config: Config, target: Path) -> None:
    """Create a model folder for random weights: config, tokenizer, and the weights' seed."""
    assert config.init is not None
    config_file = config.init / CONFIG if config.init.is_dir() else config.init
    if not config_file.is_file():
        raise ModelError(f"--init {config_file}: no such file; give a config.json")
    raw = read_object(config_file, kind=ModelError, remedy="give a model's config.json")
    without_quantization(raw)
    target.mkdir(exist_ok=True)
    remove_base(target, last=False)
    write_new(target / CONFIG, (json.dumps(raw, indent=2) + "\n").encode())
    if config.tokenizer is not None:
        _copy_tokenizer(config.tokenizer, target)
    mark_initial(target, config.seed)
    sync_folder(target)


def _copy_tokenizer(source: Path, target: Path) -> None:
    files = {*tokenizer_files(source), *source.glob("*processor*.json")} if source.is_dir() else ()
    if not files:
        raise ModelError(f"--tokenizer {source}: no tokenizer there; give a folder that has one")
    for file in sorted(files):
        shutil.copyfile(file, target / file.name)
        sync_path(target / file.name)
    count = len(load_tokenizer(target, needed_by="--tokenizer"))
    vocabulary = getattr(load_config(target).get_text_config(), "vocab_size", None)
    if vocabulary is not None and count > vocabulary:
        raise ModelError(
            f"--tokenizer {source}: has {count} tokens, vocab_size in {target / CONFIG} is "
            f"{vocabulary}; raise vocab_size"
        )


def remove_base(target: Path, *, last: bool = True) -> None:
    """Remove the files that `make_base` writes and, with `last`, their folder if it is empty."""
    if not target.is_dir():
        return
    copied = {*tokenizer_files(target), *target.glob("*processor*.json")}
    for file in (*copied, target / CONFIG, target / MARK):
        file.unlink(missing_ok=True)
    if last and not any(target.iterdir()):
        target.rmdir()


def check_settings(group: ProcessGroup, config: Config) -> None:
    """Check settings that concern several ranks.

    Raise ConfigError if a batch has fewer rows than there are ranks, or if ranks have read
    different settings. Ranks on different machines may read different files.
    """
    if config.train.batch < group.world:
        raise ConfigError(
            f"--batch {config.train.batch} is less than one row for each of {group.world} ranks; "
            f"raise it to {group.world}, or start fewer ranks"
        )
    settings = {name: str(value) for name, value in asdict(config.train).items()}
    gathered = group.all_gather_object({**settings, "seed": str(config.seed)})
    for rank, other in enumerate(gathered):
        for name, value in other.items():
            if value != gathered[0][name]:
                raise ConfigError(
                    f"{name} is {gathered[0][name]} for rank 0 and {value} for rank {rank}; give "
                    "all ranks the same settings"
                )
