"""How diffusion transformers are taught: noise is mixed in, and they say what it was.

Each class of model has its own way to be called; which noise a step gets depends on seed and step
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lohan.checkpoint.diffusers_folder import CLASS as NAME
from lohan.checkpoint.diffusers_folder import Place, diffusers_class, read_json
from lohan.data.images import CLASS, LATENT
from lohan.errors import DataError, ModelError

TARGET = "target"
TEXT, POOLED = "encoder_hidden_states", "pooled_projections"
TIMES = 1000  # of a flow, as models count
GUIDANCE = 3.5  # what models with an embedding of it are told, as usual in fine-tuning
IMAGE_PIXELS = 1024  # of models that name no size
TEXT_TOKENS = 512  # the same of their text

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Way:
    """How models of a class are called. `sizes` names the settings that say how wide a field must
    be, last dimension."""

    beside: tuple[str, ...]  # fields that lie beside latents
    sizes: Mapping[str, str]
    noised: Callable[[Noising, Tensors, torch.Generator], Tensors]
    packed: int = 1  # pixels of a latent, each way, that make one token before the model cuts it


@dataclass(frozen=True)
class Noising:
    """One model's: its config, and its scheduler where the way has one."""

    way: Way
    config: Mapping[str, Any]
    scheduler: Any = None
    shift: float = 1.0
    of: str = ""  # the model's class

    @property
    def channels(self) -> int:
        return int(self.config["in_channels"]) // self.way.packed**2

    @property
    def classes(self) -> int | None:
        return self.config.get("num_embeds_ada_norm") if self.of == DIT else None

    def batch(self, arrays: Mapping[str, np.ndarray], generator: torch.Generator) -> Tensors:
        """Inputs of the model with noise mixed in, and what it is to predict."""
        tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        wide = {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}
        return self.way.noised(self, wide, generator)

    @property
    def size(self) -> int:
        """How wide and high latents are where nothing else says it."""
        return int(self.config.get("sample_size") or IMAGE_PIXELS // 8)

    def usual(self, samples: int) -> dict[str, np.ndarray]:
        """Examples of the shapes that the model is made for."""
        made: dict[str, np.ndarray] = {}
        made[LATENT] = np.zeros((samples, self.channels, self.size, self.size), np.float32)
        if self.classes is not None:
            made[CLASS] = np.zeros(samples, np.int64)
        widths = {name: int(self.config[setting]) for name, setting in self.way.sizes.items()}
        tall = {TEXT: (TEXT_TOKENS,)}
        for name, width in widths.items():
            made[name] = np.zeros((samples, *tall.get(name, ()), width), np.float32)
        return made

    def check(self, place: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Whether the model can take an example."""
        latent = arrays[LATENT]
        if latent.ndim != 3 or latent.shape[0] != self.channels:
            raise DataError(
                f"{place}: the latent has shape {list(latent.shape)}, {self.of} takes "
                f"[{self.channels}, height, width]; check the data, or give another --model"
            )
        each = self.way.packed * int(self.config.get("patch_size", 1))
        height, width = latent.shape[1:]
        if height % each or width % each or (self.of == DIT and height != width):
            wanted = f"multiples of {each}" + (", both the same" if self.of == DIT else "")
            raise DataError(
                f"{place}: the latent is {height} x {width}, {self.of} takes {wanted}; crop it"
            )
        self._check_places(place, height, width)
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
                "from 0; mend or leave it out"
            )
        for name, setting in self.way.sizes.items():
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

    def _check_places(self, place: str, height: int, width: int) -> None:
        """SD3 has a table of positions, cut to the image; others reckon them."""
        places, patch = self.config.get("pos_embed_max_size"), int(self.config.get("patch_size", 1))
        if self.of != SD3 or places is None:
            return
        most = patch * int(places)
        if max(height, width) > most:
            raise DataError(
                f"{place}: the latent is {height} x {width}, {self.of} takes {most} x {most} at "
                f"most (pos_embed_max_size {places}, patches of {patch}); crop it, or encode "
                "smaller images"
            )


def noising_of(place: Place) -> Noising:
    raw = place.config()
    name = str(raw.get(NAME))
    if name not in WAYS:
        raise ModelError(
            f"{place.model}: {name} is not a model that --task diffusion trains; it trains "
            f"{', '.join(WAYS)}; others go with lohan.attach and a loop of your own"
        )
    found = diffusers_class(name, place.model)
    config = {**_defaults(found), **raw}
    if name == DIT:
        return Noising(WAYS[name], config, scheduler=_ddpm(place), of=name)
    return Noising(WAYS[name], config, shift=_shift(place), of=name)


def _defaults(kind: Any) -> dict[str, Any]:
    """Settings that a config.json may leave out."""
    import inspect

    signature = inspect.signature(kind.__init__).parameters.values()
    return {p.name: p.default for p in signature if p.default is not inspect.Parameter.empty}


def scheduler_config(place: Place) -> dict[str, Any]:
    if place.scheduler is None:
        return {}
    return read_json(place.scheduler / "scheduler_config.json")


def _ddpm(place: Place) -> Any:
    """The noise levels that the model was trained with; those of DDPM where no scheduler says."""
    kind = diffusers_class("DDPMScheduler", place.model)
    found = kind.from_config(scheduler_config(place)) if place.scheduler else kind()
    if found.config.prediction_type not in TARGETS:
        raise ModelError(
            f"{place.scheduler}: prediction_type is {found.config.prediction_type!r}; known are "
            f"{', '.join(TARGETS)}"
        )
    return found


def _shift(place: Place) -> float:
    """How far the noise levels of a flow are moved up."""
    return float(scheduler_config(place).get("shift") or 1.0)


# -- noise prediction -----------------------------------------------------------------------------

TARGETS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "epsilon": lambda scheduler, latents, noise, times: noise,
    "v_prediction": lambda scheduler, *given: scheduler.get_velocity(*given),
    "sample": lambda scheduler, latents, noise, times: latents,
}


def _classes(noising: Noising, given: Tensors, generator: torch.Generator) -> Tensors:
    """DiT: the noise of DDPM at a random time, and the class of the image."""
    latents, scheduler = given[LATENT], noising.scheduler
    count = scheduler.config.num_train_timesteps
    times = torch.randint(0, count, (len(latents),), generator=generator)
    noise = torch.randn(latents.shape, generator=generator)
    target = TARGETS[scheduler.config.prediction_type](scheduler, latents, noise, times)
    return {
        "hidden_states": scheduler.add_noise(latents, noise, times),
        "timestep": times,
        CLASS: given[CLASS].long(),
        TARGET: target,
    }


# -- flow matching --------------------------------------------------------------------------------


def flow(
    latents: torch.Tensor, shift: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latents on their way to noise, what points from them to it, and how far they are: levels
    in the middle are drawn most."""
    drawn = torch.sigmoid(torch.randn(len(latents), generator=generator))
    levels = shift * drawn / (1 + (shift - 1) * drawn)
    noise = torch.randn(latents.shape, generator=generator)
    each = levels.view(-1, 1, 1, 1)
    return (1 - each) * latents + each * noise, noise - latents, levels


def _text(noising: Noising, given: Tensors, generator: torch.Generator) -> Tensors:
    """SD3."""
    noisy, target, levels = flow(given[LATENT], noising.shift, generator)
    return {
        "hidden_states": noisy, TEXT: given[TEXT], POOLED: given[POOLED],
        "timestep": levels * TIMES, TARGET: target,
    }  # fmt: skip


def _packed_text(noising: Noising, given: Tensors, generator: torch.Generator) -> Tensors:
    """Flux: the model takes tokens of 2 x 2, and their places."""
    noisy, target, levels = flow(given[LATENT], noising.shift, generator)
    height, width = noisy.shape[-2] // 2, noisy.shape[-1] // 2
    places = torch.zeros(height, width, 3)
    places[..., 1], places[..., 2] = torch.arange(height)[:, None], torch.arange(width)
    made = {
        "hidden_states": packed(noisy), TEXT: given[TEXT], POOLED: given[POOLED],
        "timestep": levels, "img_ids": places.view(-1, 3),
        "txt_ids": torch.zeros(given[TEXT].shape[1], 3), TARGET: packed(target),
    }  # fmt: skip
    if noising.config.get("guidance_embeds"):
        made["guidance"] = torch.full((len(noisy),), GUIDANCE)
    return made


def packed(latents: torch.Tensor) -> torch.Tensor:
    """Squares of 2 x 2 as tokens, row by row; inside one the channel comes first."""
    tokens = torch.nn.functional.pixel_unshuffle(latents, 2)
    return tokens.flatten(2).transpose(1, 2).contiguous()


DIT, SD3, FLUX = "DiTTransformer2DModel", "SD3Transformer2DModel", "FluxTransformer2DModel"
WIDTHS = {TEXT: "joint_attention_dim", POOLED: "pooled_projection_dim"}
WAYS = {
    DIT: Way((), {}, _classes),
    SD3: Way((TEXT, POOLED), WIDTHS, _text),
    FLUX: Way((TEXT, POOLED), WIDTHS, _packed_text, packed=2),
}


def generator_of(seed: int, stream: int, number: int) -> torch.Generator:
    """Random numbers of one batch. The CPU generator uses 32 bits of a seed."""
    mixed = np.random.SeedSequence([seed, stream, number]).generate_state(1)
    return torch.Generator().manual_seed(int(mixed[0]))
