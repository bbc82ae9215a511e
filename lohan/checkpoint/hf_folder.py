"""Hugging Face folders of transformers and diffusers: configs, models without weights, exports.

`build_model` returns the model that `from_pretrained` would return, with every parameter on the
meta device and every buffer (rotary frequencies, masks, scales) on the CPU with its real values.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lohan.checkpoint.quantized import check_quantization, open_folder, without_quantization
from lohan.checkpoint.replacing import (
    MODEL_CARD,
    check_space,
    check_target,
    replacing,
    target_check,
)
from lohan.checkpoint.safetensors import STEMS, FileTensor, ShardedWriter, has_weights, refuse_gguf
from lohan.checkpoint.sources import checkpoint_map, element_ranges, tied_names
from lohan.errors import ModelError, first_line
from lohan.model.shapes import check_layers
from lohan.util.files import read_object, sync_path, write_new

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


# -- Which model a config.json describes -----------------------------------------------------------
#
# A model is described by the transformers auto class that builds it together with its loss.


CAUSAL = "AutoModelForCausalLM"
KINDS = {  # auto class -> description of its task, used in messages
    CAUSAL: "causal language modelling",
    "AutoModelForSeq2SeqLM": "text to text",
    "AutoModelForSequenceClassification": "sequence classification",
    "AutoModelForTokenClassification": "token classification",
    "AutoModelForQuestionAnswering": "question answering",
    "AutoModelForMaskedLM": "masked language modelling",
    "AutoModelForImageClassification": "image classification",
    "AutoModelForImageTextToText": "images and text to text",
}


def kind_of(config: PreTrainedConfig, path: Path | str) -> str:
    """Return the name of the auto class that builds the model named by the config."""
    if is_causal(config):
        return CAUSAL
    names = config.architectures or []
    for kind in KINDS:
        if kind != CAUSAL and _built_by(kind, config) & set(names):
            return kind
    listed = ", ".join(names) or f"{config.model_type} (config.json names no architecture)"
    raise ModelError(
        f"{path}: {listed} is not a model that LoHan loads; it loads those for "
        f"{', '.join(KINDS.values())}, and diffusion transformers; give the folder of one, or "
        "build the model in memory and attach it"
    )


def is_causal(config: PreTrainedConfig) -> bool:
    """Return whether the config describes a causal language model or the body of one."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    names = config.architectures or []
    override = KNOWN.get(config.model_type)
    fits = any(
        "CausalLM" in n or "LMHead" in n or n.endswith("Model") or n == override for n in names
    )
    encoder = getattr(config, "is_decoder", True) is False and "neox" not in config.model_type
    return bool(_built_by(CAUSAL, config)) and not encoder and (fits or not names)


def auto_class(kind: str) -> Any:
    import transformers

    return getattr(transformers, kind)


def _built_by(kind: str, config: PreTrainedConfig) -> set[str]:
    """Return the names of the classes that the auto class `kind` builds for this config."""
    mapping = auto_class(kind)._model_mapping
    if type(config) in mapping:
        classes = mapping[type(config)]
        return {one.__name__ for one in (classes if isinstance(classes, tuple) else (classes,))}
    # A composite model may be registered under its outer config, while this config is that of one
    # of its parts. Accept a class that is named in the config and built from the config's type.
    listed = mapping._model_mapping.values()
    return {
        name
        for name in config.architectures or []
        if name in listed and auto_class(name).config_class is type(config)
    }


# -- Folders of transformers -----------------------------------------------------------------------


def load_config(folder: str | os.PathLike[str]) -> PreTrainedConfig:
    """Return the config of a model folder, and refuse a model that LoHan cannot load.

    Quantization settings are removed from the returned config, because weights are dequantised when
    they are read.
    """
    from transformers import AutoConfig

    path = Path(folder)
    raw = _read_config_json(path)
    if "_class_name" in raw:
        raise ModelError(
            f"{path}: {raw['_class_name']} is a model of diffusers; `lohan train --task diffusion` "
            "trains such, and lohan.load builds it"
        )
    check_quantization(raw, path)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        if "auto_map" in raw:
            raise ModelError(
                f"{path}: the model ({raw.get('model_type')!r}) comes with code of its own, which "
                "LoHan does not run; give a model that the installed transformers knows by itself"
            ) from error
        raise ModelError(
            f"{path}: transformers cannot use config.json (model_type "
            f"{raw.get('model_type')!r}): {first_line(error)}; give a model that the "
            "installed transformers knows, or upgrade transformers"
        ) from error
    for one in (config, config.get_text_config()):
        without_quantization(vars(one))
    kind_of(config, path)
    return config


def causal_config(folder: str | os.PathLike[str]) -> PreTrainedConfig:
    """Return the config of a causal language model; raise ModelError for any other model."""
    config = load_config(folder)
    if not is_causal(config):
        kind = ", ".join(config.architectures or []) or config.model_type
        raise ModelError(
            f"{folder}: {kind} is not a causal language model; give the folder of one, such as "
            "Llama, Qwen, Mistral, Gemma, GPT-2 or OPT; `lohan train` trains others by their own "
            "--task, and lohan.load and lohan.attach take more"
        )
    return config


SCORES = "AutoModelForSequenceClassification"


def reward_config(folder: str | os.PathLike[str]) -> PreTrainedConfig:
    """Return the config of a reward model: sequence classification with a single score.

    If the folder holds a causal language model, return the config of the sequence classification
    model with the same body and a new head. Raise ModelError for any other model.
    """
    config = load_config(folder)
    if is_causal(config):
        supported = sorted(_built_by(SCORES, config))
        if not supported:
            raise ModelError(
                f"{folder}: transformers has no {config.model_type} that scores a sequence; give a "
                "model that has one, such as Llama, Qwen, Mistral, Gemma or GPT-2"
            )
        config.architectures, config.num_labels = supported[:1], 1
        return config
    if kind_of(config, str(folder)) != SCORES or config.num_labels != 1:
        names = ", ".join(config.architectures or [])
        raise ModelError(
            f"{folder}: {names} with {config.num_labels} labels is no reward model; give a causal "
            "language model, or one for sequence classification with num_labels 1"
        )
    return config


def draw_head(model: PreTrainedModel, *, seed: int) -> None:
    """Initialise the parameters outside the model's body as transformers does.

    Each parameter is drawn from its own generator, seeded with `seed` and the parameter's name.
    """
    inside = {id(p) for p in model.base_model.parameters()}
    std = getattr(model.config.get_text_config(), "initializer_range", 0.02)
    for name, parameter in list(model.named_parameters()):
        if id(parameter) in inside:
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        values = torch.zeros(parameter.shape)
        if parameter.ndim >= 2:
            values.normal_(std=std, generator=generator)
        owner, _, attribute = name.rpartition(".")
        drawn = nn.Parameter(values.to(parameter.dtype), requires_grad=parameter.requires_grad)
        setattr(model.get_submodule(owner), attribute, drawn)


def is_of_another_class(model: nn.Module | None, folder: Path) -> bool:
    """Return whether a model was converted from a language model into a reward model.

    In this case the config in its folder still describes the language model.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel) or not (folder / "config.json").is_file():
        return False
    return is_causal(load_config(folder)) and type(model).__name__ in _built_by(
        SCORES, model.config
    )


def _model_folder_advice(path: Path) -> str:
    """Return advice for a model folder that does not exist."""
    hub = (
        "or fetch a model of the hub: `lohan train --model ORG/NAME`, or `hf download ORG/NAME "
        "--local-dir DIR`"
    )
    parent = path.parent
    names = [each.name for each in parent.iterdir() if each.is_dir()] if parent.is_dir() else []
    if close := get_close_matches(path.name, names, n=1):
        return f"did you mean {parent / close[0]}? Give that, {hub}"
    return f"check the path, {hub}"


def _read_config_json(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        if path.suffix == ".gguf":
            refuse_gguf(path)
        raise ModelError(f"{path}: no such folder; {_model_folder_advice(path)}")
    file = path / "config.json"
    if (path / "model_index.json").is_file():
        file = path / "transformer" / "config.json"
    if not file.is_file():
        refuse_gguf(path)
        raise ModelError(
            f"{path}: holds no config.json; give the folder that holds config.json and the weights"
        )
    raw = read_object(file, kind=ModelError, remedy="download it again")
    _check_implementations(raw, file)
    check_layers(raw, file, ModelError)
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(
            f"{file}: architectures is {json.dumps(names)}, not a list of names; download it again"
        )
    return raw


def _check_implementations(raw: Any, file: Path) -> None:
    """Refuse a config that names a kernel from a hub as its implementation, at any nesting level.

    transformers would download and run that code.
    """
    for key, value in raw.items() if isinstance(raw, dict) else enumerate(raw):
        if isinstance(key, str) and key.endswith(_CHOSEN) and "/" in json.dumps(value):
            raise ModelError(
                f"{file}: {key} is {json.dumps(value)[:200]}, code from a hub, which LoHan neither "
                'fetches nor runs; remove it, or name one of transformers\' own, such as "sdpa"'
            )
        if isinstance(value, (dict, list)):
            _check_implementations(value, file)


_CHOSEN = ("_implementation", "attn_implementation", "_implementation_internal")


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Move every parameter to the meta device as soon as a module registers it; keep buffers real.

    A constructor therefore holds one parameter at a time, in memory that torch.empty does not
    touch. Initialisers that run afterwards see a meta tensor and do nothing.
    """
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def build_model(
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype,
    attn_implementation: str | None = None,
    config: PreTrainedConfig | None = None,
) -> PreTrainedModel:
    """Return a folder's model in `dtype`, with meta parameters and real buffers on the CPU.

    If `config` is given, it is used instead of the folder's config.
    """
    from transformers import GenerationConfig

    path = Path(folder)
    config = config or load_config(path)
    model = build_from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    model.config.name_or_path = str(path)
    if (path / "generation_config.json").is_file():
        try:
            model.generation_config = GenerationConfig.from_pretrained(
                str(path), local_files_only=True
            )
        except Exception as error:
            raise ModelError(
                f"{path}/generation_config.json: {first_line(error)}; correct or remove the file"
            ) from error
    if has_weights(path):
        load_buffers(model, path)
    return model


def structure_of(folder: str | os.PathLike[str] | None) -> PreTrainedModel | None:
    """Return a folder's model without weights if its files need layout conversion, else None."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping as rules_of

    if folder is None:
        return None
    raw = _read_config_json(Path(folder))
    kinds = [raw.get("model_type"), *(raw.get("architectures") or [])]
    if not any(rules_of(kind) for kind in kinds):  # type: ignore[no-untyped-call]
        return None
    return build_from_config(load_config(folder), dtype=torch.float32)


def build_from_config(
    config: PreTrainedConfig, *, dtype: torch.dtype, attn_implementation: str | None = None
) -> PreTrainedModel:
    """Return the config's model with parameters on the meta device and buffers on the CPU."""
    kind = kind_of(config, config.name_or_path or config.model_type)
    config = copy.deepcopy(config)
    if attn_implementation is not None:
        config._attn_implementation = attn_implementation
    try:
        with parameters_on_meta():
            auto = auto_class(kind)
            build: Callable[..., PreTrainedModel] = auto.from_config
            if type(config) not in auto._model_mapping:
                build = auto_class(next(iter(_built_by(kind, config))))._from_config
            model = build(config, dtype=dtype)
        # Compute buffers as from_pretrained does, in the default dtype instead of the model's.
        # Constructing GPT-J in bfloat16, for example, would round the frequencies of its position
        # table to bfloat16. Parameters are on the meta device, so initialising them again costs
        # nothing.
        for module in model.modules():
            module.__dict__.pop("_is_hf_initialized", None)
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:  # derived from a parameter
                    module._buffers[name] = torch.zeros_like(buffer, device="cpu")
        initialise: Callable[[], None] = model.initialize_weights
        initialise()
    except Exception as error:
        raise ModelError(
            f"{config.name_or_path or config.model_type}: transformers cannot build the model: "
            f"{first_line(error)}; check config.json"
        ) from error
    without_cache(model)
    return model


def without_cache(model: nn.Module) -> None:
    """Disable the key-value cache in all configs of a model.

    Training has no use for it, and recomputation would fill it twice.
    """
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that belong to the checkpoint, by name."""
    parameters = {name for names in tied_names(model) for name in names}
    held = model.state_dict(keep_vars=True)
    return {name: t for name, t in held.items() if name not in parameters}


def load_buffers(model: nn.Module, path: Path) -> None:
    """Copy the folder's values into the model's persistent buffers."""
    buffers = persistent_buffers(model)
    if not buffers:
        return
    tensors = open_folder(path)
    sources = checkpoint_map(model, tensors).buffers
    for name in buffers.keys() & sources.keys():
        if tensors.shape(sources[name]) != tuple(buffers[name].shape):
            raise ModelError(
                f"{path}: tensor {sources[name]} has shape {list(tensors.shape(sources[name]))}, "
                f"buffer {name} has {list(buffers[name].shape)}; config.json and weights are of "
                "different models"
            )
        with torch.no_grad():
            buffers[name].copy_(tensors.read(sources[name]))


# -- Folders of diffusers: a single transformer, or a pipeline with scheduler and autoencoder ------


PIPELINE = "model_index.json"
CLASS = "_class_name"
TRANSFORMERS = ("DiTTransformer2DModel", "SD3Transformer2DModel", "FluxTransformer2DModel")


@dataclass(frozen=True)
class DiffusersFolder:
    """The folders of a diffusion model's parts.

    `scheduler` and `vae` are None if the folder holds only the transformer.
    """

    model: Path
    scheduler: Path | None
    vae: Path | None

    def config(self) -> dict[str, Any]:
        return read_json(self.model / "config.json")


def find_diffusers_folder(folder: str | os.PathLike[str]) -> DiffusersFolder | None:
    """Return the parts of a diffusers folder, or None if the folder is not one."""
    path = Path(folder)
    if (path / PIPELINE).is_file():
        root, model = path, path / "transformer"
        if not (model / "config.json").is_file():
            raise ModelError(
                f"{path}: a pipeline without a transformer/config.json; LoHan trains "
                f"{', '.join(TRANSFORMERS)}, give the folder of one"
            )
    elif (path / "config.json").is_file() and CLASS in read_json(path / "config.json"):
        root, model = path.parent, path
    else:
        return None
    inside = (root / PIPELINE).is_file()
    parts = [root / name if inside and (root / name).is_dir() else None for name in _PARTS]
    return DiffusersFolder(model, *parts)


_PARTS = ("scheduler", "vae")


def weights_folder(folder: Path) -> Path:
    """Return the folder of the trained weights: a pipeline's transformer, or `folder` itself."""
    diffusers = find_diffusers_folder(folder)
    return folder if diffusers is None else diffusers.model


def read_json(file: Path) -> dict[str, Any]:
    try:
        return read_object(file, kind=ModelError, remedy="download it again")
    except ModelError:
        return {}  # the code that needs the content reports the error


def diffusers_class(name: str, of: Path) -> Any:
    """Import diffusers, which is an optional dependency, and return one of its classes."""
    try:
        import diffusers
    except ImportError:
        raise ModelError(
            f"{of}: a diffusion model, which needs the diffusers package; "
            "pip install 'lohan[diffusion]'"
        ) from None
    return getattr(diffusers, name)


def build_diffusers(source: DiffusersFolder, *, dtype: torch.dtype) -> nn.Module:
    """Return the transformer in `dtype`, with meta parameters and real buffers on the CPU."""
    raw = source.config()
    name = str(raw.get(CLASS))
    if name not in TRANSFORMERS:
        raise ModelError(
            f"{source.model}: {name} is not a model that LoHan loads from a diffusers folder; it "
            f"loads {', '.join(TRANSFORMERS)}; build others in memory and attach them"
        )
    if "quantization_config" in raw:
        raise ModelError(
            f"{source.model}: config.json says the weights are quantized; training every parameter "
            "needs the unquantized checkpoint, give that folder"
        )
    kind = diffusers_class(name, source.model)
    try:
        with parameters_on_meta():
            built: Any = kind.from_config(raw)
    except Exception as error:
        raise ModelError(
            f"{source.model}: diffusers cannot build the model: {first_line(error)}; check "
            "config.json"
        ) from error
    # Bypass the `to` method of diffusers, which warns about parameters that are to stay in fp32.
    model: nn.Module = nn.Module.to(built, dtype)
    built.register_to_config(_name_or_path=str(source.model))
    if has_weights(source.model):
        load_buffers(model, source.model)
    return model


# -- Exporting a trained model: streamed and atomic ------------------------------------------------


_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".ot", ".onnx")
SHARD_BYTES = 5 * 10**9  # maximum size of a weight file
_TEMPLATES = "additional_chat_templates"


def export_folder(
    out: str | os.PathLike[str],
    *,
    tensors: Mapping[str, tuple[int, ...]],
    read_flat: Callable[[str, int, int], torch.Tensor],
    dtype: torch.dtype,
    source_folder: str | os.PathLike[str] | None = None,
    config: Any = None,
    generation_config: Any = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    buffers: Mapping[str, torch.Tensor] | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    mark: str | None = None,
    chat_template: str | None = None,
    card: str | None = None,
) -> Path:
    """Write the parameters `tensors` (name -> shape) in `dtype` as a complete model folder.

    read_flat(name, start, stop) returns flattened elements in any floating-point dtype. The config,
    generation settings and tokenizer files are copied from `source_folder` unless they are given as
    arguments. Without a source folder, only the arguments are written, and a config that has no
    save method is left out. A tied weight is listed once, under the name that named_parameters()
    gives it. If `mark` is given, it is recorded in the folder as the id of the run, and an existing
    folder is replaced only if it holds an export with the same id. `card` is the text of the model
    card; without it, the card of the source folder is copied.
    """
    target = Path(out).absolute()
    buffers = buffers or {}
    files = _files_to_copy(Path(source_folder)) if source_folder is not None else []
    check_target(target, overwrite=overwrite)
    specs = [FileTensor(name, dtype, tuple(shape)) for name, shape in tensors.items()]
    specs += [FileTensor(n, b.dtype, tuple(b.shape)) for n, b in buffers.items()]
    check_space(target, sum(spec.nbytes for spec in specs) + sum(_size(f) for f in files))
    check = target_check(target, overwrite=overwrite, mark=mark)
    with replacing(target, check=check, mark=mark) as folder:
        for file in files:
            if card is None or file.name != MODEL_CARD:
                _copy_synced(file, folder)
        if card is not None:
            write_new(folder / MODEL_CARD, card.encode())
        if hasattr(config, "save_config"):
            config.save_config(folder)
        elif hasattr(config, "save_pretrained"):
            config = copy.deepcopy(config)
            config.use_cache = True  # `without_cache` disables it for training only
            config.save_pretrained(folder)
        if generation_config is not None:
            generation_config.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if chat_template is not None:
            (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
            sync_path(folder / "chat_template.jinja")
        stem = _set_dtype(folder / "config.json", dtype)
        writing = ShardedWriter(folder, tensors=specs, max_shard_bytes=max_shard_bytes, stem=stem)
        with writing as writer:
            for name, shape in tensors.items():
                for start, stop in element_ranges(torch.Size(shape).numel()):
                    writer.write(name, read_flat(name, start, stop).to(dtype))
            for name, buffer in buffers.items():
                writer.write(name, buffer)
    return target


def _files_to_copy(source: Path) -> list[Path]:
    """Return all files of a model folder except weights, their indexes and hidden files."""
    if not (source / "config.json").is_file():
        raise ModelError(
            f"{source}: the folder that the model came from holds no config.json; restore it, "
            "config and tokenizer are copied from there"
        )
    return [
        path
        for path in sorted(source.iterdir())
        if not path.name.startswith(".")
        and not path.name.endswith((*_WEIGHTS, ".index.json"))
        and (path.is_file() or path.name == _TEMPLATES)
    ]


def _size(path: Path) -> int:
    return sum(_size(p) for p in path.iterdir()) if path.is_dir() else path.stat().st_size


def _copy_synced(path: Path, folder: Path) -> None:
    if path.is_dir():
        (folder / path.name).mkdir()
        for child in sorted(path.iterdir()):
            _copy_synced(child, folder / path.name)
        return
    copied = folder / path.name
    shutil.copyfile(path, copied)
    sync_path(copied)


def _set_dtype(file: Path, dtype: torch.dtype) -> str:
    """Set the exported dtype wherever config.json names one, and return the weight files' stem.

    Nested configs are included. A config of diffusers names no dtype and is left unchanged.
    """
    if not file.is_file():
        return STEMS[0]

    def visit(node: dict[str, Any]) -> None:
        for key, value in node.items():
            if key in ("dtype", "torch_dtype"):
                node[key] = str(dtype).removeprefix("torch.")
            elif isinstance(value, dict):
                visit(value)

    raw = read_object(file, kind=ModelError, remedy="restore the folder that the model came from")
    if "_class_name" in raw:
        return STEMS[1]
    if "torch_dtype" not in raw:
        raw.setdefault("dtype", None)
    visit(raw)
    without_quantization(raw)
    write_new(file, (json.dumps(raw, indent=2, ensure_ascii=False) + "\n").encode())
    return STEMS[0]
