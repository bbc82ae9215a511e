"""Models whose texts have an answer: another text, a class, those of their words, a part of the
context, or the words that were masked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lohan.checkpoint.hf_folder import KINDS, kind_of, load_config
from lohan.config import Config, Source
from lohan.data import IGNORE
from lohan.data.cache import check_source
from lohan.data.dataset import Fields, Row, open_fields, padded, write_fields
from lohan.data.reading import mapped, processes_for, read_rows, text_blocks
from lohan.data.supervised import (
    TOKENS,
    Encode,
    Texts,
    encode_class,
    encode_pair,
    encode_question,
    encode_tags,
    encode_text,
    masking_of,
    texts_of,
)
from lohan.engine.session import Session
from lohan.errors import ConfigError, DataError, ModelError
from lohan.train.language import rendered
from lohan.train.task import Batch, OnProgress, load_trained
from lohan.util.units import align_up, counted

PAIR, SEQUENCE, TOKEN, QUESTION, MASKED = (
    "AutoModelForSeq2SeqLM", "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification", "AutoModelForQuestionAnswering", "AutoModelForMaskedLM",
)  # fmt: skip
SHORT = 4096  # characters
SPAN = ("start_positions", "end_positions")
FILLED = {"labels": IGNORE, "token_type_ids": 0}  # what padding holds, where it is no token


def kind_in(config: Config, task: str, kinds: Mapping[str, object]) -> tuple[str, Any]:
    """The kind of the run's model, which the task must have, and its config."""
    found = load_config(config.model)
    kind = kind_of(found, config.model)
    if kind not in kinds:
        names = ", ".join(found.architectures or []) or found.model_type
        raise ModelError(
            f"{config.model}: {names} is a model for {KINDS[kind]}, --task {task} trains those for "
            f"{' and '.join(KINDS[one] for one in kinds)}; give the folder of one, or leave --task "
            "out"
        )
    return kind, found


def refuse_text_settings(config: Config, task: str, *, lora: bool = False) -> None:
    """What only causal language models know; and adapters, where PEFT has no kind for the task."""
    asked = {"--pack": config.train.pack, "--sample-prompts": bool(config.sample.prompts)}
    if config.train.lora and not lora:
        raise ConfigError(f"--lora: not for --task {task}, whose head must learn whole; leave it")
    for name, wanted in asked.items():
        if wanted:
            raise ConfigError(f"{name}: is for causal language models, not --task {task}; leave it")


@dataclass
class Collate:
    """Examples as the rows of a batch."""

    pad_id: int
    limit: int

    def __call__(self, rows: Sequence[Row]) -> Batch:
        made = {name: self._padded(rows, name) for name in rows[0] if name in TOKENS}
        lengths = np.array([len(row["input_ids"]) for row in rows])[:, None]
        mask = np.arange(made["input_ids"].shape[1]) < lengths
        made["attention_mask"] = mask.astype(np.int64)
        tensors = {name: torch.from_numpy(array) for name, array in made.items()}
        return tensors | self.answers(rows)

    def answers(self, rows: Sequence[Row]) -> Batch:
        """A label for each token, of this text or another one."""
        return {"labels": torch.from_numpy(self._padded(rows, "labels"))}

    def _padded(self, rows: Sequence[Row], name: str) -> np.ndarray:
        return padded(
            [row[name] for row in rows], value=FILLED.get(name, self.pad_id), most=self.limit
        )


class CollateClass(Collate):
    """With a class or a number for each of them, or ones among zeros."""

    def answers(self, rows: Sequence[Row]) -> Batch:
        return {"labels": stacked_labels([row["labels"] for row in rows])}


class CollateSpan(Collate):
    """With the first and the last token of each answer."""

    def answers(self, rows: Sequence[Row]) -> Batch:
        return {name: torch.tensor([int(row[name][0]) for row in rows]) for name in SPAN}


def stacked_labels(labels: Sequence[np.ndarray]) -> torch.Tensor:
    """A class or a number for each example, or ones among zeros."""
    stacked = torch.from_numpy(np.stack(labels))
    return stacked.long().squeeze(1) if not stacked.is_floating_point() else stacked


COLLATES = {SEQUENCE: CollateClass, QUESTION: CollateSpan}


@dataclass
class Supervised:
    """A task by the kinds of models that it has, and how rows become their examples."""

    name: str
    encodes: Mapping[str, Encode]
    PERPLEXITY: bool = False
    lora: bool = True

    def check(self, config: Config) -> None:
        kind_in(config, self.name, self.encodes)
        refuse_text_settings(config, self.name, lora=self.lora)

    def load(self, config: Config, *, dtype: str) -> nn.Module:
        return load_trained(config, dtype=dtype)

    def prepare(
        self, sources: Sequence[Source], cache: Path, config: Config, *, option: str,
        resume: bool, progress: OnProgress,
    ) -> Fields:  # fmt: skip
        kind, model = kind_in(config, self.name, self.encodes)
        texts = texts_of(config.model, model, seq=config.train.seq)
        kinds = COLLATES.get(kind, Collate)
        how: dict[str, Any] = {
            "seed": config.seed,
            "collate": kinds(texts.encoder.pad_id(texts.vocab_size), texts.limit),
            "draw": masking_of(texts) if kind == MASKED else None,
        }
        ready = open_fields(cache, **how) if resume else None
        if ready is None:
            encode = self.encodes[kind]
            parts = ((s, _examples(s, kind, encode, texts, option, progress)) for s in sources)
            write_fields(
                cache, parts, about=lambda: {"cut": texts.cut, "limit": texts.limit},
                show=partial(shown, kind, texts),
            )  # fmt: skip
            ready = open_fields(cache, **how)
        assert ready is not None
        return ready

    def describe(self, examples: Fields, config: Config) -> str:
        note = counted(len(examples), "example")
        if cut := examples.about.get("cut"):
            note += f"; {cut:,} cut to {examples.about['limit']} tokens"
        if len(examples) < config.train.batch:
            note += (
                f"\nwarning: {counted(len(examples), 'example')} and a batch of "
                f"{config.train.batch}: a step sees some of them more than once; lower --batch"
            )
        return "\n".join([note, *rendered(examples.rendered)])

    def arrange(self, examples: Fields, config: Config) -> Fields:
        return examples

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
        made = {
            name: torch.empty((batch, width), dtype=torch.long, device="meta")
            for name, width in widths.items()
        }
        made["attention_mask"] = made["input_ids"]
        if kind == SEQUENCE:
            made["labels"] = self._class_shape(batch, examples)
        elif kind == MASKED:
            made["labels"] = made["input_ids"]
        elif kind == QUESTION:
            made.pop("labels", None)
            made |= {n: torch.empty((batch,), dtype=torch.long, device="meta") for n in SPAN}
        return made

    def _class_shape(self, batch: int, examples: list[Fields]) -> torch.Tensor:
        if not examples:
            return torch.empty((batch,), dtype=torch.long, device="meta")
        labels: torch.Tensor = examples[0].batch(0, batch)["labels"]
        return labels.to("meta")

    def before_training(
        self, session: Session, examples: Fields, config: Config, progress: OnProgress
    ) -> None:
        """Nothing."""

    def rows(self, batch: Batch) -> int:
        return len(batch["input_ids"])

    def part(self, batch: Batch, start: int, stop: int) -> Batch:
        low, high = (start, stop) if start < stop else (0, 1)
        return {name: tensor[low:high] for name, tensor in batch.items()}

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        found: torch.Tensor = model(**batch).loss
        return found

    def tokens(self, model: nn.Module, batch: Batch) -> int:
        found = int(batch["input_ids"].numel())
        return found + int(batch["labels"].numel()) if self.name == "text-to-text" else found

    def weight(self, model: nn.Module, batch: Batch) -> int:
        labels = batch.get("labels")
        if labels is not None and labels.ndim == 2 and not labels.is_floating_point():
            return int((labels != IGNORE).sum())
        return self.rows(batch)


def _examples(
    source: Source, kind: str, encode: Encode, texts: Texts, option: str, progress: OnProgress
) -> Iterator[Row]:
    """As they are read, large files by several processes."""
    check_source(source.path, option)
    report = lambda done, total: progress("tokenising", done, total)  # noqa: E731
    if source.path.suffix.lower() != ".txt":
        rows = read_rows(source.path, report)
    elif kind == MASKED:
        blocks = _whole(text_blocks(source.path, report))
        rows = ((str(source.path), {"text": block}) for block in blocks)
    else:
        raise DataError(
            f"{source.path}: a text has no answers; give {option} a .jsonl file or a table"
        )
    found = False
    work = partial(_encoded, encode)
    for examples in mapped(work, rows, texts, processes_for(source.path)):
        yield from examples
        found = True
    if not found:
        raise DataError(f"{source.path}: holds no examples; check {option}")


def _encoded(encode: Encode, texts: Texts, row: tuple[str, dict[str, Any]]) -> list[Row]:
    place, values = row
    given = {key: value for key, value in values.items() if value is not None}
    return list(encode(given, texts, place))


def shown(kind: str, texts: Texts, row: Row) -> dict[str, str]:
    """An example for people: what the model is given, and what it is to answer."""
    tokenizer = texts.encoder.tokenizer("the data")
    ids, labels = row["input_ids"].tolist(), row.get("labels", np.empty(0)).tolist()
    if kind == PAIR:
        answer = tokenizer.decode(labels)
    elif kind == SEQUENCE:
        answer = texts.classes.describe(labels)
    elif kind == TOKEN:
        told = zip(ids, labels, strict=True)
        words = [(tokenizer.decode([i]), texts.classes.describe([x])) for i, x in told if x >= 0]
        answer = ", ".join(f"{word.strip()}: {name}" for word, name in words)
    elif kind == QUESTION:
        first, last = (int(row[name][0]) for name in SPAN)
        answer = tokenizer.decode(ids[first : last + 1])
    else:
        answer = "some of its tokens, others in every step"
    return {"prompt": tokenizer.decode(ids), "answer": answer}


def _whole(blocks: Iterator[str]) -> Iterator[str]:
    """Without a last one of a few words."""
    before = ""
    for block in blocks:
        if before and len(block) > SHORT:
            yield before
            before = ""
        before += block
    if before:
        yield before


text_to_text = Supervised("text-to-text", {PAIR: encode_pair}, PERPLEXITY=True)
classification = Supervised("classification", {SEQUENCE: encode_class, TOKEN: encode_tags})
question_answering = Supervised("question-answering", {QUESTION: encode_question})
masked = Supervised("masked", {MASKED: encode_text}, PERPLEXITY=True, lora=False)
