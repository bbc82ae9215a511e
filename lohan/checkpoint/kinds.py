"""Which model a config.json is of: the class of transformers that builds it, with its loss."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lohan.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

CAUSAL = "AutoModelForCausalLM"
KINDS = {  # auto class -> what its models do
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
    """The auto class that builds the model which the config names."""
    if is_causal(config):
        return CAUSAL
    names = config.architectures or []
    for kind in KINDS:
        if kind != CAUSAL and _built_by(kind, config) & set(names):
            return kind
    found = ", ".join(names) or f"{config.model_type} (config.json names no architecture)"
    raise ModelError(
        f"{path}: {found} is not a model that LoHan loads; it loads those for "
        f"{', '.join(KINDS.values())}, and diffusion transformers; give the folder of one, or "
        "build the model in memory and attach it"
    )


def is_causal(config: PreTrainedConfig) -> bool:
    """Whether it is a causal language model, or the body of one."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    names = config.architectures or []
    own = KNOWN.get(config.model_type)
    fits = any("CausalLM" in n or "LMHead" in n or n.endswith("Model") or n == own for n in names)
    encoder = getattr(config, "is_decoder", True) is False and "neox" not in config.model_type
    return bool(_built_by(CAUSAL, config)) and not encoder and (fits or not names)


def check_causal(config: PreTrainedConfig, path: Path | str) -> None:
    if not is_causal(config):
        kind = ", ".join(config.architectures or []) or config.model_type
        raise ModelError(
            f"{path}: {kind} is not a causal language model; give the folder of one, such as "
            "Llama, Qwen, Mistral, Gemma, GPT-2 or OPT, or write a loop of your own with "
            "lohan.load and lohan.attach, which take others too"
        )


def auto_class(kind: str) -> Any:
    import transformers

    return getattr(transformers, kind)


def _built_by(kind: str, config: PreTrainedConfig) -> set[str]:
    """Names of the classes that an auto class has for such a config."""
    known = auto_class(kind)._model_mapping
    if type(config) not in known:
        return set()
    found = known[type(config)]
    return {one.__name__ for one in (found if isinstance(found, tuple) else (found,))}
