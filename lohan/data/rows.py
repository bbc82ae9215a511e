"""One JSON object to tokens and labels: which keys it has decides how."""

from __future__ import annotations

from typing import Any

from lohan.data.dataset import Example
from lohan.data.text import Encoder
from lohan.errors import DataError
from lohan.util.units import counted

# What an example may be made of: the keys it needs, most specific first.
KINDS = {
    "input_ids": ("input_ids",),
    "messages": ("messages",),
    "prompt": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "question": ("question", "answer"),
    "text": ("text",),
}


def encode_row(row: dict[str, Any], *, encoder: Encoder, place: str) -> Example:
    """Tokens and labels of one object; the first of KINDS whose keys it has decides."""
    row = {key: value for key, value in row.items() if value is not None}
    kind = next((k for k, keys in KINDS.items() if all(key in row for key in keys)), None)
    if kind is None:
        found = ", ".join(row) or "none"
        known = "; ".join("+".join(keys) for keys in KINDS.values())
        raise DataError(f"{place}: no known keys (found: {found}); known are {known}")
    if kind == "input_ids":
        return _tokenized(row, place=place)
    if kind == "messages":
        return encoder.chat(_messages(row["messages"], place=place), place=place)
    if kind == "text":
        text = _text(row, "text", place=place)
        ids = encoder.bos(place=place) + encoder.ids(text, place=place) + encoder.eos()
        return ids, ids
    prompt, answer = (_text(row, key, place=place) for key in KINDS[kind])
    extra = _text(row, "input", place=place) if kind == "instruction" and "input" in row else ""
    if extra:
        prompt = f"{prompt}\n\n{extra}"
    return encoder.answer(prompt, answer, raw=kind == "prompt", place=place)


def _tokenized(row: dict[str, Any], *, place: str) -> Example:
    ids, labels = row["input_ids"], row.get("labels", row["input_ids"])
    for key, values in (("input_ids", ids), ("labels", labels)):
        if not isinstance(values, list) or any(type(value) is not int for value in values):
            raise DataError(f"{place}: {key} must be a list of whole numbers")
        if any(not -(2**31) <= value < 2**31 for value in values):
            raise DataError(f"{place}: {key} has a number beyond 32 bits; these are not tokens")
    if len(ids) != len(labels):
        raise DataError(
            f"{place}: {len(ids)} input_ids but {counted(len(labels), 'label')}; "
            "give one label per token, -100 where no loss is wanted"
        )
    return ids, labels


def _text(row: dict[str, Any], key: str, *, place: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise DataError(f"{place}: {key} must be text, got {kind_of(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise DataError(
                f"{place}: {key} holds half of a \\ud83d\\ude00-like pair; repair or remove it"
            ) from None
    return value


def _messages(value: Any, *, place: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{place}: messages must be a list of objects, got {kind_of(value)}")
    for number, message in enumerate(value, 1):
        where = f"{place}: message {number}"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{where} must be an object with role and content")
        if message.get("content") is None and "tool_calls" in message:
            continue
        _text({"content": message.get("content")}, "content", place=where)
    return value


def kind_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, list) and not value:
        return "an empty list"
    kinds = {str: "text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return kinds.get(type(value), f"a value of type {type(value).__name__}")  # tables have more
