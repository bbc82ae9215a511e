"""What `lohan eval` and `lohan generate` do."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lohan.checkpoint.hf_folder import causal_config
from lohan.data import Encoder, prepare
from lohan.engine.policies import Budget
from lohan.train import language
from lohan.train.forward_only import (
    Sampling,
    Shape,
    encode_prompts,
    evaluate,
    generate,
    open_stream,
    read_prompts,
    source_of,
)
from lohan.util.display import Display, echo
from lohan.util.units import align_up


@contextmanager
def tidy_end() -> Iterator[None]:
    """SIGTERM ends the work as Ctrl-C does: what was made meanwhile is removed."""

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def evaluate_file(
    place: Path, data: Path, *, budget: Budget, device: str, dtype: str | None, batch: int,
    seq: int, pack: bool, shown: Display,
) -> dict[str, Any]:  # fmt: skip
    """Loss of the model on every example of a file."""
    source = source_of(place)
    vocabulary = getattr(causal_config(source.folder).get_text_config(), "vocab_size", None)
    with tidy_end(), TemporaryDirectory(prefix="lohan-eval-") as cache:
        dataset = prepare(
            data, model_dir=source.folder, cache_dir=Path(cache), seq=seq, vocab_size=vocabulary,
            template=source.template,
            progress=lambda done, total: shown.advance("tokenising", done, total),
        )  # fmt: skip
        examples = len(dataset)
        dataset = dataset.pack() if pack else dataset
        rows, longest = min(batch, len(dataset)), min(seq, align_up(dataset.longest, 8))
        with open_stream(
            source, Shape(rows, longest, packed=pack), budget, device=device, dtype=dtype,
            progress=lambda done, total: shown.advance("loading", done, total),
        ) as session:  # fmt: skip
            found = evaluate(
                session.model, dataset, batch=batch, task=language,
                progress=lambda done, total: shown.advance("evaluating", done, total),
            )  # fmt: skip
    assert found is not None
    return {
        "loss": found.loss,
        "perplexity": found.perplexity,
        "tokens": found.tokens,
        "examples": examples,
        "seconds": found.seconds,
        "tokens_per_s": found.tokens / found.seconds,
    }


def answer(
    place: Path, prompts: Sequence[str], sampling: Sampling, *, budget: Budget, device: str,
    dtype: str | None, shown: Display, live: bool,
) -> list[dict[str, str]]:  # fmt: skip
    """Each prompt with what the model makes of it; a single one is printed as it comes."""
    source = source_of(place)
    causal_config(source.folder)
    encoder, texts = Encoder(source.folder, template=source.template), read_prompts(prompts)
    ids = encode_prompts(encoder, texts)
    longest = max(map(len, ids))
    shape = Shape(len(ids), longest, longest + sampling.max_new_tokens)
    with tidy_end(), open_stream(
        source, shape, budget, device=device, dtype=dtype,
        progress=lambda done, total: shown.advance("loading", done, total),
    ) as session:  # fmt: skip
        streamer = _live(encoder) if live and len(ids) == 1 else None
        answers = generate(session.model, encoder, ids, sampling, streamer=streamer)
    return [{"prompt": p, "text": t} for p, t in zip(texts, answers, strict=True)]


def _live(encoder: Encoder) -> Any:
    """Prints words when they are whole."""
    from transformers import TextStreamer

    class Printed(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            echo(text, nl=stream_end)

    return Printed(encoder.tokenizer("generation"), skip_prompt=True, skip_special_tokens=True)
