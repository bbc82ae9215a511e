"""Converting rows of a file to inputs and answers for supervised tasks.

The keys of a row depend on the task:

input, target                 text to text; other pairs of keys are in PAIRS
text, label                   a class, by number or name; sentence1 and sentence2 for two texts
tokens, tags                  words, and the class of each word
question, context, answers    question answering: the answer is a part of the context
text                          masked language modelling; the masked words differ in every step
prompt, chosen, rejected      texts or messages; a missing prompt is the answers' common prefix
prompt, completion, label     texts or messages; label is true if the completion is desirable
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from lohan.data.dataset import (
    IGNORE,
    Dataset,
    Example,
    Mixture,
    Row,
    mixture_of,
    order,
    rows_of,
    split,
    steps_for,
)
from lohan.data.text import (
    Encoder,
    Prompt,
    check_characters,
    encode_answer,
    kind_of,
    prompt_of,
)
from lohan.errors import DataError

PAIRS = (
    ("input", "target"),
    ("source", "target"),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("question", "answer"),
    ("text", "summary"),
    ("document", "summary"),
    ("article", "highlights"),
)
TEXTS = (
    ("text",),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("sentence",),
)
LABELS = ("label", "labels")
TAGS = ("tags", "ner_tags", "pos_tags", "labels")
ASKED = ("question", "context")
ANSWERS = ("answers", "answer")
TOKENS = ("input_ids", "token_type_ids")
OVERLAP = 128  # number of tokens that consecutive windows of a long context share


@dataclass(frozen=True)
class Classes:
    """The classes that a model predicts."""

    numbers: Mapping[str, int]  # class name -> class number
    count: int  # number of classes; 1 if the model predicts a number (regression)
    several: bool  # whether an example may belong to several classes

    def number_of(self, value: Any, place: str) -> int:
        number = self.numbers.get(value) if isinstance(value, str) else value
        if number is None and isinstance(value, str) and value.isdecimal() and len(value) < 10:
            number = int(value)  # The values of a .csv file are text.
        if isinstance(number, bool):
            number = int(number)
        if not isinstance(number, int) or not 0 <= number < self.count:
            names = ", ".join(list(self.numbers)[:8])
            raise DataError(
                f"{place}: class {value!r:.80} is none of the model's {self.count} (by number from "
                f"0, or {names}); correct it, or set id2label in config.json"
            )
        return number

    def describe(self, labels: Sequence[float]) -> str:
        """Return the classes of an example as text, by name if they have one."""
        names = {number: name for name, number in self.numbers.items()}
        if self.several:
            return ", ".join(names.get(n, str(n)) for n, on in enumerate(labels) if on) or "none"
        if self.count == 1:
            return f"{labels[0]:g}"
        return names.get(int(labels[0]), str(int(labels[0])))


def classes_of(config: Any) -> Classes:
    """Return the classes of a model, given its config."""
    names = {str(name): int(number) for number, name in (config.id2label or {}).items()}
    several = getattr(config, "problem_type", None) == "multi_label_classification"
    return Classes(names, int(config.num_labels), several)


@dataclass
class Texts:
    """The tokenizer of a model, its maximum sequence length, its classes and its vocabulary size.

    `limit` is the longest sequence that the model accepts. Longer ones are truncated and counted.
    """

    encoder: Encoder
    limit: int
    classes: Classes
    vocab_size: int | None = None
    cut: int = 0

    def counts(self) -> tuple[int, ...]:
        return (self.cut,)

    def count(self, more: Sequence[int]) -> None:
        self.cut += more[0]

    def encoded(self, place: str, *texts: Any, **how: Any) -> Any:
        """Return the tokenizer's output for the texts, with special tokens."""
        for text in (*texts, *how.values()):
            for part in text if isinstance(text, list) else [text]:
                if isinstance(part, str):
                    check_characters(part, "a text", place=place)
        tokenizer = self.encoder.tokenizer(place)
        tokens = tokenizer(*texts, verbose=False, **how)
        if len(tokens["input_ids"]) > self.limit:
            self.cut += 1
            tokens = tokenizer(*texts, verbose=False, truncation=True, max_length=self.limit, **how)
        self._check(tokens["input_ids"], place)
        return tokens

    def _check(self, ids: list[int], place: str) -> None:
        wrong = [token for token in ids if not 0 <= token < (self.vocab_size or 2**31)]
        if wrong:
            raise DataError(
                f"{place}: token {wrong[0]} is outside the model's vocabulary of "
                f"{self.vocab_size}; use the tokenizer that belongs to the model"
            )

    def windows(self, place: str, *texts: str, overlap: int = 0, **how: Any) -> Any:
        """Return the texts as one or more sequences, each with special tokens.

        If there are two texts, the first is repeated in every sequence and the second is divided.
        """
        for text in texts:
            check_characters(text, "a text", place=place)
        tokenizer = self.encoder.tokenizer(place)
        if not tokenizer.is_fast:
            raise DataError(
                f"{self.encoder.model_dir}: its tokenizer does not report the positions of "
                "tokens in the text; give a model with a tokenizer.json"
            )
        tokens = tokenizer(
            *texts,
            verbose=False,
            truncation="only_second" if len(texts) == 2 else True,
            max_length=self.limit,
            stride=overlap,
            return_overflowing_tokens=True,
            **how,
        )
        for ids in tokens["input_ids"]:
            self._check(ids, place)
        return tokens


Encode = Callable[[dict[str, Any], Texts, str], Iterable[Row]]


def _array(values: list[int]) -> np.ndarray:
    return np.asarray(values, dtype=np.int64)


def _tokens(encoded: Any) -> dict[str, np.ndarray]:
    """Return the outputs of a tokenizer that are named in TOKENS, as arrays.

    Attention masks are not stored, because they are derived from lengths when a batch is made.
    """
    return {name: _array(values) for name, values in encoded.items() if name in TOKENS}


def _texts(row: dict[str, Any], keys: tuple[str, ...], place: str) -> list[str]:
    for key in keys:
        if not isinstance(row[key], str):
            raise DataError(f"{place}: {key} must be text, got {kind_of(row[key])}")
    return [row[key] for key in keys]


def _keys(row: dict[str, Any], alternatives: tuple[Any, ...], place: str, what: str) -> Any:
    """Return the first of `alternatives` whose keys the row has.

    Each alternative is a key or a tuple of keys. `what` is the kind of example in the message of
    the error if the row has none of them.
    """
    for keys in alternatives:
        if all(key in row for key in ((keys,) if isinstance(keys, str) else keys)):
            return keys
    present = ", ".join(row) or "none"
    names = "; ".join(keys if isinstance(keys, str) else "+".join(keys) for keys in alternatives)
    raise DataError(f"{place}: no {what} (keys found: {present}); known are {names}")


def encode_pair(row: dict[str, Any], texts: Texts, place: str) -> Iterable[Row]:
    keys = _keys(row, PAIRS, place, "input and target")
    source, target = _texts(row, keys, place)
    if keys == ("instruction", "output") and isinstance(row.get("input"), str) and row["input"]:
        source = f"{source}\n\n{row['input']}"
    ids = texts.encoded(place, source)["input_ids"]
    labels = texts.encoded(place, text_target=target)["input_ids"]
    if not ids or not labels:
        raise DataError(f"{place}: {keys[0 if labels else 1]} has no token; write a longer one")
    return [{"input_ids": _array(ids), "labels": _array(labels)}]


def encode_class(row: dict[str, Any], texts: Texts, place: str) -> Iterable[Row]:
    encoded = texts.encoded(place, *_texts(row, _keys(row, TEXTS, place, "text"), place))
    if not encoded["input_ids"]:
        raise DataError(f"{place}: the text has no token; write a longer one")
    return [{**_tokens(encoded), "labels": label_of(row, texts.classes, place)}]


def label_of(row: dict[str, Any], classes: Classes, place: str) -> np.ndarray:
    """Return a class number, a multi-hot vector of classes, or the number to predict."""
    value = row[_keys(row, LABELS, place, "label")]
    if classes.several:
        listed = value if isinstance(value, list) else [value]
        vector = np.zeros(classes.count, dtype=np.float32)
        vector[[classes.number_of(one, place) for one in listed]] = 1.0
        return vector
    if classes.count > 1:
        return _array([classes.number_of(value, place)])
    try:
        return np.asarray([float(value)], dtype=np.float32)
    except (TypeError, ValueError, OverflowError):
        raise DataError(
            f"{place}: the label is {kind_of(value)}, the model predicts a number; correct it"
        ) from None


def encode_tags(row: dict[str, Any], texts: Texts, place: str) -> Iterable[Row]:
    """Return an example with the class of each word as the label of the word's first token."""
    words, tags = row.get("tokens", row.get("words")), row[_keys(row, TAGS, place, "tags")]
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise DataError(f"{place}: tokens must be a list of words, got {kind_of(words)}")
    if not isinstance(tags, list) or len(tags) != len(words):
        count = len(tags) if isinstance(tags, list) else kind_of(tags)
        raise DataError(f"{place}: {len(words)} words and {count} tags; give one for each word")
    encoded = texts.encoded(place, words, is_split_into_words=True)
    try:
        places = encoded.word_ids()
    except ValueError:
        raise DataError(
            f"{texts.encoder.model_dir}: its tokenizer does not report which word a token belongs "
            "to; give a model with a tokenizer.json"
        ) from None
    labels, before = [], None
    for word in places:
        first = word is not None and word != before
        labelled = first and tags[word] != IGNORE
        labels.append(texts.classes.number_of(tags[word], place) if labelled else IGNORE)
        before = word
    if all(label == IGNORE for label in labels):
        raise DataError(f"{place}: no word has a class; correct or remove it")
    return [{**_tokens(encoded), "labels": _array(labels)}]


def encode_question(row: dict[str, Any], texts: Texts, place: str) -> Iterable[Row]:
    """Return one example per window of the context.

    If there is no answer, or a window does not contain all of it, the start and end positions
    are those of the CLS token (the first token if the tokenizer has none).
    """
    question, context = _texts(row, _keys(row, (ASKED,), place, "question"), place)
    begin, end = _answer(row, context, place)
    tokenizer = texts.encoder.tokenizer(place)
    question_length = len(texts.encoder.ids(question, place=place))
    room = texts.limit - question_length - tokenizer.num_special_tokens_to_add(pair=True)
    if room < 2 or not context:
        raise DataError(
            f"{place}: the question has {question_length} tokens, which leaves {max(0, room)} of "
            f"{texts.limit} for a context of {len(context)} characters; raise --seq or shorten it"
        )
    windows = texts.windows(
        place, question, context, overlap=min(OVERLAP, room // 2), return_offsets_mapping=True
    )
    rows = []
    for number, ids in enumerate(windows["input_ids"]):
        sequences, spans = windows.sequence_ids(number), windows["offset_mapping"][number]
        inside = [at for at, part in enumerate(sequences) if part == 1]
        first, last = ids.index(tokenizer.cls_token_id) if tokenizer.cls_token_id in ids else 0, 0
        if begin < end and spans[inside[0]][0] <= begin and end <= spans[inside[-1]][1]:
            first = max(at for at in inside if spans[at][0] <= begin)
            last = min(at for at in inside if spans[at][1] >= end)
        tokens = {name: windows[name][number] for name in windows if name in TOKENS}
        rows.append(
            {
                **_tokens(tokens),
                "start_positions": _array([first]),
                "end_positions": _array([max(first, last)]),
            }
        )
    return rows


def _answer(row: dict[str, Any], context: str, place: str) -> tuple[int, int]:
    """Return the begin and end of the answer in the context; they are equal if there is none."""
    answer: Any = row[_keys(row, ANSWERS, place, "answer")]
    starts = row.get("answer_start")
    if isinstance(answer, dict):  # the format of SQuAD
        answer, starts = answer.get("text"), answer.get("answer_start")
    answer = answer[0] if isinstance(answer, list) and answer else answer
    starts = starts[0] if isinstance(starts, list) and starts else starts
    if answer in ("", []):
        return 0, 0
    if not isinstance(answer, str):
        raise DataError(f"{place}: the answer must be text, got {kind_of(answer)}")
    begin = starts if isinstance(starts, int) else context.find(answer)
    if begin < 0 or context[begin : begin + len(answer)] != answer:
        actual = context[begin : begin + len(answer)] if begin >= 0 else "nothing"
        raise DataError(
            f"{place}: the answer {answer[:60]!r} is not in the context (at {begin} is "
            f"{actual[:60]!r}); correct answer_start"
        )
    return begin, begin + len(answer)


# -- Masked words ----------------------------------------------------------------------------------


# CHOSEN is a fraction of all tokens; MASKED and CHANGED are fractions of the chosen ones.
CHOSEN, MASKED, CHANGED = 0.15, 0.8, 0.1


def encode_text(row: dict[str, Any], texts: Texts, place: str) -> Iterable[Row]:
    """Return the tokens of a text, divided into windows if it is too long for one."""
    encoded = texts.windows(place, *_texts(row, _keys(row, TEXTS, place, "text")[:1], place))
    special = texts.encoder.tokenizer(place).all_special_ids
    windows = [
        {name: encoded[name][number] for name in encoded if name in TOKENS}
        for number, ids in enumerate(encoded["input_ids"])
        if set(ids) - set(special)
    ]
    if not windows:
        raise DataError(f"{place}: the text has no token; write a longer one")
    return [_tokens(window) for window in windows]


@dataclass(frozen=True)
class Masking:
    """The masking of an example, which chooses the tokens to predict and replaces most of them.

    A fraction of the tokens is chosen. Most of these are replaced by the mask token and some by a
    random token; the rest is kept. At least one token is chosen, so that there is a loss.
    """

    mask_id: int
    vocab_size: int
    special: tuple[int, ...]  # tokens that are never chosen

    def __call__(self, row: Row, bits: np.random.PCG64) -> Row:
        ids = row["input_ids"]
        raw = bits.random_raw(3 * len(ids)).reshape(3, -1)
        chance, how = raw[:2] / 2.0**64
        chance = np.where(np.isin(ids, self.special), 1.0, chance)
        chosen = chance < max(CHOSEN, float(np.nextafter(chance.min(), 1.0)))
        masked = chosen & (how < MASKED)
        changed = chosen & (how >= 1.0 - CHANGED)
        replaced_ids = np.where(changed, raw[2] % np.uint64(self.vocab_size), ids)
        replaced_ids = np.where(masked, self.mask_id, replaced_ids).astype(ids.dtype)
        return {**row, "input_ids": replaced_ids, "labels": np.where(chosen, ids, IGNORE)}


def masking_of(texts: Texts) -> Masking:
    tokenizer = texts.encoder.tokenizer("the data")
    if tokenizer.mask_token_id is None:
        raise DataError(
            f"{texts.encoder.model_dir}: its tokenizer has no mask token; set mask_token in "
            "tokenizer_config.json to the one that the model was trained with"
        )
    most = min(len(tokenizer), texts.vocab_size or len(tokenizer))
    return Masking(int(tokenizer.mask_token_id), most, tuple(sorted(tokenizer.all_special_ids)))


def texts_of(folder: Path, config: Any, *, seq: int) -> Texts:
    """Return the `Texts` of a model folder, given its config."""
    text = config.get_text_config()
    encoder, limit = Encoder(folder), seq
    places = getattr(text, "max_position_embeddings", None)
    if places:  # model_max_length says how many of the positions are usable for tokens.
        longest = int(encoder.tokenizer("the data").model_max_length)
        limit = min(seq, int(places), longest)
    return Texts(encoder, limit, classes_of(config), getattr(text, "vocab_size", None))


# -- Preferences: prompts with a chosen and a rejected answer, or with one rated completion --------


Unit = tuple[list[Example], bool | None]  # the examples of a row, and its rating or None


PROMPTS = ("prompt", "question", "instruction", "messages", "conversations")
RATINGS = {"true": True, "1": True, "false": False, "0": False}


def encode_preference(row: dict[str, Any], *, encoder: Encoder, place: str) -> Unit:
    """Return the examples of one row: a chosen and a rejected one, or a single rated one."""
    row = {key: value for key, value in row.items() if value is not None}
    key = next((key for key in PROMPTS if key in row), None)
    prompt = prompt_of(row, key, place=place) if key is not None else None

    def example(prompt: Prompt, answer: Prompt) -> Example:
        raw = key in ("prompt", None)
        return encode_answer(prompt, answer, row, raw=raw, encoder=encoder, place=place)

    if {"chosen", "rejected"} <= row.keys():
        both = _preferred(row, "chosen", place=place), _preferred(row, "rejected", place=place)
        prompt, answers = _split_prompt(prompt, *both, place=place)
        return [example(prompt, one) for one in answers], None
    if prompt is not None and {"completion", "label"} <= row.keys():
        rating = RATINGS.get(str(row["label"]).lower())
        if rating is None:
            raise DataError(f"{place}: label must be true or false, got {row['label']!r}")
        return [example(prompt, _preferred(row, "completion", place=place))], rating
    keys = ", ".join(row) or "none"
    raise DataError(
        f"{place}: no known keys (found: {keys}); preferences have prompt+chosen+rejected, "
        "chosen+rejected, or prompt+completion+label"
    )


def _preferred(row: dict[str, Any], key: str, *, place: str) -> Prompt:
    """Return an answer as text or messages; the row may hold one message or a list of them."""
    value = row[key]
    turns = [value] if isinstance(value, dict) else value
    if isinstance(turns, list) and turns:
        return prompt_of({"conversations": turns}, "conversations", place=place)
    if not isinstance(turns, str) or not turns:
        raise DataError(f"{place}: {key} must be text or messages that are not empty")
    return prompt_of(row, key, place=place)


def _split_prompt(
    prompt: Prompt | None, chosen: Prompt, rejected: Prompt, *, place: str
) -> tuple[Prompt, tuple[Prompt, Prompt]]:
    """Return the prompt, and the two answers without it.

    If no prompt is given, it is the common prefix of the answers. A given prompt is ignored if the
    answers are conversations that include the question.
    """
    if isinstance(chosen, str) and isinstance(rejected, str):
        if prompt is not None:
            return prompt, (chosen, rejected)
        shared = chosen.rfind(" ", 0, _shared(chosen, rejected)) + 1  # at a word border
        return chosen[:shared], (chosen[shared:], rejected[shared:])
    if isinstance(chosen, str) or isinstance(rejected, str):
        if prompt is None or _is_whole(chosen) or _is_whole(rejected):
            raise DataError(f"{place}: chosen and rejected must both be texts, or both messages")
        return prompt, (chosen, rejected)
    if prompt is not None and not _is_whole(chosen) and not _is_whole(rejected):
        return prompt, (chosen, rejected)
    shared = _shared(chosen, rejected)
    if shared == 0 or not chosen[shared:] or not rejected[shared:]:
        raise DataError(
            f"{place}: chosen and rejected share no question, or one of them has no answer of its "
            "own; give the question as prompt"
        )
    return chosen[:shared], (chosen[shared:], rejected[shared:])


def _is_whole(answer: Prompt) -> bool:
    """Return whether an answer is a list of messages that includes the question."""
    return not isinstance(answer, str) and answer[0]["role"] != "assistant"


def _shared(first: Prompt, second: Prompt) -> int:
    """Return the length of the common prefix of two answers, in characters or messages."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


@dataclass
class Preferences:
    """Rows of preferences; the batch of any step is a pure function of the step.

    For pairs, row i consists of examples 2i and 2i + 1, and a batch has all chosen answers before
    all rejected ones. For rated completions, the second half of a batch has each prompt with the
    completion of another row, from which the distance to the reference model is estimated. For each
    row, the other row is its predecessor in its batch of the first epoch.
    """

    sequences: Dataset
    members: np.ndarray  # numbers of the rows that are used
    batch_rows: int  # number of rows in a training batch
    objective: Any = None  # the preference loss with its settings; copied into each batch
    # Log-probabilities of the reference model, [rows, 2].
    reference: np.ndarray | None = field(default=None, repr=False)

    @property
    def rated(self) -> bool:
        return bool(self.sequences.ratings)

    def __len__(self) -> int:
        return len(self.members)

    @property
    def total(self) -> int:
        """The number of rows of the file, including those held out."""
        return self.sequences.summary.examples // (1 if self.rated else 2)

    def digest(self) -> str:
        """Return a digest of everything that determines the answers in the batches."""
        about = f"{self.sequences.fingerprint} {self.sequences.seed if self.rated else ''} "
        about += str(self.batch_rows if self.rated else "")
        return hashlib.sha256(about.encode() + self.members.tobytes()).hexdigest()[:16]

    @property
    def longest(self) -> int:
        """An upper bound on the number of tokens of a sequence in a batch."""
        if not self.rated:
            return self.sequences.longest
        prompts, answers = zip(*(self._parts(i) for i in range(len(self.sequences))), strict=True)
        length = max(map(len, prompts)) + max(map(len, answers))
        return min(self.sequences.seq, length)

    def batch(self, step: int, batch_size: int) -> dict[str, Any]:
        seed = self.sequences.seed
        if self.sequences.weights:
            return self.of_rows(self.members[self._mixture.rows_of(seed, step, batch_size)])
        return self.of_rows(self.members[rows_of(seed, step, batch_size, len(self))])

    def passes(self, batch_size: int) -> Iterator[dict[str, Any]]:
        for start in range(0, len(self), batch_size):
            yield self.of_rows(self.members[start : start + batch_size])

    def of_rows(self, rows: np.ndarray) -> dict[str, Any]:
        import torch

        if self.rated:
            first = [self.sequences.example(int(row)) for row in rows]
            second = [self._mismatched(int(row)) for row in rows]
        else:
            first = [self.sequences.example(2 * int(row)) for row in rows]
            second = [self.sequences.example(2 * int(row) + 1) for row in rows]
        batch = self.sequences.padded([*first, *second])
        batch |= {"objective": self.objective, "stats": {}}
        if self.reference is not None:
            batch["reference"] = torch.from_numpy(self.reference[rows].T.reshape(-1).copy())
        if self.rated:
            batch["desirable"] = torch.tensor([self.sequences.ratings[r] == "1" for r in rows])
        return batch

    @cached_property
    def _mixture(self) -> Mixture:
        first = self.members * (1 if self.rated else 2)
        return mixture_of(first, self.sequences.sources, self.sequences.weights)

    def _parts(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of the prompt and of the answer."""
        tokens, labels = self.sequences.example(row)
        first = int(np.argmax(labels != IGNORE))
        return tokens[:first], tokens[first:]

    def _mismatched(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        prompt, _ = self._parts(row)
        _, answer = self._parts(self._previous_rows[row])
        tokens = np.concatenate([prompt, answer])
        labels = np.concatenate([np.full(len(prompt), IGNORE, dtype=answer.dtype), answer])
        return tokens[: self.sequences.seq], labels[: self.sequences.seq]

    @cached_property
    def _previous_rows(self) -> dict[int, int]:
        """A map from each row to its predecessor in its batch; the first row maps to the last."""
        mixed = self.members[order(self.sequences.seed, 0, len(self))]
        batches = np.split(mixed, range(self.batch_rows, len(mixed), self.batch_rows))
        before = np.concatenate([np.roll(one, 1) for one in batches])
        return dict(zip(mixed.tolist(), before.tolist(), strict=True))

    def split(self, share: float) -> tuple[Self, Self]:
        parts = split(self.members, share, seed=self.sequences.seed)
        train, held = (replace(self, members=part) for part in parts)
        return train, held

    def steps_for(self, epochs: float, batch_size: int) -> int:
        return steps_for(len(self), epochs, batch_size)
