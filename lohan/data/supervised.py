"""Rows of a file as inputs and answers: text to text, a class for a text, a class for each word.

input, target                   text to text; or prompt+completion and others of PAIRS
text, label                     a class by its number or name; two texts as sentence1+sentence2
tokens, tags                    words and the class of each
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lohan.data.dataset import IGNORE
from lohan.data.fields import Row
from lohan.data.text import Encoder, kind_of
from lohan.errors import DataError

PAIRS = (
    ("input", "target"), ("source", "target"), ("prompt", "completion"), ("instruction", "output"),
    ("question", "answer"), ("text", "summary"), ("document", "summary"), ("article", "highlights"),
)  # fmt: skip
TEXTS = (
    ("text",), ("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"),
    ("question", "sentence"), ("sentence",),
)  # fmt: skip
LABELS = ("label", "labels")
TAGS = ("tags", "ner_tags", "pos_tags", "labels")


@dataclass
class Texts:
    """The tokenizer of a model, and what its tokens and classes may be. `limit` is the longest
    sequence that it takes; longer ones are cut, and counted."""

    encoder: Encoder
    limit: int
    vocab_size: int | None = None
    classes: Mapping[str, int] = field(default_factory=dict)  # by name
    count: int = 0  # of classes; 1 if a number is to be predicted
    several: bool = False  # whether an example may be of several classes
    cut: int = 0

    def encoded(self, place: str, *texts: Any, **how: Any) -> Any:
        """As the tokenizer has it, with its special tokens."""
        tokenizer = self.encoder.tokenizer(place)
        made = tokenizer(*texts, verbose=False, **how)
        if len(made["input_ids"]) > self.limit:
            self.cut += 1
            made = tokenizer(*texts, verbose=False, truncation=True, max_length=self.limit, **how)
        self._check(made["input_ids"], place)
        return made

    def _check(self, ids: list[int], place: str) -> None:
        wrong = [token for token in ids if not 0 <= token < (self.vocab_size or 2**31)]
        if wrong:
            raise DataError(
                f"{place}: token {wrong[0]} is outside the model's vocabulary of "
                f"{self.vocab_size}; use the tokenizer that belongs to the model"
            )

    def class_of(self, value: Any, place: str) -> int:
        known = self.classes.get(value) if isinstance(value, str) else value
        if known is None and isinstance(value, str) and value.isdecimal():
            known = int(value)  # of a table of text
        if isinstance(known, bool):
            known = int(known)
        if not isinstance(known, int) or not 0 <= known < self.count:
            names = ", ".join(list(self.classes)[:8])
            raise DataError(
                f"{place}: class {value!r} is none of the model's {self.count} (by number from 0, "
                f"or {names}); correct it, or set id2label in config.json"
            )
        return known


Encode = Callable[[dict[str, Any], Texts, str], Row]


def _array(values: list[int]) -> np.ndarray:
    return np.asarray(values, dtype=np.int64)


def _tokens(made: Any) -> dict[str, np.ndarray]:
    """All that the tokenizer says of each token; masks are made of lengths."""
    return {n: _array(v) for n, v in made.items() if n in ("input_ids", "token_type_ids")}


def _texts(row: dict[str, Any], keys: tuple[str, ...], place: str) -> list[str]:
    for key in keys:
        if not isinstance(row[key], str):
            raise DataError(f"{place}: {key} must be text, got {kind_of(row[key])}")
    return [row[key] for key in keys]


def _keys(row: dict[str, Any], known: tuple[Any, ...], place: str, what: str) -> Any:
    """The first of `known` that the row has: a key, or several."""
    for keys in known:
        if all(key in row for key in ((keys,) if isinstance(keys, str) else keys)):
            return keys
    found = ", ".join(row) or "none"
    names = "; ".join(keys if isinstance(keys, str) else "+".join(keys) for keys in known)
    raise DataError(f"{place}: no {what} (keys found: {found}); known are {names}")


def encode_pair(row: dict[str, Any], texts: Texts, place: str) -> Row:
    keys = _keys(row, PAIRS, place, "input and target")
    source, target = _texts(row, keys, place)
    if keys == ("instruction", "output") and isinstance(row.get("input"), str) and row["input"]:
        source = f"{source}\n\n{row['input']}"
    ids = texts.encoded(place, source)["input_ids"]
    labels = texts.encoded(place, text_target=target)["input_ids"]
    if not ids or not labels:
        raise DataError(f"{place}: {keys[0 if labels else 1]} has no token; write a longer one")
    return {"input_ids": _array(ids), "labels": _array(labels)}


def encode_class(row: dict[str, Any], texts: Texts, place: str) -> Row:
    made = texts.encoded(place, *_texts(row, _keys(row, TEXTS, place, "text"), place))
    if not made["input_ids"]:
        raise DataError(f"{place}: the text has no token; write a longer one")
    return {**_tokens(made), "labels": label_of(row, texts, place)}


def label_of(row: dict[str, Any], texts: Texts, place: str) -> np.ndarray:
    """A class, several as ones among zeros, or a number."""
    value = row[_keys(row, LABELS, place, "label")]
    if texts.several:
        listed = value if isinstance(value, list) else [value]
        made = np.zeros(texts.count, dtype=np.float32)
        made[[texts.class_of(one, place) for one in listed]] = 1.0
        return made
    if texts.count > 1:
        return _array([texts.class_of(value, place)])
    try:
        return np.asarray([float(value)], dtype=np.float32)
    except (TypeError, ValueError):
        raise DataError(
            f"{place}: the label is {kind_of(value)}, the model predicts a number; correct it"
        ) from None


def encode_tags(row: dict[str, Any], texts: Texts, place: str) -> Row:
    """A word's class stands at its first token."""
    words, tags = row.get("tokens", row.get("words")), row[_keys(row, TAGS, place, "tags")]
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise DataError(f"{place}: tokens must be a list of words, got {kind_of(words)}")
    if not isinstance(tags, list) or len(tags) != len(words):
        count = len(tags) if isinstance(tags, list) else kind_of(tags)
        raise DataError(f"{place}: {len(words)} words and {count} tags; give one for each word")
    made = texts.encoded(place, words, is_split_into_words=True)
    try:
        places = made.word_ids()
    except ValueError:
        raise DataError(
            f"{texts.encoder.model_dir}: its tokenizer does not tell which word a token is of; "
            "give a model with a tokenizer.json"
        ) from None
    labels, before = [], None
    for word in places:
        first = word is not None and word != before
        known = first and tags[word] != IGNORE
        labels.append(texts.class_of(tags[word], place) if known else IGNORE)
        before = word
    if all(label == IGNORE for label in labels):
        raise DataError(f"{place}: no word has a class; correct or remove it")
    return {**_tokens(made), "labels": _array(labels)}


def texts_of(
    folder: Path, config: Any, *, seq: int, count: int = 0, several: bool = False
) -> Texts:
    """For a model of a folder, by its config."""
    text = config.get_text_config()
    encoder, limit = Encoder(folder), seq
    places = getattr(text, "max_position_embeddings", None)
    if places:  # the tokenizer knows how many of them hold tokens
        own = int(encoder.tokenizer("the data").model_max_length)
        limit = min(seq, int(places), own)
    known = {str(name): int(number) for number, name in (config.id2label or {}).items()}
    return Texts(encoder, limit, getattr(text, "vocab_size", None), known, count, several)
