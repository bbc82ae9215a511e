"""Vision-language models: conversations about images, and the loss of the answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lohan.config import Config, Source
from lohan.data.cache import check_source
from lohan.data.dataset import Fields, Row, open_fields, write_fields
from lohan.data.reading import read_rows
from lohan.data.vision import ROWS, Conversations, load_processor, rows_with_images
from lohan.engine.session import Session
from lohan.errors import DataError
from lohan.train import language
from lohan.train.supervised import kind_in, refuse_text_settings
from lohan.train.task import Batch, OnProgress, load_trained
from lohan.util.files import checked
from lohan.util.units import counted

PERPLEXITY = True
rows, tokens, weight = language.rows, language.tokens, language.weight
NAME, KIND = "vision-language", "AutoModelForImageTextToText"
TOWERS = ("vision_tower", "visual", "vision_model", "vision_encoder", "image_tower", "vision_embed")
PROJECTOR = "merger"  # inside a tower: what fits its output to the language model


def check(config: Config) -> None:
    kind_in(config, NAME, {KIND: None})
    refuse_text_settings(config, NAME, lora=True)


def load(config: Config, *, dtype: str) -> nn.Module:
    return load_trained(config, dtype=dtype, freeze=vision_parts)


def vision_parts(model: nn.Module) -> list[str]:
    """The vision tower, without what projects its output."""
    found: list[str] = []
    for name, tower in model.named_modules():
        inside = name.rpartition(".")[0].split(".")
        if name.rpartition(".")[2] not in TOWERS or set(inside) & set(TOWERS):
            continue
        children = [child for child, _ in tower.named_children()]
        own = [child for child in children if PROJECTOR not in child]
        found += [name] if len(own) == len(children) else [f"{name}.{child}" for child in own]
    return [name for name in found if any(True for _ in model.get_submodule(name).parameters())]


# -- data ------------------------------------------------------------------------------------------


def prepare(
    sources: Sequence[Source], cache: Path, config: Config, *, option: str, resume: bool,
    progress: OnProgress,
) -> Fields:  # fmt: skip
    made = Conversations(
        load_processor(config.model), config.model, config.train.seq, config.train.chat_template
    )
    ready = open_fields(cache, seed=config.seed, collate=made.collate) if resume else None
    if ready is None:

        def examples(source: Source) -> Iterator[Row]:
            check_source(source.path, option)
            rows = read_rows(source.path, lambda d, t: progress("tokenising", d, t))
            return rows_with_images(rows, source.path, made)

        def about() -> dict[str, Any]:
            return {"files": made.images.files, "cut": made.cut, "dropped": made.dropped}

        parts = ((source, examples(source)) for source in sources)
        write_fields(cache, parts, about=about, show=made.shown)
        ready = open_fields(cache, seed=config.seed, collate=made.collate)
    if ready is None:
        raise DataError(
            f"{sources[0].path}: no example is left to train on ({made.dropped} dropped: the first "
            f"{config.train.seq} tokens hold no answer); raise --seq or check the file"
        )
    known = checked(ready.about["files"], list[tuple[str, str]], "files")
    made.images.files = [(name, digest) for name, digest in known]
    return ready


def describe(examples: Fields, config: Config) -> str:
    about = examples.about
    note = f"{counted(len(examples), 'example')}, {counted(len(about['files']), 'image')}"
    if about["cut"]:
        note += f"; {about['cut']:,} longer than {config.train.seq} tokens"
    if about["dropped"]:
        note += (
            f"\nwarning: {about['dropped']:,} dropped: their first {config.train.seq} tokens hold "
            "no answer, or not all of their images; raise --seq, or look at the data"
        )
    return "\n".join([note, *language.rendered(examples.rendered)])


def arrange(examples: Fields, config: Config) -> Fields:
    return examples


# -- batches and loss ------------------------------------------------------------------------------


def shapes(config: Config, examples: list[Fields], *, dtype: str) -> Batch:
    """Of the longest examples, with their values: how many tokens an image has is one of them."""
    if examples:
        return inputs_of(max(
            (next(one.passes(config.train.batch)) for one in examples),
            key=lambda batch: batch["input_ids"].numel(),
        ))  # fmt: skip
    made = Conversations(load_processor(config.model), config.model, config.train.seq)
    return inputs_of(made.example(config.train.batch))


def inputs_of(batch: Batch) -> Batch:
    return {name: value for name, value in batch.items() if name != ROWS}


def before_training(
    session: Session, examples: Fields, config: Config, progress: OnProgress
) -> None:
    """Nothing."""


def part(batch: Batch, start: int, stop: int) -> Batch:
    """Rebuilt: pixels are not in rows of their own."""
    low, high = (start, stop) if start < stop else (0, 1)
    made_by, examples = batch[ROWS]
    made: Batch = made_by.collate(examples[low:high])
    return made


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    found: torch.Tensor = model(**inputs_of(batch)).loss
    return found
