"""Causal language models: rows of tokens, and the loss of the next one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lohan.capture.blocks import site_names
from lohan.checkpoint.adapters import base_of
from lohan.checkpoint.hf_folder import causal_config
from lohan.config import Config, Source, TrainConfig
from lohan.data import IGNORE, Dataset, open_dataset
from lohan.data import prepare as tokenise
from lohan.engine.head import shifts_labels
from lohan.engine.session import Session
from lohan.errors import ModelError
from lohan.train.task import Batch, OnProgress, load_trained
from lohan.util.units import align_up, counted

PERPLEXITY = True


def check(config: Config) -> None:
    """All settings are for it."""


def load(config: Config, *, dtype: str) -> nn.Module:
    causal_config(config.model)
    model = load_trained(config, dtype=dtype)
    if config.train.pack:
        check_packs(model)
    shifts_labels(base_of(model))
    return model


def prepare(
    sources: Sequence[Source], cache: Path, config: Config, *, option: str, resume: bool,
    progress: OnProgress, preferences: bool = False, model: Any = None,
) -> Dataset:  # fmt: skip
    """`model`: its config, if it is no causal language model."""
    ready = open_dataset(cache, seed=config.seed) if resume else None
    text: Any = (model or causal_config(config.model)).get_text_config()
    return ready or tokenise(
        sources, model_dir=config.model, cache_dir=cache, seq=config.train.seq, seed=config.seed,
        template=config.train.chat_template, vocab_size=getattr(text, "vocab_size", None),
        option=option, progress=lambda done, total: progress("tokenising", done, total),
        preferences=preferences,
    )  # fmt: skip


def describe(examples: Dataset, config: Config) -> str:
    found, batch = examples.summary, config.train.batch
    note = f"{counted(found.examples, 'example')}, {counted(found.tokens, 'token')}, "
    note += f"{found.trained_tokens:,} with loss"
    if found.cut:
        note += f"; {found.cut:,} cut to {config.train.seq} tokens"
    if found.skipped_turns:
        turns = counted(found.skipped_turns, "assistant turn")
        note += f"; {turns} without loss (chat template)"
    lines = [note]
    if found.dropped:
        lines.append(
            f"warning: {found.dropped:,} of {counted(found.examples + found.dropped, 'example')} "
            f"dropped: their first {config.train.seq} tokens hold no answer; raise --seq, or look "
            "at the data"
        )
    if found.examples < batch:
        lines.append(
            f"warning: {counted(found.examples, 'example')} and a batch of {batch}: a step sees "
            "some of them more than once; lower --batch"
        )
    return "\n".join([*lines, *rendered(examples.rendered)])


SHOWN = 1000  # characters of a prompt's end and of an answer's beginning


def rendered(shown: Mapping[str, str], *, most: int = SHOWN) -> list[str]:
    """The first example as the model sees it, with the template and system prompt of it."""
    if not shown:
        return []
    prompt, answer = shown["prompt"], shown["answer"]
    prompt = prompt if len(prompt) <= most else f"... {prompt[-most:]}"
    told = [f"{name}: {shown[key]}" for key, name in HEADS.items() if key in shown]
    texts = [f"{prompt}>>>{_beginning(answer, most)}"]
    if "rejected" in shown:
        texts.append(f"rejected: >>>{_beginning(shown['rejected'], most)}")
    lines = [f"first example ({'; '.join([*told, 'loss on what follows >>>'])}):"]
    return lines + [f"  {line}" for text in texts for line in text.splitlines()]


HEADS = {"template": "chat template", "system": "system prompt", "images": "images"}


def _beginning(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} ..."


def arrange(examples: Dataset, config: Config) -> Dataset:
    return examples.pack() if config.train.pack else examples


def shapes(config: Config, examples: list[Dataset], *, dtype: str) -> Batch:
    longest, padded = config.train.seq, False
    if examples:
        found = max(one.longest for one in examples)
        longest = min(examples[0].seq, align_up(found, 8))
        padded = not config.train.pack and any(one.shortest < one.longest for one in examples)
    return batch_shapes(config.train, longest, padded=padded)


def batch_shapes(
    train: TrainConfig, longest: int, *, padded: bool = False
) -> dict[str, torch.Tensor]:
    """`padded`: some rows are shorter, so batches have a mask: attention is another kernel then,
    with other needs."""
    shape = torch.empty((train.batch, longest), dtype=torch.long, device="meta")
    made = {"input_ids": shape, "labels": shape} | ({"position_ids": shape} if train.pack else {})
    return made | ({"attention_mask": shape} if padded else {})


def before_training(
    session: Session, examples: Dataset, config: Config, progress: OnProgress
) -> None:
    """Nothing."""


def rows(batch: Batch) -> int:
    return len(batch["input_ids"])


def part(batch: Batch, start: int, stop: int) -> Batch:
    if start < stop:
        return {name: tensor[start:stop] for name, tensor in batch.items()}
    one = {name: tensor[:1] for name, tensor in batch.items()}
    return one | {"labels": torch.full_like(one["labels"], IGNORE)}


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    found: torch.Tensor = model(**batch).loss
    return found


def tokens(model: nn.Module, batch: Batch) -> int:
    return int(batch["input_ids"].numel())


def weight(model: nn.Module, batch: Batch) -> int:
    own = shifts_labels(base_of(model))
    return int((batch["labels"][:, 1 if own else 0 :] != IGNORE).sum())


# -- Whether a model keeps examples that share a row apart, told only by their positions -----------
#
# transformers finds the borders where positions begin at 0 again, if the model hands the positions
# to the function that makes the mask. Not every model does, and then examples attend to each other
# unnoticed. So the mask that reaches the first block is looked at.


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
