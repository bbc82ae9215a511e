"""Models that tell what an image shows: a class for each, from folders of classes or from rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lohan.config import Config, Source
from lohan.data.cache import check_source
from lohan.data.dataset import Fields, Row, open_fields, write_fields
from lohan.data.images import find_samples
from lohan.data.reading import is_saved, read_rows
from lohan.data.supervised import Classes, classes_of, label_of
from lohan.data.text import kind_of
from lohan.data.vision import SIDE, ImageFiles, load_image_processor
from lohan.engine.session import Session
from lohan.errors import DataError, first_line
from lohan.train.language import rendered
from lohan.train.supervised import kind_in, refuse_text_settings, stacked_labels
from lohan.train.task import Batch, OnProgress, load_trained
from lohan.util.files import checked
from lohan.util.units import counted

PERPLEXITY = False
NAME, KIND = "image-classification", "AutoModelForImageClassification"

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def check(config: Config) -> None:
    kind_in(config, NAME, {KIND: None})
    refuse_text_settings(config, NAME)


def load(config: Config, *, dtype: str) -> nn.Module:
    return load_trained(config, dtype=dtype)


# -- data ------------------------------------------------------------------------------------------


@dataclass
class Pictures:
    """Images with their classes; pixels are made by the image processor of the model folder."""

    processor: Any
    folder: Path  # of the model
    classes: Classes
    images: ImageFiles = field(default_factory=ImageFiles)

    def row(self, path: Path, given: dict[str, Any], place: str) -> Row:
        number = self.images.number_of(path, place)
        labels = label_of(given, self.classes, place)
        return {"image": np.asarray([number], np.int64), "labels": labels}

    def shown(self, row: Row) -> dict[str, str]:
        """An example for people."""
        name, _ = self.images.files[int(row["image"][0])]
        return {"prompt": name, "answer": self.classes.describe(row["labels"].tolist())}

    def collate(self, rows: Sequence[Row]) -> Batch:
        opened = [self.images.opened(int(row["image"][0])) for row in rows]
        return {"pixel_values": self.pixels(opened)} | {
            "labels": stacked_labels([row["labels"] for row in rows])
        }

    def pixels(self, images: list[Any]) -> torch.Tensor:
        try:
            made = self.processor(images=images, return_tensors="pt")["pixel_values"]
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"the image processor of {self.folder} refuses images: {first_line(error)}; check "
                "size and crop_size in its preprocessor_config.json"
            ) from None
        found: torch.Tensor = made
        return found


def prepare(
    sources: Sequence[Source], cache: Path, config: Config, *, option: str, resume: bool,
    progress: OnProgress,
) -> Fields:  # fmt: skip
    made = _pictures(config)
    ready = open_fields(cache, seed=config.seed, collate=made.collate) if resume else None
    if ready is None:

        def examples(source: Source) -> Iterator[Row]:
            rows = _folder_rows if _is_folder(source.path) else _table_rows
            return rows(source.path, made, option, progress)

        parts = ((source, examples(source)) for source in sources)
        write_fields(cache, parts, about=lambda: {"files": made.images.files}, show=made.shown)
        ready = open_fields(cache, seed=config.seed, collate=made.collate)
    if ready is None:
        raise DataError(f"{sources[0].path}: holds no examples; check {option}")
    known = checked(ready.about["files"], list[tuple[str, str]], "files")
    made.images.files = [(name, digest) for name, digest in known]
    return ready


def _pictures(config: Config) -> Pictures:
    _, model = kind_in(config, NAME, {KIND: None})
    return Pictures(load_image_processor(config.model), config.model, classes_of(model))


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not is_saved(path)


def _folder_rows(folder: Path, made: Pictures, option: str, progress: OnProgress) -> Iterator[Row]:
    """The folder that an image lies in is its class, by name or number."""
    samples = find_samples(folder, companions=(), option=option)
    for number, sample in enumerate(samples, 1):
        if not sample.is_image:
            raise DataError(f"{sample.path}: not an image; give {option} a folder of images")
        if not sample.group:
            raise DataError(
                f"{sample.path}: lies in no folder of a class; put every image into a folder below "
                f"{folder}, one for each class"
            )
        yield made.row(sample.path, {"label": sample.group}, str(sample.path))
        progress("reading images", number, len(samples))


def _table_rows(source: Path, made: Pictures, option: str, progress: OnProgress) -> Iterator[Row]:
    check_source(source, option)
    for place, row in read_rows(source, lambda done, all_: progress("reading images", done, all_)):
        name = row.get("image", row.get("file_name"))
        if not isinstance(name, str):
            raise DataError(
                f"{place}: image is {kind_of(name)}; give the name of its file, and its label"
            )
        given = {key: value for key, value in row.items() if value is not None}
        yield made.row(source.parent / name, given, place)


def describe(examples: Fields, config: Config) -> str:
    note = counted(len(examples), "image")
    if len(examples) < config.train.batch:
        note += (
            f"\nwarning: {counted(len(examples), 'image')} and a batch of {config.train.batch}: a "
            "step sees some of them more than once; lower --batch"
        )
    return "\n".join([note, *rendered(examples.rendered)])


def arrange(examples: Fields, config: Config) -> Fields:
    return examples


# -- batches and loss ------------------------------------------------------------------------------


def shapes(config: Config, examples: list[Fields], *, dtype: str) -> Batch:
    batch = config.train.batch
    if examples:
        first = examples[0].batch(0, 1)
    else:
        from PIL import Image

        pixels = _pictures(config).pixels([Image.new("RGB", (SIDE, SIDE), "grey")])
        first = {"pixel_values": pixels, "labels": torch.zeros(1, dtype=torch.long)}
    made = {
        name: torch.empty((batch, *one.shape[1:]), dtype=one.dtype, device="meta")
        for name, one in first.items()
    }
    return made | {"pixel_values": made["pixel_values"].to(TYPES[dtype])}


def before_training(
    session: Session, examples: Fields, config: Config, progress: OnProgress
) -> None:
    """Nothing."""


def rows(batch: Batch) -> int:
    return len(batch["pixel_values"])


def part(batch: Batch, start: int, stop: int) -> Batch:
    low, high = (start, stop) if start < stop else (0, 1)
    return {name: tensor[low:high] for name, tensor in batch.items()}


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    kind = next(model.parameters()).dtype
    pixels = batch["pixel_values"].to(kind)
    found: torch.Tensor = model(**{**batch, "pixel_values": pixels}).loss
    return found


def tokens(model: nn.Module, batch: Batch) -> int:
    """Images."""
    return rows(batch)


def weight(model: nn.Module, batch: Batch) -> int:
    return rows(batch)
