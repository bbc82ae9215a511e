"""Training of diffusers' transformers: noise is mixed into latents, and a target is predicted."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lohan.capture.blocks import dtype_of
from lohan.checkpoint.hf_folder import CLASS as NAME
from lohan.checkpoint.hf_folder import (
    DiffusersFolder,
    diffusers_class,
    find_diffusers_folder,
    read_json,
)
from lohan.config import Config
from lohan.data import dataset as arranging
from lohan.data.images import (
    CLASS,
    LATENT,
    Arrays,
    Records,
    Sample,
    class_numbers,
    find_samples,
    open_records,
    read_samples,
    square,
    write_records,
)
from lohan.engine.attach import load as load_model
from lohan.errors import BudgetError, ConfigError, DataError, ModelError, first_line
from lohan.model.state import STATE_FORMATS
from lohan.train.task import Batch, DataRequest, Task
from lohan.util.units import counted, format_bytes

# -- Noise: how inputs and targets of diffusion transformers are made ------------------------------
#
# Each model class has its own inputs. The noise of a batch depends only on the seed, the stream
# (training or evaluation) and the number of the batch.


TARGET = "target"
TEXT, POOLED = "encoder_hidden_states", "pooled_projections"
TIME_STEPS = 1000  # number of time steps of a flow
GUIDANCE = 3.5  # Input of models with a guidance embedding; the usual value in fine-tuning.
IMAGE_PIXELS = 1024  # image size for models whose config names none
TEXT_TOKENS = 512  # number of text tokens for such models

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ModelInterface:
    """The inputs that one class of diffusion transformers takes.

    `sizes` maps a field to the config setting that gives the width of its last dimension.
    """

    companions: tuple[str, ...]  # arrays that accompany the latents
    sizes: Mapping[str, str]
    make_inputs: Callable[[Noising, Tensors, torch.Generator], Tensors]
    packed: int = 1  # Tokens of the inputs are squares of this many latent pixels on a side.


@dataclass(frozen=True)
class Noising:
    """The procedure that adds noise for one model, with the model's interface and config."""

    interface: ModelInterface
    config: Mapping[str, Any]
    scheduler: Any = None
    shift: float = 1.0
    of: str = ""  # name of the model's class

    @property
    def channels(self) -> int:
        return int(self.config["in_channels"]) // self.interface.packed**2

    @property
    def classes(self) -> int | None:
        return self.config.get("num_embeds_ada_norm") if self.of == DIT else None

    def batch(self, arrays: Mapping[str, np.ndarray], generator: torch.Generator) -> Tensors:
        """Return the inputs of the model, with noise mixed into the latents, and the target."""
        tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        wide = {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}
        return self.interface.make_inputs(self, wide, generator)

    @property
    def size(self) -> int:
        """The default width and height of latents."""
        return int(self.config.get("sample_size") or IMAGE_PIXELS // 8)

    def example_arrays(self, samples: int) -> dict[str, np.ndarray]:
        """Return zero-filled examples with the shapes that the model is made for."""
        arrays: dict[str, np.ndarray] = {}
        arrays[LATENT] = np.zeros((samples, self.channels, self.size, self.size), np.float32)
        if self.classes is not None:
            arrays[CLASS] = np.zeros(samples, np.int64)
        widths = {name: int(self.config[setting]) for name, setting in self.interface.sizes.items()}
        tall = {TEXT: (TEXT_TOKENS,)}
        for name, width in widths.items():
            arrays[name] = np.zeros((samples, *tall.get(name, ()), width), np.float32)
        return arrays

    def check(self, place: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Raise DataError if the model cannot take the example at `place`."""
        latent = arrays[LATENT]
        if latent.ndim != 3 or latent.shape[0] != self.channels:
            raise DataError(
                f"{place}: the latent has shape {list(latent.shape)}, {self.of} takes "
                f"[{self.channels}, height, width]; check the data, or give another --model"
            )
        each = self.interface.packed * int(self.config.get("patch_size", 1))
        height, width = latent.shape[1:]
        if height % each or width % each or (self.of == DIT and height != width):
            wanted = f"multiples of {each}" + (", both the same" if self.of == DIT else "")
            raise DataError(
                f"{place}: the latent is {height} x {width}, {self.of} takes {wanted}; crop it"
            )
        self._check_positions(place, height, width)
        if self.classes is not None:
            label = arrays[CLASS]
            if label.ndim or not np.issubdtype(label.dtype, np.integer):
                raise DataError(
                    f"{place}: {CLASS} has shape {list(label.shape)} and type {label.dtype}; it "
                    "takes one whole number, without dimensions"
                )
        if self.classes is not None and not 0 <= int(arrays[CLASS]) < self.classes:
            raise DataError(
                f"{place}: is of class {int(arrays[CLASS])}, {self.of} has {self.classes} of them, "
                "from 0; correct it or leave it out"
            )
        for name, setting in self.interface.sizes.items():
            if arrays[name].ndim != (2 if name == TEXT else 1):
                wanted = "[tokens, width]" if name == TEXT else "[width]"
                raise DataError(
                    f"{place}: {name} has shape {list(arrays[name].shape)}, one example takes "
                    f"{wanted}; write it without a dimension for the batch"
                )
            if arrays[name].shape[-1] != self.config[setting]:
                raise DataError(
                    f"{place}: {name} is {arrays[name].shape[-1]} wide, {setting} of the model is "
                    f"{self.config[setting]}; make it with the text encoders of this model"
                )

    def _check_positions(self, place: str, height: int, width: int) -> None:
        """Raise DataError if the latent is larger than the position table of SD3.

        SD3 crops a fixed table to the image. Other models compute their positions.
        """
        positions = self.config.get("pos_embed_max_size")
        patch = int(self.config.get("patch_size", 1))
        if self.of != SD3 or positions is None:
            return
        most = patch * int(positions)
        if max(height, width) > most:
            raise DataError(
                f"{place}: the latent is {height} x {width}, {self.of} takes {most} x {most} at "
                f"most (pos_embed_max_size {positions}, patches of {patch}); crop it, or encode "
                "smaller images"
            )


def noising_of(folder: DiffusersFolder) -> Noising:
    raw = folder.config()
    name = str(raw.get(NAME))
    if name not in INTERFACES:
        raise ModelError(
            f"{folder.model}: {name} is not a model that --task diffusion trains; it trains "
            f"{', '.join(INTERFACES)}; others go with lohan.attach and a loop of your own"
        )
    kind = diffusers_class(name, folder.model)
    signature = inspect.signature(kind.__init__).parameters.values()
    defaults = {p.name: p.default for p in signature if p.default is not inspect.Parameter.empty}
    config = {**defaults, **raw}  # config.json may omit settings that have defaults
    if name == DIT:
        return Noising(INTERFACES[name], config, scheduler=_ddpm(folder), of=name)
    shift = float(scheduler_config(folder).get("shift") or 1.0)  # shifts noise levels upwards
    return Noising(INTERFACES[name], config, shift=shift, of=name)


def scheduler_config(folder: DiffusersFolder) -> dict[str, Any]:
    if folder.scheduler is None:
        return {}
    return read_json(folder.scheduler / "scheduler_config.json")


def _ddpm(folder: DiffusersFolder) -> Any:
    """Return the folder's scheduler, or one with DDPM's defaults if the folder has none."""
    kind = diffusers_class("DDPMScheduler", folder.model)
    scheduler = kind.from_config(scheduler_config(folder)) if folder.scheduler else kind()
    if scheduler.config.prediction_type not in TARGETS:
        raise ModelError(
            f"{folder.scheduler}: prediction_type is {scheduler.config.prediction_type!r}; known "
            f"are {', '.join(TARGETS)}"
        )
    return scheduler


# -- Noise prediction ------------------------------------------------------------------------------

TARGETS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "epsilon": lambda scheduler, latents, noise, times: noise,
    "v_prediction": lambda scheduler, *given: scheduler.get_velocity(*given),
    "sample": lambda scheduler, latents, noise, times: latents,
}


def _class_labels(noising: Noising, arrays: Tensors, generator: torch.Generator) -> Tensors:
    """Return the inputs and the target for DiT: DDPM noise at a random time step, and the class."""
    latents, scheduler = arrays[LATENT], noising.scheduler
    count = scheduler.config.num_train_timesteps
    times = torch.randint(0, count, (len(latents),), generator=generator)
    noise = torch.randn(latents.shape, generator=generator)
    target = TARGETS[scheduler.config.prediction_type](scheduler, latents, noise, times)
    return {
        "hidden_states": scheduler.add_noise(latents, noise, times),
        "timestep": times,
        CLASS: arrays[CLASS].long(),
        TARGET: target,
    }


# -- Flow matching ---------------------------------------------------------------------------------


def flow(
    latents: torch.Tensor, shift: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return noisy latents, the direction from latents to noise, and the noise levels.

    Levels are drawn from a logit-normal distribution, so those in the middle are the most frequent.
    """
    drawn = torch.sigmoid(torch.randn(len(latents), generator=generator))
    levels = shift * drawn / (1 + (shift - 1) * drawn)
    noise = torch.randn(latents.shape, generator=generator)
    each = levels.view(-1, 1, 1, 1)
    return (1 - each) * latents + each * noise, noise - latents, levels


def _text(noising: Noising, arrays: Tensors, generator: torch.Generator) -> Tensors:
    """Return the inputs and the target for SD3."""
    noisy, target, levels = flow(arrays[LATENT], noising.shift, generator)
    return {
        "hidden_states": noisy,
        TEXT: arrays[TEXT],
        POOLED: arrays[POOLED],
        "timestep": levels * TIME_STEPS,
        TARGET: target,
    }


def _packed_text(noising: Noising, arrays: Tensors, generator: torch.Generator) -> Tensors:
    """Return the inputs and the target for Flux.

    The inputs are tokens of 2 x 2 latent pixels, and the positions of the tokens.
    """
    noisy, target, levels = flow(arrays[LATENT], noising.shift, generator)
    height, width = noisy.shape[-2] // 2, noisy.shape[-1] // 2
    grid = torch.zeros(height, width, 3)
    grid[..., 1], grid[..., 2] = torch.arange(height)[:, None], torch.arange(width)
    inputs = {
        "hidden_states": packed(noisy),
        TEXT: arrays[TEXT],
        POOLED: arrays[POOLED],
        "timestep": levels,
        "img_ids": grid.view(-1, 3),
        "txt_ids": torch.zeros(arrays[TEXT].shape[1], 3),
        TARGET: packed(target),
    }
    if noising.config.get("guidance_embeds"):
        inputs["guidance"] = torch.full((len(noisy),), GUIDANCE)
    return inputs


def packed(latents: torch.Tensor) -> torch.Tensor:
    """Return squares of 2 x 2 latent pixels as tokens, row by row, with channels first."""
    tokens = torch.nn.functional.pixel_unshuffle(latents, 2)
    return tokens.flatten(2).transpose(1, 2).contiguous()


DIT, SD3, FLUX = "DiTTransformer2DModel", "SD3Transformer2DModel", "FluxTransformer2DModel"
WIDTHS = {TEXT: "joint_attention_dim", POOLED: "pooled_projection_dim"}
INTERFACES = {
    DIT: ModelInterface((), {}, _class_labels),
    SD3: ModelInterface((TEXT, POOLED), WIDTHS, _text),
    FLUX: ModelInterface((TEXT, POOLED), WIDTHS, _packed_text, packed=2),
}


def generator_of(seed: int, stream: int, number: int) -> torch.Generator:
    """Return the random generator of batch `number` in a stream, which is one of those below.

    The CPU generator uses only 32 bits of a seed, so the three numbers are hashed.
    """
    mixed = np.random.SeedSequence([seed, stream, number]).generate_state(1)
    return torch.Generator().manual_seed(int(mixed[0]))


# -- The task --------------------------------------------------------------------------------------


TRAINING_STREAM, EVALUATION_STREAM = 0, 1  # noise streams of training and of evaluation
SHARED_INPUTS = ("img_ids", "txt_ids")  # inputs that all samples of a batch share
COMPUTE_INPUTS = ("hidden_states", TEXT, POOLED)  # inputs in the model's compute type


@dataclass(frozen=True)
class Noised:
    """Examples to which noise is added when a batch is made."""

    records: Records
    noising: Noising

    def __len__(self) -> int:
        return len(self.records)

    def batch(self, step: int, batch_size: int) -> Batch:
        generator = generator_of(self.records.seed, TRAINING_STREAM, step)
        return {**self.noising.batch(self.records.of_step(step, batch_size), generator)}

    def passes(self, batch_size: int) -> Iterator[Batch]:
        for number, start in enumerate(range(0, len(self), batch_size)):
            rows = range(start, min(start + batch_size, len(self)))
            generator = generator_of(self.records.seed, EVALUATION_STREAM, number)
            yield {**self.noising.batch(self.records.stacked(rows), generator)}

    def split(self, share: float) -> tuple[Noised, Noised]:
        train, held = self.records.split(share)
        return replace(self, records=train), replace(self, records=held)

    def steps_for(self, epochs: float, batch_size: int) -> int:
        return arranging.steps_for(len(self), epochs, batch_size)


class Diffusion(Task[Noised]):
    LIBRARY, PIPELINE = "diffusers", "text-to-image"

    def check(self, config: Config) -> None:
        diffusers_folder_of(config)
        texts = {
            "--pack": config.train.pack,
            "--sample-prompts": bool(config.sample.prompts),
            "--lora": bool(config.train.lora),
        }
        requested = [name for name, wanted in texts.items() if wanted]
        if requested:
            raise ConfigError(
                f"{requested[0]}: is for language models, {config.model} is a diffusion "
                "transformer; leave it out"
            )

    def load(self, config: Config, *, dtype: str) -> nn.Module:
        return load_model(config.model, dtype=dtype)

    def prepare(self, data: DataRequest) -> Noised:
        config, source = data.config, data.sources[0].path
        folder = diffusers_folder_of(config)
        if len(data.sources) > 1:
            raise ConfigError(
                f"{data.option}: {len(data.sources)} folders are given, a diffusion model takes "
                "one; put links to their images into one folder"
            )
        noising = noising_of(folder)
        ready = open_records(data.cache, seed=config.seed) if data.resume else None
        if ready is None:
            companions = noising.interface.companions
            samples = find_samples(source, companions=companions, option=data.option)
            classes = None
            if noising.classes is not None:
                classes = _classes(samples, source, config, noising)
            examples = read_samples(
                samples,
                companions=companions,
                classes=classes,
                of_image=_encoder(folder, noising, samples, config.budget.host),
                progress=partial(data.progress, "reading"),
            )

            def checked() -> Iterator[tuple[str, Arrays]]:
                for name, arrays in examples:
                    noising.check(name, arrays)
                    yield name, arrays

            about = {"classes": classes}
            ready = write_records(data.cache, checked(), seed=config.seed, about=about)
        return Noised(ready, noising)

    def describe(self, examples: Noised, config: Config) -> str:
        latents = " x ".join(map(str, examples.records.fields[LATENT].shape))
        note = f"{counted(len(examples), 'latent')} of {latents}"
        classes = examples.records.about.get("classes")
        if not classes:
            return note
        return f"{note} in {counted(len(classes), 'class', 'classes')}"

    def shapes(self, config: Config, examples: list[Noised], *, dtype: str) -> Batch:
        if examples:
            batches = [one.batch(0, config.train.batch) for one in examples]
            largest = max(
                batches, key=lambda batch: sum(tensor.numel() for tensor in batch.values())
            )
        else:
            noising = noising_of(diffusers_folder_of(config))
            example = {name: array[0] for name, array in noising.example_arrays(1).items()}
            noising.check(str(config.model), example)
            largest = noising.batch(
                noising.example_arrays(config.train.batch), generator_of(0, 0, 0)
            )
        inputs = _inputs(largest, dtype_of(STATE_FORMATS[dtype]))
        return {name: tensor.to("meta") for name, tensor in inputs.items()}

    def rows(self, batch: Batch) -> int:
        return len(batch[TARGET])

    def part(self, batch: Batch, start: int, stop: int) -> Batch:
        low, high = (start, stop) if start < stop else (0, 1)
        return {
            n: tensor if n in SHARED_INPUTS else tensor[low:high] for n, tensor in batch.items()
        }

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean squared error of the prediction.

        If the model also predicts a variance, the variance is ignored.
        """
        target: torch.Tensor = batch[TARGET]
        inputs = _inputs(batch, next(model.parameters()).dtype)
        predicted = model(**inputs, return_dict=False)[0][:, : target.shape[1]]
        return nn.functional.mse_loss(predicted.float(), target.to(predicted.device))

    def tokens(self, model: nn.Module, batch: Batch) -> int:
        """Return the number of image tokens.

        Inputs with three dimensions are tokens already; others are divided into patches.
        """
        hidden: torch.Tensor = batch["hidden_states"]
        if hidden.ndim == 3:
            return hidden.shape[0] * hidden.shape[1]
        config: Any = model.config
        return hidden.shape[0] * (hidden[0, 0].numel() // int(config.patch_size) ** 2)


def diffusers_folder_of(config: Config) -> DiffusersFolder:
    folder = find_diffusers_folder(config.model)
    if folder is None:
        raise ModelError(
            f"{config.model}: not a diffusers folder (config.json with _class_name, or "
            "model_index.json), which --task diffusion needs; give one, or leave --task out"
        )
    return folder


def _classes(
    samples: list[Sample], source: Path, config: Config, noising: Noising
) -> dict[str, int]:
    """Return a map from the name of each folder of samples to its class number.

    Evaluation data uses the classes of the training data.
    """
    assert noising.classes is not None
    trained_on = config.data[0].path
    if source == trained_on:
        return class_numbers(samples, most=noising.classes)
    trained = find_samples(trained_on, companions=noising.interface.companions)
    numbers = class_numbers(trained, most=noising.classes)
    unknown_groups = sorted({sample.group for sample in samples if sample.group} - numbers.keys())
    if unknown_groups:
        raise DataError(
            f"{source}: the folder {unknown_groups[0]} is none of the {len(numbers)} classes in "
            f"{trained_on}; rename or leave it out"
        )
    return numbers


def _encoder(
    source: DiffusersFolder, noising: Noising, samples: list[Sample], host_bytes: int | None
) -> Callable[[Path], np.ndarray]:
    """Return a function from an image file to the input of the model.

    The input is pixels, or latents of the autoencoder (the mode of its distribution).
    """
    if not samples[0].is_image:
        return lambda path: np.empty(0)
    if noising.channels == 3:
        return lambda path: square(path, noising.size)
    if source.vae is None:
        raise DataError(
            f"{samples[0].path}: an image, and {noising.of} in {source.model} takes latents of "
            f"{noising.channels} channels; give the folder of a pipeline with its vae, or latents "
            "as .npy or .safetensors"
        )
    vae = _autoencoder(source, source.vae, host_bytes)
    factor = 2 ** (len(vae.config.block_out_channels) - 1)
    scale, shift = vae.config.scaling_factor, getattr(vae.config, "shift_factor", None) or 0.0

    def encode(path: Path) -> np.ndarray:
        pixels = torch.from_numpy(square(path, noising.size * factor))
        with torch.no_grad():
            latent = (vae.encode(pixels[None]).latent_dist.mode()[0] - shift) * scale
        array: np.ndarray = latent.numpy()
        return array

    return encode


def _autoencoder(source: DiffusersFolder, folder: Path, host_bytes: int | None) -> Any:
    """Load the autoencoder.

    It is in memory only while data is prepared, before the run allocates memory.
    """
    needed = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if host_bytes is not None and needed > host_bytes:
        raise BudgetError(
            f"{folder}: encoding images takes the autoencoder, {format_bytes(needed)}, --host is "
            f"{format_bytes(host_bytes)}; raise it, or give latents"
        )
    kind = diffusers_class("AutoencoderKL", source.model)
    try:
        return kind.from_pretrained(folder, local_files_only=True, use_safetensors=True).eval()
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{folder}: diffusers cannot load the autoencoder: {first_line(error)}; give "
            "latents instead of images"
        ) from error


def _inputs(batch: Batch, dtype: torch.dtype) -> Batch:
    return {
        name: tensor.to(dtype) if name in COMPUTE_INPUTS else tensor
        for name, tensor in batch.items()
        if name != TARGET
    }
