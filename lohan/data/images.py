"""A folder of images or latents, walked: one example a file, with what lies beside it.

    DATA/CLASS/a.png                      an image
    DATA/CLASS/a.npy                      a latent, channels first
    DATA/a.npy a.encoder_hidden_states.npy a.pooled_projections.npy
    DATA/a.safetensors                    `latents` and any of these, by name, or `class_labels`

The folder below DATA is the class, if the file does not say it: its number, if all of them are
numbers, else its place among them in the order of the alphabet.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from lohan.errors import DataError
from lohan.util.units import counted

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
LATENTS = (".npy", ".safetensors")
LATENT = "latents"
MOST_PIXELS = 64 * 10**6  # an image takes 4 bytes a pixel, some three times over
CLASS = "class_labels"

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Sample:
    path: Path
    group: str  # the folder below the data's own, "" if there is none

    @property
    def is_image(self) -> bool:
        return self.path.suffix.lower() in IMAGES


def find_samples(folder: Path, *, beside: Sequence[str], option: str = "--data") -> list[Sample]:
    """All examples, in the order of their names. `beside` are the names of what may lie beside
    them."""
    if not folder.exists():
        raise DataError(f"{folder}: no such folder; check {option}")
    if not folder.is_dir():
        raise DataError(
            f"{folder}: not a folder; {option} takes a folder of images or of latents here"
        )
    companions = tuple(f".{name}.npy" for name in beside)
    found = []
    for path in sorted(folder.rglob("*")):
        known = path.suffix.lower() in (*IMAGES, *LATENTS)
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if known and not hidden and path.is_file() and not path.name.endswith(companions):
            parts = path.relative_to(folder).parts
            found.append(Sample(path, parts[0] if len(parts) > 1 else ""))
    if not found:
        kinds = ", ".join((*IMAGES, *LATENTS))
        raise DataError(f"{folder}: no image and no latent in it ({kinds}); check {option}")
    images = [sample for sample in found if sample.is_image]
    if images and len(images) < len(found):
        raise DataError(
            f"{folder}: {counted(len(images), 'image')} and "
            f"{counted(len(found) - len(images), 'latent')} are mixed; give a folder with one kind"
        )
    return found


def class_numbers(samples: Sequence[Sample], *, most: int) -> dict[str, int]:
    """Folder -> class."""
    names = sorted({sample.group for sample in samples if sample.group})
    if not names:
        return {}
    numbered = all(name.isdecimal() for name in names)
    found = {name: int(name) if numbered else place for place, name in enumerate(names)}
    worst = max(found, key=lambda name: found[name])
    if found[worst] >= most:
        raise DataError(
            f"{worst}: is class {found[worst]}, the model has {most} of them, from 0; rename or "
            "leave out folders"
        )
    return found


def read_samples(
    samples: Sequence[Sample], *, beside: Sequence[str], classes: dict[str, int] | None,
    of_image: Callable[[Path], np.ndarray], progress: Progress,
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:  # fmt: skip
    """The arrays of every example, with its place."""
    progress(0, len(samples))
    for number, sample in enumerate(samples):
        arrays = _arrays(sample, beside, of_image)
        if classes is not None and CLASS not in arrays:
            arrays[CLASS] = np.asarray(_class(sample, classes), dtype=np.int64)
        missing = [name for name in beside if name not in arrays]
        if missing:
            raise DataError(
                f"{sample.path}: no {missing[0]} with it; write it to "
                f"{sample.path.stem}.{missing[0]}.npy beside it, or into a .safetensors file"
            )
        yield str(sample.path), arrays
        progress(number + 1, len(samples))


def _class(sample: Sample, classes: dict[str, int]) -> int:
    if sample.group not in classes:
        raise DataError(
            f"{sample.path}: lies in no folder of a class; put every example into a folder below "
            f"--data, one for each class, or {CLASS} into a .safetensors file"
        )
    return classes[sample.group]


def _arrays(
    sample: Sample, beside: Sequence[str], of_image: Callable[[Path], np.ndarray]
) -> dict[str, np.ndarray]:
    path = sample.path
    if path.suffix.lower() == ".safetensors":
        arrays = _tensors(path)
        if LATENT not in arrays:
            raise DataError(
                f"{path}: no tensor {LATENT} among {', '.join(arrays) or 'none'}; give the latent "
                "that name"
            )
        return {name: array for name, array in arrays.items() if name in (LATENT, CLASS, *beside)}
    arrays = {LATENT: of_image(path) if sample.is_image else _array(path)}
    for name in beside:
        companion = path.with_name(f"{path.stem}.{name}.npy")
        if companion.is_file():
            arrays[name] = _array(companion)
    return arrays


def _array(path: Path) -> np.ndarray:
    try:
        found = read_npy(path)
    except (OSError, ValueError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise DataError(f"{path}: not an array of numpy ({first}); write it anew") from None
    return _checked(path, path.stem, found)


def read_npy(path: Path) -> np.ndarray:
    """An array that fills its file: what the header announces is compared with the file's size
    before there is memory for it. ValueError if it is anything else; no pickles, no archives."""
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
        except Exception as error:  # a header is a Python literal: it fails in many ways
            raise ValueError(f"the header is malformed: {type(error).__name__}") from None
        if dtype.hasobject or any(n < 0 for n in shape):
            raise ValueError("objects or negative sizes in it")
        there, announced = size - file.tell(), prod(shape) * dtype.itemsize
        if announced != there:
            raise ValueError(f"{announced:,} bytes announced, {there:,} there")
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
        found = load_file(path)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise DataError(f"{path}: not a safetensors file ({first}); write it anew") from None
    return {name: _checked(path, name, _numpy(tensor)) for name, tensor in found.items()}


def _numpy(tensor: Any) -> np.ndarray:
    """numpy has no bfloat16."""
    array: np.ndarray = (tensor.float() if "bfloat16" in str(tensor.dtype) else tensor).numpy()
    return array


def _checked(path: Path, name: str, array: np.ndarray) -> np.ndarray:
    if array.dtype.kind not in "fiu" or not array.size:
        raise DataError(
            f"{path}: {name} has {array.size} values of {array.dtype.name}; numbers are needed, "
            "write it anew"
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise DataError(f"{path}: {name} holds values that are not finite; write it anew")
    return array


def square(path: Path, size: int) -> np.ndarray:
    """The middle of an image, `size` pixels wide and high, channels first, from -1 to 1."""
    image = _opened(path)
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    image = image.crop((left, top, left + side, top + side)).resize((size, size))
    pixels = np.asarray(image, dtype=np.float32) / 127.5 - 1.0
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _opened(path: Path) -> Any:
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
            # From memory: a decoder that reads as much as a file announces gets what is there.
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
    except Exception as error:  # decoders raise what they like: SyntaxError, struct.error, ...
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise DataError(f"{path}: not readable as an image ({first}); leave it out") from None
