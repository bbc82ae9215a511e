"""PEFT adapters: reading, initialising, exporting and merging them.

PEFT creates an adapter on the device of its base layer. For a model without weights that is the
meta device, so PEFT's initial values are lost; `AdapterValues` draws them by PEFT's rules when the
store is created. Adapters in memory keep the values they have. A PEFT model is recognised by its
attributes, so peft is imported only when it is needed.
"""

from __future__ import annotations

import os
import re
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lohan.capture.placeholders import replace_parameters
from lohan.checkpoint.replacing import (
    MODEL_CARD,
    check_space,
    check_target,
    replacing,
    target_check,
)
from lohan.checkpoint.safetensors import ReadFlat
from lohan.checkpoint.sources import element_ranges
from lohan.errors import ConfigError, ModelError, first_line
from lohan.optim import Lora
from lohan.util.files import read_object, usable_path, write_atomic

_WRAPPERS = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")
PREFIX = "base_model.model."  # prefix of the base model's parameter names in a PEFT model


def is_adapted(model: nn.Module) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def base_of(model: nn.Module) -> nn.Module:
    """Return the model inside a PEFT model, or the model itself if it has no PEFT wrapper."""
    if not is_adapted(model):
        return model
    peft: Any = model
    base: nn.Module = peft.get_base_model()
    return base


def prefix_of(model: nn.Module) -> str:
    """Return the prefix that a PEFT model adds to the parameter names of its base model.

    The prefix is empty for a model without a PEFT wrapper. A PEFT model that learns virtual tokens
    (prompt learning) has no adapter layer between itself and the base model, so its prefix is
    shorter.
    """
    if not is_adapted(model):
        return ""
    peft: Any = model
    virtual = peft.active_peft_config.is_prompt_learning
    return PREFIX.removesuffix("model.") if virtual else PREFIX


def check_adapters(model: nn.Module) -> None:
    """Raise ModelError if a model contains adapters but is not wrapped in a PeftModel."""
    if getattr(vars(model).get("save_pretrained"), "merged", False):
        raise ModelError(
            f"{type(model).__name__} is what merge_and_unload returned: its calls add the adapter "
            "to weights in the store. Train copy.deepcopy(model), which has the merged weights in "
            "memory, or save it with save_pretrained(DIR) and train that"
        )
    if not is_adapted(model) and _adapter_parameters(model):
        raise ModelError(
            f"{type(model).__name__} holds adapters without a PeftModel around it; add them with "
            "peft.get_peft_model instead"
        )


def base_names(base: nn.Module) -> dict[str, str]:
    """Map each state-dict name of an adapted base model to the name it has without adapters.

    Tensors that adapters have added are left out.
    """
    added = _adapter_parameters(base)
    return {
        name: _WRAPPERS.sub("", name)
        for name in base.state_dict(keep_vars=True)
        if name not in added
    }


def copied_names(base: nn.Module) -> dict[str, str]:
    """Map the parameters of modules in `modules_to_save` to their names in the base model.

    PEFT copies these modules and trains all parameters of the copies next to the adapter.
    """
    return {
        name: _WRAPPERS.sub("", name)
        for name, (_, part, _) in _adapter_parameters(base).items()
        if part == COPIED
    }


def unify_dtype(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Convert all parameters to the dtype that the model computes in.

    If `dtype` is None and the model has adapters, the common dtype of the frozen parameters is
    used. If there are no adapters or no common dtype, the model is left unchanged.

    PEFT keeps the adapters of a 16-bit base in fp32. This is not needed here, because the store has
    an fp32 master copy of every trained parameter.
    """
    frozen = {p.dtype for p in model.parameters() if not p.requires_grad}
    if dtype is None and is_adapted(model) and len(frozen) == 1:
        dtype = frozen.pop()
    if dtype is None:
        return
    wrong = [p for p in model.parameters() if p.dtype != dtype]  # lists a tied parameter once
    new = {id(p): nn.Parameter(p.detach().to(dtype), p.requires_grad) for p in wrong}
    replace_parameters(model, new)


# -- Initial values -------------------------------------------------------------------------------


class AdapterValues:
    """Initial values of LoRA adapters and virtual tokens that are on the meta device.

    Each tensor is drawn when it is read, from a generator seeded with its name and torch's initial
    seed. The values therefore do not depend on the order of reads.
    """

    def __init__(self, model: nn.Module) -> None:
        base = base_of(model)
        self._seed = torch.initial_seed()
        self._starts: dict[str, tuple[torch.Size, Any]] = {}
        for name, (layer, part, adapter) in _adapter_parameters(base).items():
            if part == COPIED:
                continue
            config = model.peft_config[adapter]  # type: ignore[index]
            start = getattr(config, "init_lora_weights", None)
            _check_start(name, layer, adapter, start)
            shape = base.get_parameter(name).shape
            self._starts[PREFIX + name] = shape, start if part in _DRAWN else None
        for name, parameter in model.named_parameters():
            if name.startswith("prompt_encoder."):
                self._starts[name] = parameter.shape, _virtual_start(model, name)
        self._last: tuple[str, torch.Tensor] = "", torch.empty(0)

    def names(self) -> set[str]:
        return set(self._starts)

    def read_flat(self, name: str, start: int, stop: int) -> torch.Tensor:
        if self._last[0] != name:
            self._last = name, self._draw(name)
        return self._last[1].reshape(-1)[start:stop].clone()

    def _draw(self, name: str) -> torch.Tensor:
        shape, start = self._starts[name]
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        if start is None:
            return torch.zeros(shape)
        if start == "virtual tokens":
            return torch.empty(shape).normal_(generator=generator)
        if ".lora_embedding_B." in name:
            return torch.empty(shape).normal_(generator=generator)
        if start == "gaussian":
            return torch.empty(shape).normal_(std=1 / shape[0], generator=generator)
        return nn.init.kaiming_uniform_(torch.empty(shape), a=5**0.5, generator=generator)


COPIED = "modules_to_save"
# Factors that are drawn at random. The other factor is zero, so an adapter initially adds 0.
_DRAWN = ("lora_A", "lora_embedding_B")


def _adapter_parameters(base: nn.Module) -> dict[str, tuple[nn.Module, str, str]]:
    """Return a map from the name of each adapter parameter to its layer, part and adapter name.

    The part is the attribute of the layer that holds the parameter, such as "lora_A".
    """
    parameters = {}
    for name, layer in base.named_modules():
        for part in getattr(layer, "adapter_layer_names", ()):
            held = getattr(layer, part, None)
            if isinstance(held, (nn.ModuleDict, nn.ParameterDict)):
                for key, _ in held.named_parameters():
                    parameters[f"{name}.{part}.{key}"] = layer, part, key.split(".")[0]
    return parameters


def _virtual_start(model: nn.Module, name: str) -> str:
    """Return how the virtual tokens `name` are initialised.

    Raise ModelError for a method that needs the base weights.

    Random virtual tokens are drawn from a normal distribution, like an embedding.
    """
    config: Any = model.peft_config[name.split(".")[1]]  # type: ignore[index]
    random = getattr(getattr(config, "prompt_tuning_init", None), "value", "") == "RANDOM"
    if random and name.endswith(".embedding.weight"):
        return "virtual tokens"
    raise ModelError(
        f"{name}: cannot start without the base weights in memory; use PROMPT_TUNING with "
        "prompt_tuning_init='RANDOM', or load the model with transformers before adding the adapter"
    )


def _check_start(name: str, layer: Any, adapter: str, start: Any) -> None:
    """Raise ModelError if the initial values of an adapter depend on the base weights.

    `start` is the setting `init_lora_weights`.
    """
    vectors = getattr(layer, "lora_magnitude_vector", None) or ()
    if hasattr(layer, "lora_A") and start in (True, "gaussian") and adapter not in vectors:
        return
    what = "DoRA" if adapter in vectors else f"init_lora_weights={start!r}"
    raise ModelError(
        f"{name}: {what} cannot start without the base weights in memory; use LoRA with "
        "init_lora_weights=True, or load the model with transformers before adding the adapter"
    )


def add_lora(model: nn.Module, lora: Lora, *, leave: Sequence[str] = ()) -> nn.Module:
    """Return a PEFT model with LoRA adapters around a transformers model.

    A head for classification, question answering or scores is trained as a whole and gets no
    adapters. Modules named in `leave` get no adapters either.
    """
    peft = _peft()
    task, whole = _task_type(model), _learn_whole(model)
    unadapted = [
        *(rf"{re.escape(name)}\..*" for name in leave),
        *(rf"{re.escape(name)}(\..*)?" for name in whole),
    ]
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if not lora.targets and kind in _FUSED_OUT:
        unadapted.append(r".*\.out_proj")
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha if lora.alpha is not None else 2 * lora.rank,
        target_modules=list(lora.targets) or "all-linear",
        task_type=task,
        exclude_modules="|".join(unadapted) or None,
        modules_to_save=whole or None,
    )
    try:
        adapted: nn.Module = peft.get_peft_model(model, config)
        return adapted
    except ValueError as error:
        what = ", ".join(lora.targets) or "all linear layers"
        raise ConfigError(
            f"LoRA on {what}: {first_line(error)}; name linear layers of the model, such as q_proj"
        ) from None


# Maps the suffix of a transformers class name to PEFT's task type. PEFT has no task type for image
# classification and masked language modelling.
_TASKS = {
    "SequenceClassification": "SEQ_CLS",
    "TokenClassification": "TOKEN_CLS",
    "QuestionAnswering": "QUESTION_ANS",
    "ImageClassification": None,
    "MaskedLM": None,
}
_HEADS = ("classifier", "score", "qa_outputs")  # PEFT's names of heads that are trained as a whole
# The fused kernels of these state-space models read the weight of out_proj without calling the
# layer, so PEFT refuses adapters on it.
_FUSED_OUT = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")


def _task_type(model: nn.Module) -> str | None:
    """Return PEFT's task type for a model, or None for the generic PEFT class."""
    name = type(model).__name__
    for end, task in _TASKS.items():
        if name.endswith(end):
            return task
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return "CAUSAL_LM"
    # PEFT's sequence-to-sequence class needs a method that newer releases of transformers do not
    # have. The generic PEFT class trains and saves the same parameters.
    return "SEQ_2_SEQ_LM" if hasattr(model, _GENERATES) else None


_GENERATES = "_prepare_encoder_decoder_kwargs_for_generation"


def _learn_whole(model: nn.Module) -> list[str]:
    """Return the names of the modules outside the body that are trained as a whole.

    These are the heads for classification and question answering, which are either untrained or
    trained for other classes. A language-modelling head is trained already and is not listed.
    """
    if not type(model).__name__.endswith(tuple(end for end in _TASKS if end != "MaskedLM")):
        return []
    base = getattr(model, "base_model_prefix", "")
    held = {name.partition(".")[0] for name, _ in model.named_parameters()}
    outer = [name for name, _ in model.named_children() if name in held - {base}]
    return [name for name in outer if name in _HEADS] or outer


def open_adapter(model: nn.Module, folder: str | os.PathLike[str]) -> nn.Module:
    """Return a PEFT model with the adapter in `folder`, ready to be trained further.

    The adapter's values are loaded into memory; the base weights need not be.
    """
    peft = _peft()
    if not (Path(folder) / "adapter_config.json").is_file():
        raise ModelError(f"{folder}: holds no adapter_config.json; give a folder that PEFT wrote")
    read_object(
        Path(folder) / "adapter_config.json", kind=ModelError, remedy="restore the adapter's folder"
    )
    try:
        with warnings.catch_warnings():  # PEFT warns that loading into meta tensors is a no-op
            warnings.simplefilter("ignore")
            kind: Any = peft.PeftModel
            adapted: nn.Module = kind.from_pretrained(model, str(folder), is_trainable=True)
        values = peft.utils.save_and_load.load_peft_weights(str(folder), device="cpu")
    except Exception as error:  # PEFT does not validate the files, so anything may be raised
        raise ModelError(
            f"{folder}: PEFT cannot open this adapter: {first_line(error)}; restore the folder, or "
            "give the model that it was made for"
        ) from None
    # The folder uses shorter parameter names. get_peft_model_state_dict maps them to parameters.
    trainable = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    stored = peft.get_peft_model_state_dict(
        adapted, state_dict=trainable, save_embedding_layers=False
    )
    names = {id(parameter): name for name, parameter in trainable.items()}
    loaded = {names[id(p)]: values[key] for key, p in stored.items() if key in values}
    adapted.load_state_dict(loaded, strict=False, assign=True)
    lost = [name for name, p in adapted.named_parameters() if p.requires_grad and p.is_meta]
    if lost:
        raise ModelError(f"{folder}: has no values for {lost[0]}, which its config trains")
    return adapted


def named_base(folder: Path) -> Path:
    """Return the model folder that an adapter's config names as its base."""
    file = folder / "adapter_config.json"
    raw = read_object(file, kind=ModelError, remedy="restore the adapter's folder")
    named = raw.get("base_model_name_or_path")
    if not isinstance(named, str) or not _is_model_folder(named):
        raise ModelError(
            f"{file}: names {named!r:.80} as its base, which is no model folder here; give it with "
            "--model"
        )
    return Path(named)


def _is_model_folder(name: str) -> bool:
    return usable_path(name) and (Path(name) / "config.json").is_file()


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ConfigError(
            "adapters need the package peft, which is not installed; pip install 'lohan[peft]'"
        ) from None
    return peft


# -- Exporting an adapter folder ------------------------------------------------------------------


def export_adapter(
    model: nn.Module,
    out: str | os.PathLike[str],
    *,
    shapes: Mapping[str, tuple[int, ...]],
    read_flat: Callable[[str, int, int], torch.Tensor],
    dtype: torch.dtype,
    overwrite: bool = False,
    mark: str | None = None,
    card: str | None = None,
) -> Path:
    """Write an adapter folder that `PeftModel.from_pretrained` loads, atomically.

    The folder holds the trained parameters named in `shapes`, buffers of the adapter (such as
    VeRA's projection) and the adapter's config. `card` replaces the model card that PEFT writes. On
    an error nothing is left behind. `read_flat` reads the parameters by name. Return the path of
    the folder.
    """
    target = Path(out).absolute()
    check_target(target, overwrite=overwrite)
    numels = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    check_space(target, sum(numels.values()) * dtype.itemsize)
    # save_pretrained selects the tensors that belong to the adapter.
    state = {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if not isinstance(value, nn.Parameter)
    }
    for name, shape in shapes.items():
        values = [read_flat(name, a, b).to(dtype) for a, b in element_ranges(numels[name])]
        state[name] = torch.cat(values).view(shape)
    check = target_check(target, overwrite=overwrite, mark=mark)
    with replacing(target, check=check, mark=mark) as folder:
        # With "auto", PEFT reads the base model's config to check whether the vocabulary has grown.
        # Without a local folder it would have to query a hub.
        is_local = _is_model_folder(getattr(model, "name_or_path", "") or "/")
        kind: Any = type(model)
        with torch.no_grad():  # PEFT computes virtual tokens with their encoder
            kind.save_pretrained(
                model,
                str(folder),
                state_dict=state,
                save_embedding_layers="auto" if is_local else False,
            )
        if card is not None:
            write_atomic(folder / MODEL_CARD, card.encode())
    return target


# -- Merging an adapter into the weights of its base ----------------------------------------------


@dataclass(frozen=True)
class _Delta:
    """The matrix that LoRA adds to a weight: `scaling * B @ A`.

    If `transposed` is true, the weight is stored with its inputs as the first dimension.
    """

    a: str
    b: str
    rank: int
    scaling: float
    transposed: bool


class MergedReader:
    """A reader of a base model's parameters, under its own names, with LoRA adapters merged.

    The values come from a reader of all parameters of the PEFT model. Matrices are merged in ranges
    of rows. Adapters other than LoRA on matrices are refused.
    """

    def __init__(self, model: nn.Module, read: ReadFlat) -> None:
        self._read = read
        base = base_of(model)
        parameters = dict(base.named_parameters())
        self._stored = {
            plain: PREFIX + name for name, plain in base_names(base).items() if name in parameters
        }
        self.shapes = {
            plain: tuple(parameters[name.removeprefix(PREFIX)].shape)
            for plain, name in self._stored.items()
        }
        self._deltas: dict[str, list[_Delta]] = {}
        for name, layer in base.named_modules():
            self._take(name, layer)
        self._factors: dict[str, torch.Tensor] = {}

    def _take(self, name: str, layer: Any) -> None:
        if not hasattr(layer, "adapter_layer_names"):
            return
        for adapter in layer.active_adapters:
            saved = getattr(layer, "modules_to_save", None) or {}
            if adapter in saved:
                for part, _ in saved[adapter].named_parameters():
                    saved_name = f"{name}.modules_to_save.{adapter}.{part}"
                    self._stored[_WRAPPERS.sub("", saved_name)] = PREFIX + saved_name
            elif adapter in getattr(layer, "lora_A", {}):
                weight = getattr(layer.base_layer, "weight", None)
                if adapter in (layer.lora_magnitude_vector or {}) or layer.lora_bias.get(adapter):
                    raise _not_merged(name, "DoRA or a bias of its own")
                if not isinstance(weight, torch.Tensor) or weight.ndim != 2:
                    raise _not_merged(name, f"{type(layer).__name__}")
                a, b = (f"{PREFIX}{name}.lora_{x}.{adapter}.weight" for x in "AB")
                self._deltas.setdefault(_WRAPPERS.sub("", f"{name}.base_layer.weight"), []).append(
                    _Delta(a, b, layer.r[adapter], layer.scaling[adapter], layer.fan_in_fan_out)
                )
            elif any(
                adapter in (getattr(layer, part, None) or ())
                for part in getattr(layer, "adapter_layer_names", ())
            ):
                raise _not_merged(name, f"{type(layer).__name__}")

    def read_flat(self, name: str, start: int, stop: int) -> torch.Tensor:
        values = self._read(self._stored[name], start, stop)
        for delta in self._deltas.get(name, ()):
            rows, width = self.shapes[name]
            first, last = start // width, -(-stop // width)
            inputs, outputs = (rows, width) if delta.transposed else (width, rows)
            a = self._factor(delta.a, (delta.rank, inputs))
            b = self._factor(delta.b, (outputs, delta.rank))
            product = a.T[first:last] @ b.T if delta.transposed else b[first:last] @ a
            flat = product.mul_(delta.scaling).reshape(-1)
            values = values + flat[start - first * width : stop - first * width]
        return values

    def _factor(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        if name not in self._factors:
            if len(self._factors) > 1:  # Keep only the two factors of one matrix.
                self._factors.clear()
            self._factors[name] = self._read(name, 0, shape[0] * shape[1]).view(shape)
        return self._factors[name]


def _not_merged(name: str, what: str) -> ModelError:
    return ModelError(
        f"{name}: {what} cannot be merged while weights stream from SSD; save the adapter, and "
        "merge it with PEFT where the model fits in memory"
    )
