"""Whether a model keeps examples that share a row apart, told by nothing but their positions.

transformers finds the borders where positions begin at 0 again, if the model hands the positions to
the function that makes the mask. Not every model does, and then examples see each other without a
word of it. So the mask that reaches the first block is looked at.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lohan.capture.blocks import site_names
from lohan.errors import ModelError

ATTENTION = ("eager", "sdpa")  # with a mask; flash attention sees borders in single rows only
LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
POSITIONS = torch.tensor([[0, 1, 0, 1, 2]])
APART = torch.tensor([[i >= j and (i < 2) == (j < 2) for j in range(5)] for i in range(5)])


def check_packs(model: nn.Module) -> None:
    """Refuses with the reason a model whose examples in one row would see each other. To be asked
    of a model that is not attached yet; its weights are not used."""
    reason = _reason(model)
    if reason is not None:
        raise ModelError(
            f"--pack: {type(model).__name__} {reason}, so examples that share a row would not be "
            "kept apart; train without --pack"
        )


def _reason(model: nn.Module) -> str | None:
    causal: Any = model
    decoder = causal.get_decoder() if hasattr(model, "get_decoder") else None
    if decoder is None or "position_ids" not in inspect.signature(decoder.forward).parameters:
        return "takes no position_ids"
    text = causal.config.get_text_config()
    used = text._attn_implementation
    if used not in ATTENTION:
        return f"uses {used} attention, which is not given a mask"
    others = set(getattr(text, "layer_types", None) or ()) - LAYERS
    if others or any(isinstance(module, nn.Conv1d) for module in model.modules()):
        kind = ", ".join(sorted(others)) or "convolution"
        return f"has layers that carry state from token to token ({kind})"
    if getattr(text, "alibi", False):
        return "counts distances over the whole row (alibi)"
    mask = _mask(model, decoder)
    if mask is None or not torch.equal(mask, APART):
        return "makes its attention mask without looking at position_ids"
    return None


class _Reached(Exception):
    def __init__(self, inputs: list[Any]) -> None:
        self.inputs = inputs


def _mask(model: nn.Module, decoder: nn.Module) -> torch.Tensor | None:
    """Who sees whom by the mask that the first block is called with, if it is."""
    shape = (*APART.shape,)
    with _stand_ins(model), torch.no_grad():
        try:
            decoder(input_ids=torch.zeros_like(POSITIONS), position_ids=POSITIONS, use_cache=False)
        except _Reached as reached:
            found = [x for x in reached.inputs if isinstance(x, torch.Tensor) and x.ndim == 4]
            masks = [x for x in found if tuple(x.shape) == (1, 1, *shape)]
            if masks:
                return masks[0][0, 0] if masks[0].dtype == torch.bool else masks[0][0, 0] == 0
        except Exception:  # what comes before the blocks needs weights: nothing is known
            return None
    return None


@contextmanager
def _stand_ins(model: nn.Module) -> Iterator[None]:
    """Embeddings without weights; the first block ends the run."""

    def end(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Reached([*args, *kwargs.values()])

    def zeros(width: int) -> Callable[..., torch.Tensor]:
        return lambda ids, *_, **__: torch.zeros(*ids.shape, width)

    sites = [model.get_submodule(name) for name in site_names(model)]
    embeddings = [site for site in sites if isinstance(site, nn.Embedding)]
    hooks = [
        site.register_forward_pre_hook(end, with_kwargs=True)
        for site in sites
        if any(True for _ in site.children())
    ]
    for site in embeddings:
        site.forward = zeros(site.embedding_dim)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for site in embeddings:
            del site.forward
        for hook in hooks:
            hook.remove()
