"""Supervised tasks other than causal language modelling.

Texts: text-to-text, classification of texts or of tokens, question answering, and masked language
modelling. Images: classification.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lohan.config import Config
from lohan.data import IGNORE
from lohan.data.cache import check_source
from lohan.data.dataset import Fields, Row, padded
from lohan.data.images import SIDE, ImageFiles, find_samples, load_image_processor
from lohan.data.reading import is_saved, mapped, processes_for, read_rows, suffix_of, text_blocks
from lohan.data.supervised import (
    TOKENS,
    Classes,
    Encode,
    Texts,
    classes_of,
    encode_class,
    encode_pair,
    encode_question,
    encode_tags,
    encode_text,
    label_of,
    masking_of,
    texts_of,
)
from lohan.data.text import kind_of, rendered
from lohan.errors import DataError, first_line
from lohan.train.task import (
    Batch,
    DataRequest,
    Task,
    few_warning,
    folder_files,
    kind_in,
    refuse_text_settings,
)
from lohan.util.units import align_up, counted

PAIR, SEQUENCE, TOKEN, QUESTION, MASKED = (
    "AutoModelForSeq2SeqLM",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
    "AutoModelForMaskedLM",
)
# A block of text with at most this many characters is joined to the previous block.
SHORT_CHARACTERS = 4096
SPAN = ("start_positions", "end_positions")
PADDING = {"labels": IGNORE, "token_type_ids": 0}  # padding values of fields that are not tokens


@dataclass
class Collate:
    """A collator that pads the token sequences of a batch to one length."""

    pad_id: int
    limit: int

    def __call__(self, rows: Sequence[Row]) -> Batch:
        batch = {name: self._padded(rows, name) for name in rows[0] if name in TOKENS}
        lengths = np.array([len(row["input_ids"]) for row in rows])[:, None]
        mask = np.arange(batch["input_ids"].shape[1]) < lengths
        batch["attention_mask"] = mask.astype(np.int64)
        tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
        return tensors | self.answers(rows)

    def answers(self, rows: Sequence[Row]) -> Batch:
        """Return the padded labels of a batch.

        There is one label for each input token or, for text-to-text, each token of the target.
        """
        return {"labels": torch.from_numpy(self._padded(rows, "labels"))}

    def _padded(self, rows: Sequence[Row], name: str) -> np.ndarray:
        return padded(
            [row[name] for row in rows], value=PADDING.get(name, self.pad_id), most=self.limit
        )


class CollateClass(Collate):
    """A collator for a class, a number, or a multi-hot vector per example."""

    def answers(self, rows: Sequence[Row]) -> Batch:
        return {"labels": stacked_labels([row["labels"] for row in rows])}


class CollateSpan(Collate):
    """A collator for the first and the last token of each answer."""

    def answers(self, rows: Sequence[Row]) -> Batch:
        return {name: torch.tensor([int(row[name][0]) for row in rows]) for name in SPAN}


def stacked_labels(labels: Sequence[np.ndarray]) -> torch.Tensor:
    """Stack the labels (classes, numbers or multi-hot vectors) of all examples into a tensor."""
    stacked = torch.from_numpy(np.stack(labels))
    return stacked.long().squeeze(1) if not stacked.is_floating_point() else stacked


COLLATES = {SEQUENCE: CollateClass, QUESTION: CollateSpan}


@dataclass
class Supervised(Task[Fields]):
    """A supervised task; `encodes` maps kinds of models to functions from rows to examples."""

    name: str
    encodes: Mapping[str, Encode]
    PERPLEXITY: bool = False

    def check(self, config: Config) -> None:
        kind_in(config, self.name, self.encodes)
        refuse_text_settings(config, self.name)

    def prepare(self, data: DataRequest) -> Fields:
        kind, model = kind_in(data.config, self.name, self.encodes)
        texts = texts_of(data.config.model, model, seq=data.config.train.seq)
        kinds = COLLATES.get(kind, Collate)
        ready = data.fields(
            partial(_examples, data, kind, self.encodes[kind], texts),
            about=lambda: {"cut": texts.cut, "limit": texts.limit},
            show=partial(shown, kind, texts),
            collate=kinds(texts.encoder.pad_id(texts.vocab_size), texts.limit),
            draw=masking_of(texts) if kind == MASKED else None,
        )
        assert ready is not None
        return ready

    def describe(self, examples: Fields, config: Config) -> str:
        note = "\n".join([*folder_files(config), counted(len(examples), "example")])
        if cut := examples.about.get("cut"):
            note += f"; {cut:,} cut to {examples.about['limit']} tokens"
        few = few_warning(len(examples), counted(len(examples), "example"), config)
        return "\n".join([note, *few, *rendered(examples.rendered)])

    def shapes(self, config: Config, examples: list[Fields], *, dtype: str) -> Batch:
        batch, (kind, model) = config.train.batch, kind_in(config, self.name, self.encodes)
        if not examples:
            limit = texts_of(config.model, model, seq=config.train.seq).limit
            widths = {"input_ids": limit, "labels": limit}
        else:
            longest = {
                name: max(one.longest(name) for one in examples) for name in examples[0].types
            }
            most = examples[0].about["limit"]
            widths = {n: max(count, min(align_up(count, 8), most)) for n, count in longest.items()}
        shapes = {
            name: torch.empty((batch, width), dtype=torch.long, device="meta")
            for name, width in widths.items()
        }
        shapes["attention_mask"] = shapes["input_ids"]
        if kind == SEQUENCE and examples:
            shapes["labels"] = examples[0].batch(0, batch)["labels"].to("meta")
        elif kind == SEQUENCE:
            shapes["labels"] = torch.empty((batch,), dtype=torch.long, device="meta")
        elif kind == MASKED:
            shapes["labels"] = shapes["input_ids"]
        elif kind == QUESTION:
            shapes.pop("labels", None)
            shapes |= {n: torch.empty((batch,), dtype=torch.long, device="meta") for n in SPAN}
        return shapes

    def tokens(self, model: nn.Module, batch: Batch) -> int:
        count = int(batch["input_ids"].numel())
        return count + int(batch["labels"].numel()) if self.name == "text-to-text" else count

    def weight(self, model: nn.Module, batch: Batch) -> int:
        labels = batch.get("labels")
        if labels is not None and labels.ndim == 2 and not labels.is_floating_point():
            return int((labels != IGNORE).sum())
        return self.rows(batch)


def _examples(
    data: DataRequest, kind: str, encode: Encode, texts: Texts, path: Path
) -> Iterator[Row]:
    """Yield the examples of a file; several processes encode a large file."""
    check_source(path, data.option)
    report = partial(data.progress, "tokenising")
    if suffix_of(path) != ".txt":
        rows = read_rows(path, report)
    elif kind == MASKED:
        rows = ((str(path), {"text": block}) for block in _whole(text_blocks(path, report)))
    else:
        raise DataError(
            f"{path}: a text has no answers; give {data.option} a .jsonl file or a table"
        )
    any_row = False
    for examples in mapped(partial(_encoded, encode), rows, texts, processes_for(path)):
        yield from examples
        any_row = True
    if not any_row:
        raise DataError(f"{path}: holds no examples; check {data.option}")


def _encoded(encode: Encode, texts: Texts, row: tuple[str, dict[str, Any]]) -> list[Row]:
    place, values = row
    present_values = {key: value for key, value in values.items() if value is not None}
    return list(encode(present_values, texts, place))


def shown(kind: str, texts: Texts, row: Row) -> dict[str, str]:
    """Return an example as text: the input of the model, and the answer that `kind` expects.

    `kind` is the auto class of the model.
    """
    tokenizer = texts.encoder.tokenizer("the data")
    ids, labels = row["input_ids"].tolist(), row.get("labels", np.empty(0)).tolist()
    if kind == PAIR:
        answer = tokenizer.decode(labels)
    elif kind == SEQUENCE:
        answer = texts.classes.describe(labels)
    elif kind == TOKEN:
        pairs = zip(ids, labels, strict=True)
        words = [(tokenizer.decode([i]), texts.classes.describe([x])) for i, x in pairs if x >= 0]
        answer = ", ".join(f"{word.strip()}: {name}" for word, name in words)
    elif kind == QUESTION:
        first, last = (int(row[name][0]) for name in SPAN)
        answer = tokenizer.decode(ids[first : last + 1])
    else:
        answer = "some of its tokens, others in every step"
    return {"prompt": tokenizer.decode(ids), "answer": answer}


def _whole(blocks: Iterator[str]) -> Iterator[str]:
    """Join short blocks of text to the previous block, and yield the resulting blocks."""
    before = ""
    for block in blocks:
        if before and len(block) > SHORT_CHARACTERS:
            yield before
            before = ""
        before += block
    if before:
        yield before


TEXT_TASKS = (
    Supervised("text-to-text", {PAIR: encode_pair}, PERPLEXITY=True),
    Supervised("classification", {SEQUENCE: encode_class, TOKEN: encode_tags}),
    Supervised("question-answering", {QUESTION: encode_question}),
    Supervised("masked", {MASKED: encode_text}, PERPLEXITY=True),
)


# -- Image classification, from folders of classes or from rows ------------------------------------


PIXEL_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class ImageClassification(Task[Fields]):
    NAME, KIND = "image-classification", "AutoModelForImageClassification"

    def check(self, config: Config) -> None:
        kind_in(config, self.NAME, {self.KIND: None})
        refuse_text_settings(config, self.NAME)

    def prepare(self, data: DataRequest) -> Fields:
        pictures = _open_pictures(data.config)

        def examples(path: Path) -> Iterator[Row]:
            rows = _folder_rows if path.is_dir() and not is_saved(path) else _table_rows
            return rows(path, pictures, data)

        ready = data.fields(
            examples,
            about=lambda: {"files": pictures.images.files},
            show=pictures.shown,
            collate=pictures.collate,
        )
        if ready is None:
            raise DataError(f"{data.sources[0].path}: holds no examples; check {data.option}")
        pictures.images.restore(ready.about)
        return ready

    def describe(self, examples: Fields, config: Config) -> str:
        note = counted(len(examples), "image")
        few = few_warning(len(examples), note, config)
        return "\n".join([note, *few, *rendered(examples.rendered)])

    def shapes(self, config: Config, examples: list[Fields], *, dtype: str) -> Batch:
        batch = config.train.batch
        if examples:
            first = examples[0].batch(0, 1)
        else:
            from PIL import Image

            pixels = _open_pictures(config).pixels([Image.new("RGB", (SIDE, SIDE), "grey")])
            first = {"pixel_values": pixels, "labels": torch.zeros(1, dtype=torch.long)}
        shapes = {
            name: torch.empty((batch, *one.shape[1:]), dtype=one.dtype, device="meta")
            for name, one in first.items()
        }
        return shapes | {"pixel_values": shapes["pixel_values"].to(PIXEL_TYPES[dtype])}

    def rows(self, batch: Batch) -> int:
        return len(batch["pixel_values"])

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        kind = next(model.parameters()).dtype
        pixels = batch["pixel_values"].to(kind)
        loss: torch.Tensor = model(**{**batch, "pixel_values": pixels}).loss
        return loss

    def tokens(self, model: nn.Module, batch: Batch) -> int:
        """Return the number of images."""
        return self.rows(batch)


@dataclass
class Pictures:
    """Images with their classes; the model folder's image processor makes the pixels."""

    processor: Any
    folder: Path  # the model folder
    classes: Classes
    images: ImageFiles = field(default_factory=ImageFiles)

    def row(self, path: Path, values: dict[str, Any], place: str) -> Row:
        number = self.images.number_of(path, place)
        labels = label_of(values, self.classes, place)
        return {"image": np.asarray([number], np.int64), "labels": labels}

    def shown(self, row: Row) -> dict[str, str]:
        """Return an example as text."""
        name, _ = self.images.files[int(row["image"][0])]
        return {"prompt": name, "answer": self.classes.describe(row["labels"].tolist())}

    def collate(self, rows: Sequence[Row]) -> Batch:
        opened = [self.images.opened(int(row["image"][0])) for row in rows]
        return {"pixel_values": self.pixels(opened)} | {
            "labels": stacked_labels([row["labels"] for row in rows])
        }

    def pixels(self, images: list[Any]) -> torch.Tensor:
        try:
            processed = self.processor(images=images, return_tensors="pt")["pixel_values"]
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"the image processor of {self.folder} refuses images: {first_line(error)}; check "
                "size and crop_size in its preprocessor_config.json"
            ) from None
        pixels: torch.Tensor = processed
        return pixels


def _open_pictures(config: Config) -> Pictures:
    _, model = kind_in(config, ImageClassification.NAME, {ImageClassification.KIND: None})
    return Pictures(load_image_processor(config.model), config.model, classes_of(model))


def _folder_rows(folder: Path, pictures: Pictures, data: DataRequest) -> Iterator[Row]:
    """Yield an example for each image; its label is the name of the image's subfolder."""
    samples = find_samples(folder, companions=(), option=data.option)
    for number, sample in enumerate(samples, 1):
        if not sample.is_image:
            raise DataError(f"{sample.path}: not an image; give {data.option} a folder of images")
        if not sample.group:
            raise DataError(
                f"{sample.path}: is not in the folder of a class; put every image into a folder "
                f"below {folder}, one for each class"
            )
        yield pictures.row(sample.path, {"label": sample.group}, str(sample.path))
        data.progress("reading images", number, len(samples))


def _table_rows(source: Path, pictures: Pictures, data: DataRequest) -> Iterator[Row]:
    check_source(source, data.option)
    for place, row in read_rows(source, partial(data.progress, "reading images")):
        name = row.get("image", row.get("file_name"))
        if not isinstance(name, str):
            raise DataError(
                f"{place}: image is {kind_of(name)}; give the name of its file, and its label"
            )
        values = {key: value for key, value in row.items() if value is not None}
        yield pictures.row(source.parent / name, values, place)
