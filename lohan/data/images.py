"""Image data: folders of images or latents as arrays on disk, and conversations with images."""

from __future__ import annotations

import hashlib
import inspect
import io
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from lohan.data import dataset
from lohan.data.checksums import META, sealed, verify
from lohan.data.dataset import (
    IGNORE,
    REBUILD,
    Batch,
    Example,
    Row,
    all_or_nothing,
    create_part,
    padded,
)
from lohan.data.reading import mapped, processes_for
from lohan.data.text import Encoder, chat_template, kind_of, share_gpt
from lohan.errors import DataError, ModelError, first_line
from lohan.util.files import checked, load_json, usable_path
from lohan.util.units import counted

# -- Reading a folder of images or latents: one example per file, with companion arrays ------------
#
#     DATA/CLASS/a.png                      an image
#     DATA/CLASS/a.npy                      a latent, channels first
#     DATA/a.npy a.encoder_hidden_states.npy a.pooled_projections.npy
#     DATA/a.safetensors                    `latents`, companion arrays by name, `class_labels`
#
# If the file does not contain the class, the folder directly below DATA determines it. If the names
# of all such folders are numbers, the number is the class. Otherwise, the class is the folder's
# position in alphabetical order.


IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
LATENTS = (".npy", ".safetensors")
LATENT = "latents"
MOST_PIXELS = 64 * 10**6  # decoding takes about 12 bytes per pixel
CLASS = "class_labels"

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Sample:
    path: Path
    group: str  # name of the folder directly below the data folder, or ""

    @property
    def is_image(self) -> bool:
        return self.path.suffix.lower() in IMAGES


def find_samples(
    folder: Path, *, companions: Sequence[str], option: str = "--data"
) -> list[Sample]:
    """Return all examples in a folder, sorted by path.

    `companions` are the names of other arrays that an example may have.
    """
    if not folder.exists():
        raise DataError(f"{folder}: no such folder; check {option}")
    if not folder.is_dir():
        raise DataError(
            f"{folder}: not a folder; {option} takes a folder of images or of latents here"
        )
    suffixes = tuple(f".{name}.npy" for name in companions)
    samples = []
    for path in sorted(folder.rglob("*")):
        supported = path.suffix.lower() in (*IMAGES, *LATENTS)
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if supported and not hidden and path.is_file() and not path.name.endswith(suffixes):
            parts = path.relative_to(folder).parts
            samples.append(Sample(path, parts[0] if len(parts) > 1 else ""))
    if not samples:
        kinds = ", ".join((*IMAGES, *LATENTS))
        raise DataError(f"{folder}: no image and no latent in it ({kinds}); check {option}")
    images = [sample for sample in samples if sample.is_image]
    if images and len(images) < len(samples):
        raise DataError(
            f"{folder}: {counted(len(images), 'image')} and "
            f"{counted(len(samples) - len(images), 'latent')} are mixed; give a folder with one "
            "kind"
        )
    return samples


def class_numbers(samples: Sequence[Sample], *, most: int) -> dict[str, int]:
    """Return the class number of each folder of samples, by the name of the folder.

    Raise DataError if a number is not below `most`, the number of classes of the model.
    """
    names = sorted({sample.group for sample in samples if sample.group})
    if not names:
        return {}
    numbered = all(name.isdecimal() for name in names)
    numbers = {name: int(name) if numbered else place for place, name in enumerate(names)}
    worst = max(numbers, key=lambda name: numbers[name])
    if numbers[worst] >= most:
        raise DataError(
            f"{worst}: is class {numbers[worst]}, the model has {most} of them, from 0; rename or "
            "leave out folders"
        )
    return numbers


def read_samples(
    samples: Sequence[Sample],
    *,
    companions: Sequence[str],
    classes: dict[str, int] | None,
    of_image: Callable[[Path], np.ndarray],
    progress: OnProgress,
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Yield the location of every example, for use in messages, and its arrays by name."""
    progress(0, len(samples))
    for number, sample in enumerate(samples):
        arrays = _arrays(sample, companions, of_image)
        if classes is not None and CLASS not in arrays:
            if sample.group not in classes:
                raise DataError(
                    f"{sample.path}: is not in the folder of a class; put every example into a "
                    f"folder below --data, one for each class, or {CLASS} into a .safetensors file"
                )
            arrays[CLASS] = np.asarray(classes[sample.group], dtype=np.int64)
        missing = [name for name in companions if name not in arrays]
        if missing:
            raise DataError(
                f"{sample.path}: no {missing[0]} with it; write it to "
                f"{sample.path.stem}.{missing[0]}.npy next to it, or into a .safetensors file"
            )
        yield str(sample.path), arrays
        progress(number + 1, len(samples))


def _arrays(
    sample: Sample, companions: Sequence[str], of_image: Callable[[Path], np.ndarray]
) -> dict[str, np.ndarray]:
    path = sample.path
    if path.suffix.lower() == ".safetensors":
        arrays = _tensors(path)
        if LATENT not in arrays:
            raise DataError(
                f"{path}: no tensor {LATENT} among {', '.join(arrays) or 'none'}; give the latent "
                "that name"
            )
        return {
            name: array for name, array in arrays.items() if name in (LATENT, CLASS, *companions)
        }
    arrays = {LATENT: of_image(path) if sample.is_image else _array(path)}
    for name in companions:
        companion = path.with_name(f"{path.stem}.{name}.npy")
        if companion.is_file():
            arrays[name] = _array(companion)
    return arrays


def _array(path: Path) -> np.ndarray:
    try:
        array = read_npy(path)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: not an array of numpy ({first_line(error)}); write it again"
        ) from None
    return _checked(path, path.stem, array)


def read_npy(path: Path) -> np.ndarray:
    """Read a .npy file that contains exactly one array; pickles are refused.

    The size that the header announces is compared with the file's size before memory is allocated.
    Any other file raises ValueError.
    """
    from numpy.lib import format as npy

    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        version = npy.read_magic(file)
        if version not in _NPY_HEADERS:
            raise ValueError(f"version {version[0]}.{version[1]} of the format is not known")
        try:
            shape, fortran, dtype = _NPY_HEADERS[version](file)
        except ValueError:
            raise
        # A header is a Python literal, so reading it may raise many types of errors.
        except Exception as error:
            raise ValueError(f"the header is malformed: {type(error).__name__}") from None
        if dtype.hasobject or any(n < 0 for n in shape):
            raise ValueError("objects or negative sizes in it")
        available, announced = size - file.tell(), prod(shape) * dtype.itemsize
        if announced != available:
            raise ValueError(f"{announced:,} bytes announced, {available:,} there")
        flat = np.fromfile(file, dtype=dtype, count=prod(shape))
    return flat.reshape(shape, order="F" if fortran else "C")


_NPY_HEADERS: dict[tuple[int, int], Callable[..., Any]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def _tensors(path: Path) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise DataError(
            f"{path}: not a safetensors file ({first_line(error)}); write it again"
        ) from None
    wide = {  # Convert bfloat16, which numpy does not have.
        name: tensor.float() if "bfloat16" in str(tensor.dtype) else tensor
        for name, tensor in tensors.items()
    }
    return {name: _checked(path, name, tensor.numpy()) for name, tensor in wide.items()}


def _checked(path: Path, name: str, array: np.ndarray) -> np.ndarray:
    if array.dtype.kind not in "fiu" or not array.size:
        raise DataError(
            f"{path}: {name} has {array.size} values of {array.dtype.name}; numbers are needed, "
            "write it again"
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise DataError(f"{path}: {name} holds values that are not finite; write it again")
    return array


def square(path: Path, size: int) -> np.ndarray:
    """Return the central square of an image, resized to `size`, channels first, from -1 to 1."""
    image = open_image(path)
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    image = image.crop((left, top, left + side, top + side)).resize((size, size))
    pixels = np.asarray(image, dtype=np.float32) / 127.5 - 1.0
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def open_image(path: Path) -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise DataError(
            f"{path}: reading images needs Pillow, which is not installed; pip install pillow, or "
            "give latents as .npy"
        ) from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            # Decode from memory, so that a decoder cannot read more than the file contains.
            with Image.open(io.BytesIO(path.read_bytes())) as image:
                if image.width * image.height > MOST_PIXELS:
                    raise Image.DecompressionBombError
                return image.convert("RGB")
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise DataError(
            f"{path}: has more than {MOST_PIXELS:,} pixels; make it smaller or leave it out"
        ) from None
    except MemoryError:
        raise DataError(
            f"{path}: does not fit into memory; make it smaller or leave it out"
        ) from None
    # Decoders may raise any exception, such as SyntaxError or struct.error.
    except Exception as error:
        raise DataError(
            f"{path}: not readable as an image ({first_line(error)}); leave it out"
        ) from None


# -- Examples of named arrays of fixed shape on disk -----------------------------------------------
#
# The records of field NAME are concatenated in NAME.bin. meta.json describes type and shape. It is
# written last and marks a complete folder.


RECORDS_VERSION = 2

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Field:
    """The numpy type and the shape of every record of a field."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return np.dtype(self.dtype).itemsize * prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Records:
    """Examples in a seeded order; the examples of a step depend only on the step."""

    folder: Path
    seed: int
    count: int  # number of examples on disk
    fields: Mapping[str, Field]
    about: Mapping[str, Any] = field(default_factory=dict)  # additional entries
    members: np.ndarray | None = field(default=None, compare=False)  # selected examples; None: all

    def __len__(self) -> int:
        return self.count if self.members is None else len(self.members)

    def split(self, share: float) -> tuple[Records, Records]:
        """Return the examples to train on, and a held-out share of them chosen by the seed."""
        whole = np.arange(self.count) if self.members is None else self.members
        train, held = dataset.split(whole, share, seed=self.seed)
        return replace(self, members=train), replace(self, members=held)

    def of_step(self, step: int, batch_size: int) -> dict[str, np.ndarray]:
        """Return the examples of a step, stacked."""
        return self.stacked(dataset.rows_of(self.seed, step, batch_size, len(self)).tolist())

    def stacked(self, rows: Sequence[int]) -> dict[str, np.ndarray]:
        numbers = rows if self.members is None else [int(self.members[row]) for row in rows]
        return {
            name: np.stack([self._read(name, kind, number) for number in numbers])
            for name, kind in self.fields.items()
        }

    def _read(self, name: str, kind: Field, number: int) -> np.ndarray:
        """Read one record; the file is read instead of mapped, as in `Dataset.example`."""
        path = self.folder / f"{name}.bin"
        data = dataset.read_exactly(path, offset=number * kind.nbytes, nbytes=kind.nbytes)
        return np.frombuffer(data, dtype=kind.dtype).reshape(kind.shape)


def write_records(
    folder: Path, examples: Iterable[tuple[str, Arrays]], *, seed: int, about: Mapping[str, Any]
) -> Records:
    """Write examples to `folder` atomically, and return them as Records.

    Each item of `examples` is a pair: where the example is in the data, for messages, and its
    arrays.
    """
    part: dict[str, Path] = {}
    with all_or_nothing(folder, part, doing="preparing the data"):
        fields, count = _write(folder, examples, part)
        meta = {
            "version": RECORDS_VERSION,
            "count": count,
            "about": dict(about),
            "fields": {name: [kind.dtype, list(kind.shape)] for name, kind in fields.items()},
        }
        part[META] = folder / f"{META}.part"
        with create_part(part[META]) as file:
            file.write(sealed(meta, part))
    records = open_records(folder, seed=seed)
    if records is None:
        raise DataError(f"{folder}: does not hold what was just written there; {REBUILD}")
    return records


def _write(
    folder: Path, examples: Iterable[tuple[str, Arrays]], part: dict[str, Path]
) -> tuple[dict[str, Field], int]:
    fields: dict[str, Field] = {}
    first, count = "", 0
    with ExitStack() as stack:
        files: dict[str, BinaryIO] = {}
        for place, arrays in examples:
            plain_arrays = {name: plain(array) for name, array in arrays.items()}
            kinds = {name: Field(a.dtype.str, a.shape) for name, a in plain_arrays.items()}
            if not fields:
                fields, first = kinds, place
                for name in fields:
                    part[f"{name}.bin"] = folder / f"{name}.bin.part"
                    files[name] = stack.enter_context(create_part(part[f"{name}.bin"]))
            _check_alike(place, kinds, first, fields)
            for name, array in plain_arrays.items():
                files[name].write(array.tobytes())
            count += 1
    return fields, count


def plain(array: np.ndarray) -> np.ndarray:
    """Convert an array to little-endian half precision, single precision or 64-bit integers."""
    if array.dtype.kind == "f":
        return array.astype("<f2" if array.dtype.itemsize == 2 else "<f4")
    return array.astype("<i8")


def _check_alike(
    place: str, kinds: Mapping[str, Field], first: str, fields: Mapping[str, Field]
) -> None:
    if kinds.keys() != fields.keys():
        raise DataError(
            f"{place}: has {', '.join(kinds)}, {first} has {', '.join(fields)}; every example must "
            "have the same"
        )
    for name, kind in kinds.items():
        if kind != fields[name]:
            raise DataError(
                f"{place}: {name} is {_words(kind)}, that of {first} {_words(fields[name])}; all "
                "examples must be of one shape and type"
            )


def _words(kind: Field) -> str:
    size = " x ".join(map(str, kind.shape)) or "one"
    return f"{size} of {np.dtype(kind.dtype).name}"


def open_records(folder: Path, *, seed: int) -> Records | None:
    """Return the complete records in a folder, or None if there are none.

    Every file is compared with its checksum. The samples that the records were made from are not
    read.
    """
    try:
        meta = load_json(folder / META)
        if meta["version"] != RECORDS_VERSION:
            return None
        kinds = checked(meta["fields"], dict[str, tuple[str, tuple[int, ...]]], "fields")
        fields = {name: Field(dtype, shape) for name, (dtype, shape) in kinds.items()}
        records = Records(
            folder=folder,
            seed=seed,
            count=checked(meta["count"], int, "count"),
            fields=fields,
            about=checked(meta["about"], dict[str, Any], "about"),
        )
        sizes = {name: (folder / f"{name}.bin").stat().st_size for name in fields}
        whole = all(sizes[name] == records.count * kind.nbytes for name, kind in fields.items())
        if whole:
            verify(folder, meta)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return records if whole and records.count else None


# -- Conversations with images as tokens and labels, and batches of them with pixels ---------------
#
#     images: [files], messages: [...]       `content` is text with <image>, or a list of parts
#     image: file, conversations: [...]      turns with the keys `from` and `value`
#
# The processor in the model folder prepares the inputs of the model. Texts are stored, but pixels
# are not: images are read again for every batch and must not change during a run.


SIDE = 448  # side length in pixels of the image in `Conversations.example`
MARK = "<image>"  # placeholder of an image in a text
ROWS = "rows"  # key in a batch: the Conversations and the examples that it was made from


def load_processor(folder: Path) -> Any:
    """Load the processor of a model folder without network access.

    Without torchvision, the video part of some processors cannot be loaded. It is then left out,
    because LoHan does not read videos.
    """
    import transformers

    auto: Any = transformers.AutoProcessor
    try:
        return auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        try:
            return _images_only(folder)
        except Exception:  # The first error is more informative.
            raise ModelError(
                f"{folder}: its processor cannot be loaded: {first_line(error)}; copy the original "
                "model's processor and tokenizer files into it, or install torchvision"
            ) from None


def _images_only(folder: Path) -> Any:
    import transformers
    from transformers import AutoConfig, AutoTokenizer
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    load_options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    named = load_json(folder / "preprocessor_config.json").get("processor_class")
    model_type = AutoConfig.from_pretrained(folder, **load_options).model_type
    kind: Any = getattr(transformers, named or PROCESSOR_MAPPING_NAMES[model_type])
    auto: Any = transformers.AutoImageProcessor
    images = auto.from_pretrained(folder, **load_options)
    tokenizer = AutoTokenizer.from_pretrained(folder, **load_options)
    settings, _ = kind.get_processor_dict(str(folder), local_files_only=True)
    takes = inspect.signature(kind.__init__).parameters
    accepted = {name: value for name, value in settings.items() if name in takes}

    class ImagesOnly(kind):  # type: ignore[misc]
        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            if name != "video_processor":
                return super().check_argument_for_proper_class(name, argument)
            return None

    parts = {"image_processor": images, "tokenizer": tokenizer, "video_processor": None}
    return ImagesOnly(**{**accepted, **parts})


def load_image_processor(folder: Path) -> Any:
    """Load the image processor of a model folder without network access."""
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
    """Images by number; each is read when it is needed, and refused if it has changed."""

    files: list[tuple[str, str]] = field(default_factory=list)  # path and digest
    _numbers: dict[str, int] = field(default_factory=dict)

    def number_of(self, path: Path, place: str) -> int:
        name = str(path)
        if name not in self._numbers:
            if not usable_path(name) or not path.is_file():
                raise DataError(
                    f"{place}: no image {name[:200]}; names are relative to the data file"
                )
            open_image(path)
            self._numbers[name] = len(self.files)
            self.files.append((name, hashlib.sha256(path.read_bytes()).hexdigest()))
        return self._numbers[name]

    def take(self, name: str, digest: str) -> int:
        """Add the image of this path, which another process has checked, and return its number."""
        if name not in self._numbers:
            self._numbers[name] = len(self.files)
            self.files.append((name, digest))
        return self._numbers[name]

    def restore(self, about: Mapping[str, Any]) -> None:
        """Restore the list of images that was stored with the data."""
        recorded = checked(about["files"], list[tuple[str, str]], "files")
        self.files = [(name, digest) for name, digest in recorded]

    def opened(self, number: int) -> Any:
        name, digest = self.files[number]
        path = Path(name)
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise DataError(f"{path}: is missing or has changed since the run began; put it back")
        return open_image(path)


@dataclass
class Conversations:
    """A converter of conversations with images to examples and batches.

    It contains the processor, the images found so far, and counts of cut and dropped examples.
    """

    processor: Any
    folder: Path  # the model folder
    seq: int
    template: str | None = None
    images: ImageFiles = field(default_factory=ImageFiles)
    cut: int = 0
    dropped: int = 0
    _encoder: Encoder | None = None

    @property
    def encoder(self) -> Encoder:
        if self._encoder is None:
            tokenizer = self.processor.tokenizer
            if self.template is not None:
                tokenizer.chat_template = chat_template(self.template)
            elif self.processor.chat_template:
                tokenizer.chat_template = self.processor.chat_template
            self._encoder = Encoder(self.folder, tokenizer=tokenizer)
        return self._encoder

    # -- Copies in other processes, which load the processor themselves ---------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "processor": None, "_encoder": None, "images": ImageFiles()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.processor = load_processor(self.folder)

    def counts(self) -> tuple[int, ...]:
        return (self.cut, self.dropped)

    def count(self, more: Sequence[int]) -> None:
        self.cut, self.dropped = self.cut + more[0], self.dropped + more[1]

    # -- Encoding a row of a file -----------------------------------------------------------------

    def shown(self, row: Row) -> dict[str, str]:
        """Return an example as text, divided at the first answer."""
        text, labels = _text(row), row["labels"]
        first = int(np.argmax(labels != IGNORE))
        decode = self.encoder.tokenizer(str(self.folder)).decode
        answer = decode(row["input_ids"][first:].tolist())
        at = text.rfind(answer) if answer else -1
        rendered = self.encoder.show([], [])
        names = [Path(self.images.files[number][0]).name for number in row["images"]]
        return {
            "template": self.template or rendered["template"],
            "system": self.encoder.system_of(text),
            "images": ", ".join(names) or "none",
            "prompt": text[:at] if at >= 0 else text,
            "answer": text[at:] if at >= 0 else answer,
        }

    def encode(self, row: dict[str, Any], source: Path, place: str) -> Row | None:
        """Return the example of a row, or None if it is dropped.

        A row is dropped if, after it is cut to `seq` tokens, it has no labels or lacks images.
        """
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
            "input_ids": shortened,
            "labels": spread,
            "images": np.asarray(numbers, np.int64),
            "text": np.frombuffer(text.encode(), np.uint8).astype(np.int64),
        }

    def _conversation(
        self, row: dict[str, Any], source: Path, place: str
    ) -> tuple[list[dict[str, Any]], list[Path]]:
        turns = row.get("messages")
        if turns is None and "conversations" in row:
            turns = share_gpt(row["conversations"], place=place)
        if not isinstance(turns, list) or not turns:
            keys = ", ".join(row) or "none"
            raise DataError(
                f"{place}: no conversation (keys found: {keys}); give messages and images, or "
                "conversations and image"
            )
        images = row.get("images", row.get("image", []))
        names = list(images) if isinstance(images, list) else [images]
        messages = [_message(turn, names, f"{place}: message {n}") for n, turn in enumerate(turns)]
        if any(not isinstance(name, str) for name in names):
            wrong = next(name for name in names if not isinstance(name, str))
            raise DataError(f"{place}: an image is {kind_of(wrong)}; give the name of its file")
        marks = sum(part["type"] == "image" for message in messages for part in message["content"])
        if not marks and names:  # Put images first, as most models do.
            first = next((m for m in messages if m["role"] == "user"), messages[0])
            first["content"] = [*({"type": "image"} for _ in names), *first["content"]]
        elif marks != len(names):
            raise DataError(
                f"{place}: {marks} places for images ({MARK}) and {len(names)} images; give one "
                "for each"
            )
        return messages, [source.parent / name for name in names]

    # -- Batches ----------------------------------------------------------------------------------

    def tokens(self, texts: list[str], images: list[list[int]]) -> Any:
        """Return the processor's output for some conversations."""
        opened = [[self.images.opened(number) for number in numbers] for numbers in images]
        image_inputs = {"images": [one for one in opened if one]} if any(opened) else {}
        try:
            return self.processor(
                text=texts,
                **image_inputs,
                padding=True,
                padding_side="right",
                add_special_tokens=False,
                return_tensors="pt",
            )
        except Exception as error:  # Processors may raise anything, even StopIteration.
            raise DataError(
                f"the processor of {self.folder} refuses a conversation: {first_line(error)}; "
                f"it begins {texts[0][:80]!r}"
            ) from None

    def collate(self, rows: Sequence[Row]) -> Batch:
        texts = [_text(row) for row in rows]
        encoded = self.tokens(texts, [row["images"].tolist() for row in rows])
        width = max(len(row["input_ids"]) for row in rows)
        long, batch = encoded["input_ids"].shape, Batch()
        for name, tensor in encoded.items():
            batch[name] = tensor[:, :width] if tensor.shape == long else tensor
        labels = padded([row["labels"] for row in rows], value=IGNORE, most=width)
        return batch | {"labels": torch.from_numpy(labels), ROWS: (self, list(rows))}

    def example(self, rows: int) -> Batch:
        """Return a batch of questions about a grey square, padded to the maximum length."""
        from PIL import Image

        question = [{"type": "image"}, {"type": "text", "text": "?"}]
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
        ]
        text = self.encoder.rendered(messages, place=str(self.folder))
        square = Image.new("RGB", (SIDE, SIDE), "grey")
        encoded = self.processor(
            text=[text] * rows,
            images=[[square]] * rows,
            add_special_tokens=False,
            padding="max_length",
            max_length=self.seq,
            padding_side="right",
            return_tensors="pt",
        )
        return Batch(encoded) | {"labels": encoded["input_ids"]}


def _message(turn: Any, names: list[Any], place: str) -> dict[str, Any]:
    """Check a message, and return it with its content as a list of parts."""
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        raise DataError(f"{place} must be an object with role and content")
    content = turn.get("content")
    if isinstance(content, str):
        texts = content.split(MARK) if names else [content]
        parts: list[dict[str, Any]] = []
        for number, text in enumerate(texts):
            parts += [{"type": "image"}] * (number > 0)
            parts += [{"type": "text", "text": text}] * bool(text)
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
        reference = next((part[key] for key in ("image", "path", "url") if part.get(key)), None)
        if reference is not None:
            names.append(reference)
        return {"type": "image"}
    raise DataError(f"{place}: a part of type {part.get('type')!r}; known are text and image")


def _spread(plain: Example, ids: np.ndarray, place: str) -> np.ndarray:
    """Return one label for each of the processor's tokens `ids`, given the labels of the text.

    The processor replaces the placeholder of an image by many tokens. These have no label.
    """
    labels = np.full(len(ids), IGNORE, dtype=np.int64)
    at = 0
    for token, label in zip(*plain, strict=True):
        while at < len(ids) and ids[at] != token:
            at += 1
        if at == len(ids):
            raise DataError(
                f"{place}: the processor's tokens are not those of the conversation; give a chat "
                "template whose turns end with a special token"
            )
        labels[at] = label
        at += 1
    return labels


def _has_all_images(ids: np.ndarray, shortened: np.ndarray, plain: list[int]) -> bool:
    """Return whether truncation has kept all tokens that represent images.

    `ids` are the processor's tokens, `shortened` are these after truncation, and `plain` are the
    tokens of the text. Image tokens are those that occur more often in `ids` than in `plain`.
    """
    tokens, counts = np.unique(ids, return_counts=True)
    if len(shortened) == len(ids):
        return True
    text_counts = {int(t): plain.count(int(t)) for t in tokens}
    images = [
        t for t, n in zip(tokens.tolist(), counts.tolist(), strict=True) if n > text_counts[t]
    ]
    return bool(np.isin(ids, images).sum() == np.isin(shortened, images).sum())


def _text(row: Row) -> str:
    return bytes(row["text"].astype(np.uint8)).decode()


# The minimum file size for which several processes are used. It is low, because processing images
# takes a long time.
PARALLEL_BYTES = 2**20


def rows_with_images(
    rows: Iterator[tuple[str, dict[str, Any]]], source: Path, conversations: Conversations
) -> Iterator[Row]:
    """Yield the examples of rows; large files are encoded by several processes."""
    work = partial(_encoded, source)
    for example, files in mapped(
        work, rows, conversations, processes_for(source, least=PARALLEL_BYTES)
    ):
        numbers = [conversations.images.take(*file) for file in files]
        if example is not None:
            yield {**example, "images": np.asarray(numbers, np.int64)}


def _encoded(
    source: Path, conversations: Conversations, row: tuple[str, dict[str, Any]]
) -> tuple[Row | None, list[tuple[str, str]]]:
    """Return the example of a row, or None if it is dropped, and the path and digest of each image.

    The calling process numbers the images.
    """
    place, values = row
    present_values = {key: value for key, value in values.items() if value is not None}
    example = conversations.encode(present_values, source, place)
    numbers = [] if example is None else example["images"].tolist()
    return example, [conversations.images.files[number] for number in numbers]
