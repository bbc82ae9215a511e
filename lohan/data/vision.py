"""Conversations with images as tokens and labels, and batches of them with pixels.

    images: [files], messages: [...]       content as text with <image>, or as parts
    image: file, conversations: [...]      turns of `from` and `value`

What a model is given is made by the processor of its folder. The texts are kept, pixels are not:
images are read again for every batch, and must be what they were when the run began.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lohan.data.dataset import IGNORE, Batch, Example, Row, padded
from lohan.data.images import open_image
from lohan.data.reading import mapped, processes_for
from lohan.data.text import Encoder, chat_template, kind_of, share_gpt
from lohan.errors import DataError, ModelError, first_line
from lohan.util.files import load_json, usable_path

SIDE = 448  # pixels of an image where there is no data
MARK = "<image>"  # where an image stands in a text
ROWS = "rows"  # of a batch: what it was made by, and of which examples


def load_processor(folder: Path) -> Any:
    """The processor of a model folder; nothing is fetched from a network. Without torchvision some
    have none for videos, which are not read here."""
    import transformers

    auto: Any = transformers.AutoProcessor
    try:
        return auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        try:
            return _images_only(folder)
        except Exception:  # the first says more
            raise ModelError(
                f"{folder}: its processor cannot be loaded: {first_line(error)}; copy the original "
                "model's processor and tokenizer files into it, or install torchvision"
            ) from None


def _images_only(folder: Path) -> Any:
    import transformers
    from transformers import AutoConfig, AutoTokenizer
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    here: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    named = load_json(folder / "preprocessor_config.json").get("processor_class")
    model_type = AutoConfig.from_pretrained(folder, **here).model_type
    kind: Any = getattr(transformers, named or PROCESSOR_MAPPING_NAMES[model_type])
    auto: Any = transformers.AutoImageProcessor
    images = auto.from_pretrained(folder, **here)
    tokenizer = AutoTokenizer.from_pretrained(folder, **here)
    given, _ = kind.get_processor_dict(str(folder), local_files_only=True)
    takes = inspect.signature(kind.__init__).parameters
    own = {name: value for name, value in given.items() if name in takes}

    class ImagesOnly(kind):  # type: ignore[misc]
        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            if name != "video_processor":
                return super().check_argument_for_proper_class(name, argument)
            return None

    parts = {"image_processor": images, "tokenizer": tokenizer, "video_processor": None}
    return ImagesOnly(**{**own, **parts})


def load_image_processor(folder: Path) -> Any:
    """That of a model folder; nothing is fetched from a network."""
    import transformers

    auto: Any = transformers.AutoImageProcessor
    try:
        return auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelError(
            f"{folder}: its image processor cannot be loaded: {first_line(error)}; copy the "
            "original model's preprocessor_config.json into it"
        ) from None


@dataclass
class ImageFiles:
    """Images by number, each read when it is needed, and refused if it has changed."""

    files: list[tuple[str, str]] = field(default_factory=list)  # path and digest
    _known: dict[str, int] = field(default_factory=dict)

    def number_of(self, path: Path, place: str) -> int:
        name = str(path)
        if name not in self._known:
            if not usable_path(name) or not path.is_file():
                raise DataError(
                    f"{place}: no image {name[:200]}; names are relative to the data file"
                )
            open_image(path)
            self._known[name] = len(self.files)
            self.files.append((name, hashlib.sha256(path.read_bytes()).hexdigest()))
        return self._known[name]

    def take(self, name: str, digest: str) -> int:
        """Of one that was found by another process."""
        if name not in self._known:
            self._known[name] = len(self.files)
            self.files.append((name, digest))
        return self._known[name]

    def opened(self, number: int) -> Any:
        name, digest = self.files[number]
        path = Path(name)
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise DataError(f"{path}: is gone, or not what it was when the run began; put it back")
        return open_image(path)


@dataclass
class Conversations:
    """A processor, the images that were met, and what became of the examples."""

    processor: Any
    folder: Path  # of the model
    seq: int
    template: str | None = None
    images: ImageFiles = field(default_factory=ImageFiles)
    cut: int = 0
    dropped: int = 0
    _encoder: Encoder | None = None

    @property
    def encoder(self) -> Encoder:
        if self._encoder is None:
            own = self.processor.tokenizer
            if self.template is not None:
                own.chat_template = chat_template(self.template)
            elif self.processor.chat_template:
                own.chat_template = self.processor.chat_template
            self._encoder = Encoder(self.folder, tokenizer=own)
        return self._encoder

    # -- in other processes, where the processor is loaded again ----------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "processor": None, "_encoder": None, "images": ImageFiles()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.processor = load_processor(self.folder)

    def counts(self) -> tuple[int, ...]:
        return (self.cut, self.dropped)

    def count(self, more: Sequence[int]) -> None:
        self.cut, self.dropped = self.cut + more[0], self.dropped + more[1]

    # -- a row of a file --------------------------------------------------------------------------

    def shown(self, row: Row) -> dict[str, str]:
        """An example for people: the conversation up to the first answer, and from there on."""
        text, labels = _text(row), row["labels"]
        first = int(np.argmax(labels != IGNORE))
        decode = self.encoder.tokenizer(str(self.folder)).decode
        answer = decode(row["input_ids"][first:].tolist())
        at = text.rfind(answer) if answer else -1
        told = self.encoder.show([], [])
        names = [Path(self.images.files[number][0]).name for number in row["images"]]
        return {
            "template": self.template or told["template"], "system": self.encoder.system_of(text),
            "images": ", ".join(names) or "none",
            "prompt": text[:at] if at >= 0 else text, "answer": text[at:] if at >= 0 else answer,
        }  # fmt: skip

    def encode(self, row: dict[str, Any], source: Path, place: str) -> Row | None:
        """None if nothing is left to learn from."""
        messages, images = self._conversation(row, source, place)
        plain, labels = self.encoder.chat(messages, place=place)
        text = self.encoder.rendered(messages, place=place)
        numbers = [self.images.number_of(path, place) for path in images]
        ids = self.tokens([text], [numbers])["input_ids"][0].numpy()
        spread, shortened = _spread((plain, labels), ids, place)[: self.seq], ids[: self.seq]
        self.cut += len(ids) > self.seq
        if not (spread[1:] != IGNORE).any() or not _has_all_images(ids, shortened, plain):
            self.dropped += 1
            return None
        return {
            "input_ids": shortened, "labels": spread, "images": np.asarray(numbers, np.int64),
            "text": np.frombuffer(text.encode(), np.uint8).astype(np.int64),
        }  # fmt: skip

    def _conversation(
        self, row: dict[str, Any], source: Path, place: str
    ) -> tuple[list[dict[str, Any]], list[Path]]:
        turns = row.get("messages")
        if turns is None and "conversations" in row:
            turns = share_gpt(row["conversations"], place=place)
        if not isinstance(turns, list) or not turns:
            found = ", ".join(row) or "none"
            raise DataError(
                f"{place}: no conversation (keys found: {found}); give messages and images, or "
                "conversations and image"
            )
        given = row.get("images", row.get("image", []))
        names = list(given) if isinstance(given, list) else [given]
        messages = [_message(turn, names, f"{place}: message {n}") for n, turn in enumerate(turns)]
        if any(not isinstance(name, str) for name in names):
            wrong = next(name for name in names if not isinstance(name, str))
            raise DataError(f"{place}: an image is {kind_of(wrong)}; give the name of its file")
        marks = sum(part["type"] == "image" for message in messages for part in message["content"])
        if not marks and names:  # at the beginning, as most models have it
            first = next((m for m in messages if m["role"] == "user"), messages[0])
            first["content"] = [*({"type": "image"} for _ in names), *first["content"]]
        elif marks != len(names):
            raise DataError(
                f"{place}: {marks} places for images ({MARK}) and {len(names)} images; give one "
                "for each"
            )
        return messages, [source.parent / name for name in names]

    # -- a batch ----------------------------------------------------------------------------------

    def tokens(self, texts: list[str], images: list[list[int]]) -> Any:
        """What the processor makes of some conversations."""
        found = [[self.images.opened(number) for number in numbers] for numbers in images]
        given = {"images": [one for one in found if one]} if any(found) else {}
        try:
            return self.processor(
                text=texts, **given, padding=True, padding_side="right", add_special_tokens=False,
                return_tensors="pt",
            )  # fmt: skip
        except Exception as error:  # they raise what they like: StopIteration, for an odd mark
            raise DataError(
                f"the processor of {self.folder} refuses a conversation: {first_line(error)}; "
                f"it begins {texts[0][:80]!r}"
            ) from None

    def collate(self, rows: Sequence[Row]) -> Batch:
        texts = [_text(row) for row in rows]
        made = self.tokens(texts, [row["images"].tolist() for row in rows])
        width = max(len(row["input_ids"]) for row in rows)
        long, batch = made["input_ids"].shape, Batch()
        for name, tensor in made.items():
            batch[name] = tensor[:, :width] if tensor.shape == long else tensor
        labels = padded([row["labels"] for row in rows], value=IGNORE, most=width)
        return batch | {"labels": torch.from_numpy(labels), ROWS: (self, list(rows))}

    def example(self, rows: int) -> Batch:
        """Questions about a grey square, as long as they may be."""
        from PIL import Image

        asked = [{"type": "image"}, {"type": "text", "text": "?"}]
        messages = [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
        ]
        text = self.encoder.rendered(messages, place=str(self.folder))
        square = Image.new("RGB", (SIDE, SIDE), "grey")
        made = self.processor(
            text=[text] * rows, images=[[square]] * rows, add_special_tokens=False,
            padding="max_length", max_length=self.seq, padding_side="right", return_tensors="pt",
        )  # fmt: skip
        return Batch(made) | {"labels": made["input_ids"]}


def _message(turn: Any, names: list[Any], place: str) -> dict[str, Any]:
    """With its content in parts."""
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        raise DataError(f"{place} must be an object with role and content")
    content = turn.get("content")
    if isinstance(content, str):
        pieces = content.split(MARK) if names else [content]
        parts: list[dict[str, Any]] = []
        for number, piece in enumerate(pieces):
            parts += [{"type": "image"}] * (number > 0)
            parts += [{"type": "text", "text": piece}] * bool(piece)
    elif isinstance(content, list) and all(isinstance(part, dict) for part in content):
        parts = [_part(part, names, place) for part in content]
    else:
        raise DataError(f"{place}: content must be text or a list of parts")
    if turn["role"] == "assistant" and any(part["type"] == "image" for part in parts):
        raise DataError(f"{place}: an image in an answer; models here answer in text, remove it")
    return {"role": turn["role"], "content": parts}


def _part(part: dict[str, Any], names: list[Any], place: str) -> dict[str, Any]:
    if part.get("type") == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if part.get("type") == "image":
        own = next((part[key] for key in ("image", "path", "url") if part.get(key)), None)
        if own is not None:
            names.append(own)
        return {"type": "image"}
    raise DataError(f"{place}: a part of type {part.get('type')!r}; known are text and image")


def _spread(plain: Example, ids: np.ndarray, place: str) -> np.ndarray:
    """Labels for the tokens of the processor, which has put many in the place of each image."""
    made = np.full(len(ids), IGNORE, dtype=np.int64)
    at = 0
    for token, label in zip(*plain, strict=True):
        while at < len(ids) and ids[at] != token:
            at += 1
        if at == len(ids):
            raise DataError(
                f"{place}: the processor's tokens are not those of the conversation; give a chat "
                "template whose turns end with a special token"
            )
        made[at] = label
        at += 1
    return made


def _has_all_images(ids: np.ndarray, shortened: np.ndarray, plain: list[int]) -> bool:
    """Whether all tokens that stand for images are among the shortened ones: such as come more
    often than in the text."""
    tokens, counts = np.unique(ids, return_counts=True)
    if len(shortened) == len(ids):
        return True
    usual = {int(t): plain.count(int(t)) for t in tokens}
    images = [t for t, n in zip(tokens.tolist(), counts.tolist(), strict=True) if n > usual[t]]
    return bool(np.isin(ids, images).sum() == np.isin(shortened, images).sum())


def _text(row: Row) -> str:
    return bytes(row["text"].astype(np.uint8)).decode()


LEAST = 2**20  # bytes of a file from which on processes are worth their start: images take time


def rows_with_images(
    rows: Iterator[tuple[str, dict[str, Any]]], source: Path, made: Conversations
) -> Iterator[Row]:
    """As they are read, of large files by several processes."""
    work = partial(_encoded, source)
    for example, files in mapped(work, rows, made, processes_for(source, least=LEAST)):
        numbers = [made.images.take(*file) for file in files]
        if example is not None:
            yield {**example, "images": np.asarray(numbers, np.int64)}


def _encoded(
    source: Path, made: Conversations, row: tuple[str, dict[str, Any]]
) -> tuple[Row | None, list[tuple[str, str]]]:
    """An example, if it is one, and the images that it has, which are numbered elsewhere."""
    place, values = row
    given = {key: value for key, value in values.items() if value is not None}
    example = made.encode(given, source, place)
    numbers = [] if example is None else example["images"].tolist()
    return example, [made.images.files[number] for number in numbers]
