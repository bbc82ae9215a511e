"""Causal language models and vision-language models, trained to predict the next token."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lohan.capture.blocks import site_names
from lohan.checkpoint.adapters import base_of
from lohan.checkpoint.hf_folder import causal_config
from lohan.config import Config
from lohan.data import IGNORE, Dataset, open_dataset
from lohan.data import prepare as tokenise
from lohan.data.cache import check_source
from lohan.data.dataset import Fields, Row
from lohan.data.images import ROWS, Conversations, load_processor, rows_with_images
from lohan.data.reading import read_rows
from lohan.data.text import rendered
from lohan.engine.head import shifts_labels
from lohan.errors import DataError, ModelError
from lohan.train.task import (
    Batch,
    DataRequest,
    Task,
    check_dropped,
    few_warning,
    folder_files,
    kind_in,
    load_trained,
    refuse_text_settings,
)
from lohan.util.units import align_up, counted


def remarks(examples: Dataset, config: Config) -> list[str]:
    """Return messages about the files read, and about tools that the chat template omits."""
    lines = folder_files(config)
    if count := examples.summary.unseen_tools:
        lines.append(
            f"warning: {counted(count, 'example')} with tools, which the chat template does not "
            "show to the model; give one that does with --chat-template"
        )
    return lines


class CausalLM(Task[Dataset]):
    PERPLEXITY, PIPELINE = True, "text-generation"

    def check(self, config: Config) -> None:
        """Accept all settings."""

    def load(self, config: Config, *, dtype: str) -> nn.Module:
        causal_config(config.model)
        model = load_trained(config, dtype=dtype)
        if config.train.pack:
            check_packs(model)
        shifts_labels(base_of(model))
        return model

    def prepare(self, data: DataRequest) -> Dataset:
        return tokenised(data, causal_config(data.config.model))

    def describe(self, examples: Dataset, config: Config) -> str:
        summary = examples.summary
        note = f"{counted(summary.examples, 'example')}, {counted(summary.tokens, 'token')}, "
        note += f"{summary.trained_tokens:,} with loss"
        if summary.cut:
            note += f"; {summary.cut:,} cut to {config.train.seq} tokens"
        if summary.skipped_turns:
            turns = counted(summary.skipped_turns, "assistant turn")
            note += f"; {turns} without loss (chat template)"
        lines = [note]
        if summary.dropped:
            lines.append(
                f"warning: {summary.dropped:,} of "
                f"{counted(summary.examples + summary.dropped, 'example')} dropped: their first "
                f"{config.train.seq} tokens hold no answer; raise --seq, or look at the data"
            )
        lines += remarks(examples, config)
        lines += few_warning(summary.examples, counted(summary.examples, "example"), config)
        return "\n".join([*lines, *rendered(examples.rendered)])

    def arrange(self, examples: Dataset, config: Config) -> Dataset:
        return examples.pack() if config.train.pack else examples

    def shapes(self, config: Config, examples: list[Dataset], *, dtype: str) -> Batch:
        longest, padded = config.train.seq, False
        if examples:
            seq = max(one.longest for one in examples)
            longest = min(examples[0].seq, align_up(seq, 8))
            padded = not config.train.pack and any(one.shortest < one.longest for one in examples)
        shape = torch.empty((config.train.batch, longest), dtype=torch.long, device="meta")
        shapes = {"input_ids": shape, "labels": shape}
        if config.train.pack:
            shapes["position_ids"] = shape
        if padded:  # A mask selects another attention kernel, which may need more memory.
            shapes["attention_mask"] = shape
        return shapes

    def part(self, batch: Batch, start: int, stop: int) -> Batch:
        if start < stop:
            return {name: tensor[start:stop] for name, tensor in batch.items()}
        one = {name: tensor[:1] for name, tensor in batch.items()}
        return one | {"labels": torch.full_like(one["labels"], IGNORE)}

    def weight(self, model: nn.Module, batch: Batch) -> int:
        return tokens_with_loss(model, batch)


def tokenised(data: DataRequest, model: Any, *, preferences: bool = False) -> Dataset:
    """Return the tokenised data, from the cache if the run is resumed."""
    config = data.config
    vocab_size = getattr(model.get_text_config(), "vocab_size", None)
    ready = None
    if data.resume:
        ready = open_dataset(data.cache, seed=config.seed, vocab_size=vocab_size)
    if ready is not None:
        return ready
    dataset = tokenise(
        data.sources,
        model_dir=config.model,
        cache_dir=data.cache,
        seq=config.train.seq,
        seed=config.seed,
        template=config.train.chat_template,
        option=data.option,
        vocab_size=vocab_size,
        progress=partial(data.progress, "tokenising"),
        preferences=preferences,
    )
    kept = len(dataset.ratings) or dataset.summary.examples // (2 if preferences else 1)
    check_dropped(data, dataset.summary.dropped, kept)
    return dataset


def tokens_with_loss(model: nn.Module, batch: Batch) -> int:
    shifted = shifts_labels(base_of(model))
    return int((batch["labels"][:, 1 if shifted else 0 :] != IGNORE).sum())


# -- Vision-language models: conversations about images, with loss on the answers ------------------


TOWERS = ("vision_tower", "visual", "vision_model", "vision_encoder", "image_tower", "vision_embed")
# The module inside a vision tower that projects the tower's output for the language model.
PROJECTOR = "merger"


class VisionLanguage(Task[Fields]):
    NAME, KIND = "vision-language", "AutoModelForImageTextToText"
    PERPLEXITY = True

    def check(self, config: Config) -> None:
        kind_in(config, self.NAME, {self.KIND: None})
        refuse_text_settings(config, self.NAME)

    def load(self, config: Config, *, dtype: str) -> nn.Module:
        return load_trained(config, dtype=dtype, freeze=vision_parts)

    def prepare(self, data: DataRequest) -> Fields:
        folder, train = data.config.model, data.config.train
        conversations = Conversations(
            load_processor(folder), folder, train.seq, train.chat_template
        )

        def examples(path: Path) -> Iterator[Row]:
            check_source(path, data.option)
            rows = read_rows(path, partial(data.progress, "tokenising"))
            return rows_with_images(rows, path, conversations)

        ready = data.fields(
            examples,
            show=conversations.shown,
            collate=conversations.collate,
            about=lambda: {
                "files": conversations.images.files,
                "cut": conversations.cut,
                "dropped": conversations.dropped,
            },
        )
        if ready is None:
            raise DataError(
                f"{data.sources[0].path}: no example is left to train on "
                f"({conversations.dropped} dropped: the first {train.seq} tokens hold no "
                "answer); raise --seq or check the file"
            )
        if not data.resume:
            check_dropped(data, ready.about["dropped"], len(ready))
        conversations.images.restore(ready.about)
        return ready

    def describe(self, examples: Fields, config: Config) -> str:
        about = examples.about
        note = f"{counted(len(examples), 'example')}, {counted(len(about['files']), 'image')}"
        if about["cut"]:
            note += f"; {about['cut']:,} longer than {config.train.seq} tokens"
        if about["dropped"]:
            note += (
                f"\nwarning: {about['dropped']:,} dropped: their first {config.train.seq} tokens "
                "hold no answer, or not all of their images; raise --seq, or look at the data"
            )
        return "\n".join([note, *rendered(examples.rendered)])

    def shapes(self, config: Config, examples: list[Fields], *, dtype: str) -> Batch:
        """Return the largest batch with its values, because images need more than shapes.

        The model puts images at the positions of image tokens, which depend on the values.
        """
        if examples:
            return inputs_of(
                max(
                    (next(one.passes(config.train.batch)) for one in examples),
                    key=lambda batch: batch["input_ids"].numel(),
                )
            )
        conversations = Conversations(load_processor(config.model), config.model, config.train.seq)
        return inputs_of(conversations.example(config.train.batch))

    def part(self, batch: Batch, start: int, stop: int) -> Batch:
        """Return the examples from `start` up to `stop` as a batch, or one if that range is empty.

        The examples are collated again instead of slicing the batch, because pixel tensors have no
        batch dimension.
        """
        low, high = (start, stop) if start < stop else (0, 1)
        made_by, examples = batch[ROWS]
        collated: Batch = made_by.collate(examples[low:high])
        return collated

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = model(**inputs_of(batch)).loss
        return loss

    def weight(self, model: nn.Module, batch: Batch) -> int:
        return tokens_with_loss(model, batch)


def vision_parts(model: nn.Module) -> list[str]:
    """Return the names of the modules of the vision tower, without its projector."""
    parts: list[str] = []
    for name, tower in model.named_modules():
        inside = name.rpartition(".")[0].split(".")
        if name.rpartition(".")[2] not in TOWERS or set(inside) & set(TOWERS):
            continue
        children = [child for child, _ in tower.named_children()]
        encoders = [child for child in children if PROJECTOR not in child]
        parts += (
            [name] if len(encoders) == len(children) else [f"{name}.{child}" for child in encoders]
        )
    return [name for name in parts if any(True for _ in model.get_submodule(name).parameters())]


def inputs_of(batch: Batch) -> Batch:
    return {name: value for name, value in batch.items() if name != ROWS}


# -- Packing: whether a model separates the examples of a row, given only their positions ----------
#
# transformers finds the boundaries where positions restart at 0, if the model passes the positions
# to the function that makes the mask. Not every model does, and then examples silently attend to
# each other. Therefore the mask that the first block receives is examined.


# Attention implementations that use a mask. Flash attention recognises boundaries only in batches
# of one row.
ATTENTION = ("eager", "sdpa")
LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
POSITIONS = torch.tensor([[0, 1, 0, 1, 2]])
APART = torch.tensor([[i >= j and (i < 2) == (j < 2) for j in range(5)] for i in range(5)])


def check_packs(model: nn.Module) -> None:
    """Raise ModelError if the examples that share a row would attend to each other.

    The model must not be attached yet. Its weights are not used.
    """
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
    """Return the attention mask that the first block is called with, or None if it has none."""
    shape = (*APART.shape,)
    with _stand_ins(model), torch.no_grad():
        try:
            decoder(input_ids=torch.zeros_like(POSITIONS), position_ids=POSITIONS, use_cache=False)
        except _Reached as reached:
            candidates = [x for x in reached.inputs if isinstance(x, torch.Tensor) and x.ndim == 4]
            masks = [x for x in candidates if tuple(x.shape) == (1, 1, *shape)]
            if masks:
                return masks[0][0, 0] if masks[0].dtype == torch.bool else masks[0][0, 0] == 0
        except Exception:  # The code before the blocks needs weights, so the mask stays unknown.
            return None
    return None


@contextmanager
def _stand_ins(model: nn.Module) -> Iterator[None]:
    """Replace embeddings by zeros, and raise `_Reached` when the first block is called."""

    def end(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Reached([*args, *kwargs.values()])

    def zeros(width: int) -> Callable[..., torch.Tensor]:
        return lambda ids, *_, **__: torch.zeros(*ids.shape, width)

    modules = [model.get_submodule(name) for name in site_names(model)]
    embeddings = [module for module in modules if isinstance(module, nn.Embedding)]
    hooks = [
        module.register_forward_pre_hook(end, with_kwargs=True)
        for module in modules
        if any(True for _ in module.children())
    ]
    for module in embeddings:
        module.forward = zeros(module.embedding_dim)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in embeddings:
            del module.forward
        for hook in hooks:
            hook.remove()
