"""What a run begins with: its data, its session, and a folder that is free or can be taken up."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from lohan.api import Budget, attach, blocks_of, load
from lohan.config import Config
from lohan.data import Dataset, Encoder, open_dataset, prepare
from lohan.device.choose import default_mode, open_device
from lohan.display import Display
from lohan.errors import BudgetError, ConfigError, StoreError
from lohan.generation import encode_prompts, read_prompts
from lohan.lr import lr_at
from lohan.model_files.folder import load_config
from lohan.optim import AdamW
from lohan.packing import check_packs
from lohan.plan import Kept, Plan, plan_from_file
from lohan.profile import Profile
from lohan.profiling.command import cache_file, cached_profile
from lohan.run import RunFolder
from lohan.session import Session
from lohan.settings import TrainConfig
from lohan.storage.admin import describe, remove
from lohan.storage.files import IDENTITY, LOCK, MANIFEST
from lohan.storage.lock import StoreLock
from lohan.storage.snapshot import find_snapshot, restore
from lohan.streaming import Shape, batch_of, needs_of
from lohan.units import align_up, format_bytes

COMPUTE = (
    "block inputs", "kept activations", "hidden state and its gradient", "waiting gradients",
    "work of one block or the head",
)  # fmt: skip


@dataclass(frozen=True)
class Prompts:
    """Sample prompts, their tokens, and the bytes that answering one of them takes."""

    texts: list[str]
    ids: list[list[int]]
    encoder: Encoder
    each_bytes: int


@dataclass(frozen=True)
class Inputs:
    """What a run works on: rows to train and to evaluate on, prompts, and the number of steps."""

    train: Dataset
    held: Dataset | None
    prompts: Prompts | None
    total: int

    @property
    def longest(self) -> int:
        """Tokens of the longest row, as batches are padded."""
        held = self.held.longest if self.held is not None else 0
        return min(self.train.seq, align_up(max(self.train.longest, held), 8))


# -- data -----------------------------------------------------------------------------------------


def open_inputs(
    folder: RunFolder, config: Config, display: Display, *, resume: bool = False
) -> Inputs:
    """The tokenised data and the number of steps; a resumed run keeps the data it began with."""
    dataset = _dataset(folder.data, config.data, config, display, resume=resume)
    display.note(_summary(dataset, config.train.seq))
    held = None
    if config.eval.data is not None:
        held = _dataset(
            folder.eval_data, config.eval.data, config, display, resume=resume, option="--eval-data"
        )
    elif config.eval.split > 0:
        dataset, held = dataset.split(config.eval.split)
    if held is not None:
        display.note(f"evaluation on {len(held):,} examples")
    if config.train.pack:
        count = len(dataset)
        dataset, held = dataset.pack(), held.pack() if held is not None else None
        display.note(f"{count:,} examples packed into {len(dataset):,} rows")
    total = config.train.steps or dataset.steps_for(config.train.epochs, config.train.batch)
    return Inputs(dataset, held, _prompts(config), total)


def _dataset(
    cache: Path, source: Path, config: Config, display: Display, *, resume: bool,
    option: str = "--data",
) -> Dataset:  # fmt: skip
    ready = open_dataset(cache, seed=config.seed) if resume else None
    text = load_config(config.model).get_text_config()
    return ready or prepare(
        source, model_dir=config.model, cache_dir=cache, seq=config.train.seq, seed=config.seed,
        vocab_size=getattr(text, "vocab_size", None), option=option,
        progress=lambda done, all_: display.advance("tokenising", done, all_),
    )  # fmt: skip


def _summary(dataset: Dataset, seq: int) -> str:
    found = dataset.summary
    note = f"{found.examples:,} examples, {found.tokens:,} tokens, {found.trained_tokens:,} "
    note += "with loss"
    if found.cut or found.dropped:
        note += f"; {found.cut:,} cut to {seq} tokens, {found.dropped:,} dropped"
    if found.skipped_turns:
        note += f"; {found.skipped_turns:,} assistant turns without loss (chat template)"
    return note


def _prompts(config: Config) -> Prompts | None:
    if not config.sample.prompts:
        return None
    encoder, texts = Encoder(config.model), read_prompts(config.sample.prompts)
    ids, mode = encode_prompts(encoder, texts), mode_of(config)
    model = load(config.model, dtype=mode, lora=config.train.adapter).eval()
    longest = max(map(len, ids))
    shape = Shape(1, longest, longest + config.sample.tokens)
    blocks = blocks_of(model, batch_of(shape))
    each = sum(needs_of(model, blocks, shape, mode, micro_batch=1, head=1).values())
    return Prompts(texts, ids, encoder, each)


# -- the session ----------------------------------------------------------------------------------


def open_session(
    folder: RunFolder, config: Config, inputs: Inputs, display: Display, *, resume: bool
) -> Session:
    train, budget = config.train, config.budget
    device = open_device(budget.device, memory=budget.device_memory, link=budget.link)
    mode = train.dtype or device.mode
    model = load(config.model, dtype=mode, lora=train.adapter).train()
    if train.pack:
        check_packs(model)
    places, name = folder.store_place(config)
    warmup = train.warmup_steps(inputs.total)

    def lr(step: int) -> float:
        return lr_at(
            step, total_steps=inputs.total, peak_lr=train.lr, schedule=train.schedule,
            warmup_steps=warmup, min_lr_ratio=train.min_lr_ratio,
        )  # fmt: skip

    session = attach(
        model,
        optimizer=AdamW(
            lr=lr, betas=(train.beta1, train.beta2), eps=train.eps,
            weight_decay=train.weight_decay,
        ),
        budget=Budget(host=budget.host, ssd=places, durability=budget.durability), device=device,
        batch=batch_shapes(train, inputs.longest), micro_batch=train.micro_batch, resume=resume,
        overlap=train.overlap, grad_offload=train.grad_offload, clip=train.clip,
        trace=config.output.trace, store_name=name, activations=kept_by(train.activations),
        profile=known_profile(places),
        progress=lambda done, all_: display.advance("loading", done, all_),
    )  # fmt: skip
    try:
        if inputs.prompts is not None:
            check_room(session.plan, inputs.prompts)
    except BudgetError:
        session.close(flush=False)
        raise
    return session


def mode_of(config: Config) -> str:
    """How parameters are kept: as the user says, or as suits the device."""
    budget = config.budget
    return config.train.dtype or default_mode(budget.device)


def batch_shapes(train: TrainConfig, longest: int) -> dict[str, torch.Tensor]:
    """The largest batch, without its memory."""
    shape = torch.empty((train.batch, longest), dtype=torch.long, device="meta")
    return {"input_ids": shape} | ({"position_ids": shape} if train.pack else {})


def check_room(plan: Plan, prompts: Prompts) -> None:
    """Whether a prompt can be answered between two steps."""
    room = room_between(plan)
    if room < prompts.each_bytes:
        raise BudgetError(
            f"--sample-prompts: an answer needs {format_bytes(prompts.each_bytes)} beside the "
            f"weights, the plan leaves {format_bytes(room)} between steps; raise --host, or "
            "shorten the prompts or --sample-tokens"
        )


def room_between(plan: Plan) -> int:
    """Bytes that the plan has for compute, and that nothing uses between steps."""
    tier = "device" if plan.device_slots else "host"
    return sum(e.bytes for e in plan.ledger if e.tier == tier and e.owner in COMPUTE)


def known_profile(places: Sequence[Path]) -> Profile | None:
    """What `lohan profile` found for these drives, if it was asked."""
    here = [place for place in places if place.is_dir()]
    file = cache_file(here) if len(here) == len(places) else None
    return cached_profile(here) if file is not None and file.is_file() else None


def kept_by(wish: str) -> str | Kept:
    """The wish, or what the plan file says that it names."""
    if not wish.endswith(".json"):
        return wish
    try:
        return plan_from_file(Path(wish)).kept
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"[train] activations: {wish} is not a plan ({error}); `lohan plan --json` writes one"
        ) from None


# -- the folder -----------------------------------------------------------------------------------


def check_vacant(folder: RunFolder, config: Config) -> None:
    """Refuses a folder that holds a run."""
    started = folder.config_file.exists()
    dirs = folder.store_dirs(folder.config() if started else config)
    if (dirs[0] / MANIFEST).exists() or (started and folder.metrics_file.exists()):
        raise ConfigError(
            f"{folder.path} holds a run already; continue it with `lohan resume {folder.path}`, "
            "or give another --out"
        )
    if folder.path.exists() and not folder.path.is_dir():
        raise ConfigError(f"{folder.path} is a file; give a folder as --out")


@contextmanager
def claimed(folder: RunFolder) -> Iterator[bool]:
    """Makes the folder; one start at a time, until the store's own lock is held. Tells whether it
    is new: then a failed start takes it away again."""
    created = not folder.path.exists()
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder.path}: cannot be made: {error.strerror}; give another --out"
        ) from error
    lock = StoreLock([folder.path])
    try:
        yield created
    finally:
        (folder.path / LOCK).unlink(missing_ok=True)
        lock.release()


def clear_leftovers(folder: RunFolder, config: Config) -> None:
    """Takes away a start that died before its first commit."""
    if folder.config_file.exists():
        remove_store(folder.store_dirs(folder.config()))
    remove_store(folder.store_dirs(config))


def check_begun(folder: RunFolder, config: Config) -> None:
    primary = folder.store_dirs(config)[0]
    if (primary / IDENTITY).exists() and not (primary / MANIFEST).exists():
        raise StoreError(
            f"the run in {folder.path} died while its model was being loaded; start it again with "
            "the same `lohan train` command"
        )


def remove_store(dirs: list[Path]) -> None:
    if (dirs[0] / IDENTITY).exists():
        remove(dirs)


def clear(folder: RunFolder, config: Config, *, whole: bool) -> None:
    """Takes back what a failed start has made."""
    remove_store(folder.store_dirs(config))
    if whole:
        shutil.rmtree(folder.path, ignore_errors=True)
    else:
        for data in (folder.data, folder.eval_data):
            shutil.rmtree(data, ignore_errors=True)
        folder.config_file.unlink(missing_ok=True)


def bring_back(folder: RunFolder, config: Config, display: Display) -> None:
    """A store written in place that died in a step is put back from its last snapshot."""
    dirs = folder.store_dirs(config)
    if describe(dirs)["state"] != "not clean":
        return
    place = folder.snapshots(config)
    try:
        find_snapshot(place)
    except StoreError:
        raise StoreError(
            f"the run in {folder.path} was written in place (durability = checkpoint) and died in "
            f"a step, and there is no snapshot at {place}; start it again, with durability = step "
            "or with snapshot_every"
        ) from None
    display.note(f"the last process died in a step; going back to the snapshot in {place}")
    restore(place, dirs).close()
