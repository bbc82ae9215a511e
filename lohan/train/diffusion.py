"""Diffusion transformers of diffusers: latents with noise mixed in, and the noise to predict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lohan.capture.tensors import dtype_of
from lohan.checkpoint.diffusers_folder import Place, diffusers_class, find_place
from lohan.config import Config
from lohan.data import arrange as arranging
from lohan.data.images import LATENT, Sample, class_numbers, find_samples, read_samples, square
from lohan.data.records import Arrays, Records, open_records, write_records
from lohan.engine.attach import load as load_model
from lohan.errors import BudgetError, ConfigError, DataError, ModelError
from lohan.model.state import MODES
from lohan.train.noising import POOLED, TARGET, TEXT, Noising, generator_of, noising_of
from lohan.train.task import Batch, Progress
from lohan.util.units import counted, format_bytes

PERPLEXITY = False
TRAINED, HELD = 0, 1  # streams of noise
IN_COMMON = ("img_ids", "txt_ids")  # inputs that all samples share
NARROW = ("hidden_states", TEXT, POOLED)  # inputs in the type that the model computes in


@dataclass(frozen=True)
class Noised:
    """Records, and the noise that each batch of them gets."""

    records: Records
    noising: Noising

    def __len__(self) -> int:
        return len(self.records)

    def batch(self, step: int, batch_size: int) -> Batch:
        generator = generator_of(self.records.seed, TRAINED, step)
        return {**self.noising.batch(self.records.of_step(step, batch_size), generator)}

    def passes(self, batch_size: int) -> Iterator[Batch]:
        for number, start in enumerate(range(0, len(self), batch_size)):
            rows = range(start, min(start + batch_size, len(self)))
            generator = generator_of(self.records.seed, HELD, number)
            yield {**self.noising.batch(self.records.stacked(rows), generator)}

    def split(self, share: float) -> tuple[Noised, Noised]:
        train, held = self.records.split(share)
        return replace(self, records=train), replace(self, records=held)

    def steps_for(self, epochs: float, batch_size: int) -> int:
        return arranging.steps_for(len(self), epochs, batch_size)


# -- model and settings ---------------------------------------------------------------------------


def check(config: Config) -> None:
    place_of(config)
    texts = {
        "--pack": config.train.pack, "--sample-prompts": bool(config.sample.prompts),
        "--lora": bool(config.train.lora),
    }  # fmt: skip
    asked = [name for name, wanted in texts.items() if wanted]
    if asked:
        raise ConfigError(
            f"{asked[0]}: is for language models, {config.model} is a diffusion transformer; leave "
            "it out"
        )


def place_of(config: Config) -> Place:
    found = find_place(config.model)
    if found is None:
        raise ModelError(
            f"{config.model}: no folder of diffusers (config.json with _class_name, or "
            "model_index.json), which --task diffusion needs; give one, or leave --task out"
        )
    return found


def load(config: Config, *, dtype: str) -> nn.Module:
    return load_model(config.model, dtype=dtype)


# -- data -----------------------------------------------------------------------------------------


def prepare(
    source: Path, cache: Path, config: Config, *, option: str, resume: bool, progress: Progress
) -> Noised:
    place = place_of(config)
    noising = noising_of(place)
    ready = open_records(cache, seed=config.seed) if resume else None
    if ready is None:
        beside = noising.way.beside
        samples = find_samples(source, beside=beside, option=option)
        classes = None
        if noising.classes is not None:
            classes = _classes(samples, source, config, noising)
        examples = read_samples(
            samples, beside=beside, classes=classes,
            of_image=_encoder(place, noising, samples, config.budget.host),
            progress=lambda done, total: progress("reading", done, total),
        )  # fmt: skip
        ready = write_records(
            cache, _checked(examples, noising), seed=config.seed, about={"classes": classes}
        )
    return Noised(ready, noising)


def _classes(
    samples: list[Sample], source: Path, config: Config, noising: Noising
) -> dict[str, int]:
    """Folder -> class; what is evaluated on has the classes of what is trained on."""
    assert noising.classes is not None
    if source == config.data:
        return class_numbers(samples, most=noising.classes)
    trained = find_samples(config.data, beside=noising.way.beside)
    known = class_numbers(trained, most=noising.classes)
    strange = sorted({sample.group for sample in samples if sample.group} - known.keys())
    if strange:
        raise DataError(
            f"{source}: the folder {strange[0]} is none of the {len(known)} classes in "
            f"{config.data}; rename or leave it out"
        )
    return known


def _checked(
    examples: Iterator[tuple[str, dict[str, np.ndarray]]], noising: Noising
) -> Iterator[tuple[str, Arrays]]:
    for place, arrays in examples:
        noising.check(place, arrays)
        yield place, arrays


def _encoder(
    place: Place, noising: Noising, samples: list[Sample], host_bytes: int | None
) -> Callable[[Path], np.ndarray]:
    """From an image to what the model works on: pixels, or latents of the autoencoder, the mean of
    what it says."""
    if not samples[0].is_image:
        return lambda path: np.empty(0)
    if noising.channels == 3:
        return lambda path: square(path, noising.size)
    if place.vae is None:
        raise DataError(
            f"{samples[0].path}: an image, and {noising.of} in {place.model} takes latents of "
            f"{noising.channels} channels; give the folder of a pipeline with its vae, or latents "
            "as .npy or .safetensors"
        )
    vae = _autoencoder(place, place.vae, host_bytes)
    factor = 2 ** (len(vae.config.block_out_channels) - 1)
    scale, shift = vae.config.scaling_factor, getattr(vae.config, "shift_factor", None) or 0.0

    def encode(path: Path) -> np.ndarray:
        pixels = torch.from_numpy(square(path, noising.size * factor))
        with torch.no_grad():
            found = (vae.encode(pixels[None]).latent_dist.mode()[0] - shift) * scale
        array: np.ndarray = found.numpy()
        return array

    return encode


def _autoencoder(place: Place, folder: Path, host_bytes: int | None) -> Any:
    """In memory while the data is prepared, before the run takes any."""
    needed = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if host_bytes is not None and needed > host_bytes:
        raise BudgetError(
            f"{folder}: encoding images takes the autoencoder, {format_bytes(needed)}, --host is "
            f"{format_bytes(host_bytes)}; raise it, or give latents"
        )
    kind = diffusers_class("AutoencoderKL", place.model)
    try:
        return kind.from_pretrained(folder, local_files_only=True, use_safetensors=True).eval()
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{folder}: diffusers cannot load the autoencoder: {str(error).splitlines()[0]}; give "
            "latents instead of images"
        ) from error


def describe(examples: Noised, config: Config) -> str:
    latents = " x ".join(map(str, examples.records.fields[LATENT].shape))
    note = f"{counted(len(examples), 'latent')} of {latents}"
    classes = examples.records.about.get("classes")
    if not classes:
        return note
    return f"{note} in {counted(len(classes), 'class', 'classes')}"


def arrange(examples: Noised, config: Config) -> Noised:
    return examples


# -- batches and loss -----------------------------------------------------------------------------


def shapes(config: Config, examples: list[Noised], *, dtype: str) -> Batch:
    if examples:
        batches = [one.batch(0, config.train.batch) for one in examples]
        made = max(batches, key=lambda batch: sum(tensor.numel() for tensor in batch.values()))
    else:
        noising = noising_of(place_of(config))
        noising.check(str(config.model), {n: a[0] for n, a in noising.usual(1).items()})
        made = noising.batch(noising.usual(config.train.batch), generator_of(0, 0, 0))
    inputs = _inputs(made, dtype_of(MODES[dtype]))
    return {name: tensor.to("meta") for name, tensor in inputs.items()}


def _inputs(batch: Batch, dtype: torch.dtype) -> Batch:
    return {
        name: tensor.to(dtype) if name in NARROW else tensor
        for name, tensor in batch.items()
        if name != TARGET
    }


def rows(batch: Batch) -> int:
    return len(batch[TARGET])


def part(batch: Batch, start: int, stop: int) -> Batch:
    low, high = (start, stop) if start < stop else (0, 1)
    return {n: tensor if n in IN_COMMON else tensor[low:high] for n, tensor in batch.items()}


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Models that also predict a variance get no loss for it."""
    target: torch.Tensor = batch[TARGET]
    inputs = _inputs(batch, next(model.parameters()).dtype)
    predicted = model(**inputs, return_dict=False)[0][:, : target.shape[1]]
    return nn.functional.mse_loss(predicted.float(), target.to(predicted.device))


def tokens(model: nn.Module, batch: Batch) -> int:
    """Of the images; models that take them as tokens get no patches."""
    given: torch.Tensor = batch["hidden_states"]
    if given.ndim == 3:
        return given.shape[0] * given.shape[1]
    config: Any = model.config
    return given.shape[0] * (given[0, 0].numel() // config.patch_size**2)


def weight(batch: Batch) -> int:
    return len(batch[TARGET])
