"""The model that both runs start from: the user's folder with another config.json.

Weights are not copied: the other files are links, and tensors of layers that are left out are
simply not read. Dropout is off, since random numbers are drawn in another order where a batch goes
through a block in parts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lohan.checkpoint.hf_folder import causal_config
from lohan.errors import ModelError
from lohan.util.units import counted

LAYERS = ("num_hidden_layers", "n_layer", "num_layers")


@dataclass(frozen=True)
class ModelCopy:
    folder: Path
    layers: int
    all_layers: int
    dropout: tuple[str, ...]  # settings that were not zero

    @property
    def shrunk(self) -> bool:
        return self.layers < self.all_layers


def layer_count(model: Path) -> int:
    """Layers of a model folder, or 0 where its config does not say."""
    text = causal_config(model).get_text_config()
    return int(getattr(text, "num_hidden_layers", 0) or 0)


def copy_model(model: Path, into: Path, *, layers: int | None = None) -> ModelCopy:
    """`model` with links for files and a config of its own, with its first `layers` layers."""
    whole = layer_count(model)
    into.mkdir()
    for file in model.iterdir():
        if file.name != "config.json":
            (into / file.name).symlink_to(file.absolute())
    raw = json.loads((model / "config.json").read_text(encoding="utf-8"))
    dropout: list[str] = []
    made = _without_dropout(raw, dropout)
    if layers is not None and layers != whole:
        if not 1 <= layers < whole:
            raise ModelError(
                f"{model}: has {counted(whole, 'layer')}, {layers} were asked for; give fewer"
            )
        made = _cut(made, whole, layers)
    (into / "config.json").write_text(json.dumps(made, indent=1), encoding="utf-8")
    copy = ModelCopy(into, layer_count(into), whole, tuple(dropout))
    if copy.layers != (layers or whole):
        raise ModelError(
            f"{model}: cannot be cut to {layers} of {whole} layers (config.json names their number "
            f"otherwise than {', '.join(LAYERS)}); verify it on a machine with more memory"
        )
    return copy


def _without_dropout(value: Any, found: list[str]) -> Any:
    """The same tables with every dropout at 0; their names go to `found`."""
    if not isinstance(value, dict):
        return value
    made: dict[str, Any] = {}
    for key, inner in value.items():
        rate = isinstance(inner, (int, float)) and not isinstance(inner, bool)
        if rate and ("drop" in key or key.endswith("pdrop")):
            if inner:
                found.append(key)
            made[key] = 0.0
        else:
            made[key] = _without_dropout(inner, found)
    return made


def _cut(value: Any, whole: int, layers: int) -> Any:
    """The same tables with fewer layers: their number, and lists with an entry for each."""
    if isinstance(value, dict):
        return {
            key: layers if key in LAYERS and inner == whole else _cut(inner, whole, layers)
            for key, inner in value.items()
        }
    if isinstance(value, list) and len(value) == whole:
        return value[:layers]
    return value
