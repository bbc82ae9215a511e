"""The command line: `eval` and `generate`, forward only from a run's store or a model folder."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lohan.cli.options import option
from lohan.cli.train import check_dtype, display
from lohan.errors import ConfigError
from lohan.util.display import Display, echo
from lohan.util.libraries import set_up_libraries
from lohan.util.units import align_up, counted

if TYPE_CHECKING:
    from lohan.data import Encoder
    from lohan.engine.policies import Budget
    from lohan.train.generation import Sampling

ModelOrRun = Annotated[
    Path, typer.Argument(metavar="RUN|DIR", help="Run folder or model folder.", show_default=False)
]
Host = Annotated[str | None, option("budget.host", default=True)]
Device = Annotated[str, option("budget.device", default=True)]
DeviceMemory = Annotated[str | None, option("budget.device_memory", default=True)]
Ssd = Annotated[
    list[Path] | None,
    typer.Option(
        "--ssd",
        help="Folder for a temporary store of a model folder's weights; may be repeated.",
        show_default="the current folder",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", help="Compute type of a model folder.", show_default="its own"),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, for programs.")]


Data = Annotated[
    Path | None,
    typer.Option(
        "--data", help="Data, in any form that training data may have.", show_default=False
    ),
]
Tasks = Annotated[
    str | None,
    typer.Option(
        "--tasks",
        metavar="NAME,NAME",
        show_default=False,
        help="Tasks of lm-evaluation-harness instead of data; needs pip install 'lohan\\[eval]'.",
    ),
]
TasksDir = Annotated[
    Path | None,
    typer.Option("--tasks-dir", help="Folder with your own tasks.", show_default=False),
]
Limit = Annotated[
    int | None,
    typer.Option(
        "--limit", min=1, help="Maximum number of questions per task.", show_default="all"
    ),
]
Fewshot = Annotated[
    int | None,
    typer.Option(
        "--fewshot",
        min=0,
        help="Solved examples before each question.",
        show_default="as the task says",
    ),
]


def evaluate(
    folder: ModelOrRun,
    data: Data = None,
    tasks: Tasks = None,
    tasks_dir: TasksDir = None,
    limit: Limit = None,
    fewshot: Fewshot = None,
    host: Host = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Examples per pass.")] = 8,
    seq: Annotated[int, option("train.seq", default=True)] = 1024,
    pack: Annotated[
        bool, typer.Option("--pack", help="Fill each row with several short examples.")
    ] = False,
    ssd: Ssd = None,
    device: Device = "auto",
    device_memory: DeviceMemory = None,
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Compute loss and perplexity, or run tasks of lm-evaluation-harness."""
    check_dtype(dtype)
    _check_inputs(data, tasks, {"--tasks-dir": tasks_dir, "--limit": limit, "--fewshot": fewshot})
    if tasks is not None and pack:
        raise ConfigError("--pack: goes with --data, not with --tasks; leave it out")
    set_up_libraries()
    from lohan.engine.policies import Budget

    how: dict[str, Any] = {
        "budget": Budget(host=host, device=device_memory, ssd=ssd or ()),
        "device": device,
        "dtype": dtype,
        "batch": batch,
        "seq": seq,
    }
    result: dict[str, Any]
    with display(stderr=as_json) as shown:
        if tasks is not None:
            from lohan.train.lm_eval_tasks import run_tasks

            names = [name.strip() for name in tasks.split(",")]
            how |= {"limit": limit, "fewshot": fewshot, "folder": tasks_dir}
            result = run_tasks(folder, names, shown=shown, **how)
            lines = [
                f"{task}: " + "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
                for task, metrics in result.items()
            ]
        else:
            assert data is not None
            result = evaluate_file(folder, data, pack=pack, shown=shown, **how)
            lines = [
                f"loss {result['loss']:.4f}  perplexity {result['perplexity']:.4g}  on "
                f"{counted(result['tokens'], 'token')} of "
                f"{counted(result['examples'], 'example')}, {result['tokens_per_s']:,.0f} tok/s"
            ]
        if as_json:
            echo(json.dumps(result, indent=1))
        else:
            for line in lines:
                shown.note(line)


def _check_inputs(data: Path | None, tasks: str | None, others: dict[str, Any]) -> None:
    if data is None and not tasks:
        raise ConfigError("eval: nothing to evaluate on; give --data or --tasks")
    if data is not None and tasks:
        raise ConfigError(f"--data {data} and --tasks {tasks}: give one of them")
    for name, value in others.items():
        if value is not None and tasks is None:
            raise ConfigError(f"{name}: {name} goes with --tasks; leave it out")


def generate(
    folder: ModelOrRun,
    prompt: Annotated[
        list[str],
        typer.Option(
            "--prompt",
            metavar="TEXT|FILE",
            show_default=False,
            help="A prompt, or a file with one per line. May be repeated; all run together.",
        ),
    ],
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, help="Maximum length of an answer in tokens.")
    ] = 128,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature", min=0.0, help="Sampling temperature. 0 takes the most likely token."
        ),
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(
            "--top-p", help="Sample from the likeliest tokens with this total probability."
        ),
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed for sampling.")] = 0,
    host: Host = None,
    ssd: Ssd = None,
    device: Device = "auto",
    device_memory: DeviceMemory = None,
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Answer prompts with the weights of a run or a model folder."""
    check_dtype(dtype)
    if not 0 < top_p <= 1:
        raise ConfigError(f"--top-p: got {top_p:g}, wants a share above 0 and at most 1")
    set_up_libraries()
    from lohan.engine.policies import Budget
    from lohan.train.generation import Sampling

    sampling = Sampling(
        max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed
    )
    budget = Budget(host=host, device=device_memory, ssd=ssd or ())
    with display(stderr=True) as shown:
        pairs = answer(
            folder,
            prompt,
            sampling,
            budget=budget,
            device=device,
            dtype=dtype,
            shown=shown,
            live=not as_json,
        )
    if as_json:
        echo(json.dumps(pairs, indent=1))
    elif len(pairs) > 1:
        for pair in pairs:
            echo(f"{pair['prompt']}\n  {pair['text']}\n")


@contextmanager
def tidy_end() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C in the `with` body, so that temporary files are removed."""

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def evaluate_file(
    folder: Path,
    data: Path,
    *,
    budget: Budget,
    device: str,
    dtype: str | None,
    batch: int,
    seq: int,
    pack: bool,
    shown: Display,
) -> dict[str, Any]:
    """Return the loss of the model over all examples of a file."""
    from lohan.checkpoint.hf_folder import causal_config
    from lohan.data import prepare
    from lohan.train import evaluation, streaming
    from lohan.train.language import CausalLM

    source = streaming.source_of(folder)
    vocabulary = getattr(causal_config(source.folder).get_text_config(), "vocab_size", None)
    with tidy_end(), TemporaryDirectory(prefix="lohan-eval-") as cache:
        dataset = prepare(
            data,
            model_dir=source.folder,
            cache_dir=Path(cache),
            seq=seq,
            vocab_size=vocabulary,
            template=source.template,
            progress=lambda done, total: shown.advance("tokenising", done, total),
        )
        examples = len(dataset)
        dataset = dataset.pack() if pack else dataset
        rows, longest = min(batch, len(dataset)), min(seq, align_up(dataset.longest, 8))
        with streaming.open_stream(
            source,
            streaming.Shape(rows, longest, packed=pack),
            budget,
            device=device,
            dtype=dtype,
            progress=lambda done, total: shown.advance("loading", done, total),
        ) as session:
            result = evaluation.evaluate(
                session.model,
                dataset,
                batch=batch,
                task=CausalLM(),
                progress=lambda done, total: shown.advance("evaluating", done, total),
            )
    assert result is not None
    return {
        "loss": result.loss,
        "perplexity": result.perplexity,
        "tokens": result.tokens,
        "examples": examples,
        "seconds": result.seconds,
        "tokens_per_s": result.tokens / result.seconds,
    }


def answer(
    folder: Path,
    prompts: Sequence[str],
    sampling: Sampling,
    *,
    budget: Budget,
    device: str,
    dtype: str | None,
    shown: Display,
    live: bool,
) -> list[dict[str, str]]:
    """Return each prompt with its answer; print a single answer while it is generated."""
    from lohan.checkpoint.hf_folder import causal_config
    from lohan.data import Encoder
    from lohan.train import generation, streaming

    source = streaming.source_of(folder)
    causal_config(source.folder)
    encoder = Encoder(source.folder, template=source.template)
    texts = generation.read_prompts(prompts)
    ids = generation.encode_prompts(encoder, texts)
    longest = max(map(len, ids))
    shape = streaming.Shape(len(ids), longest, longest + sampling.max_new_tokens)
    with (
        tidy_end(),
        streaming.open_stream(
            source,
            shape,
            budget,
            device=device,
            dtype=dtype,
            progress=lambda done, total: shown.advance("loading", done, total),
        ) as session,
    ):
        streamer = _live(encoder) if live and len(ids) == 1 else None
        answers = generation.generate(session.model, encoder, ids, sampling, streamer=streamer)
    return [{"prompt": p, "text": t} for p, t in zip(texts, answers, strict=True)]


def _live(encoder: Encoder) -> Any:
    """Return a streamer that prints words as soon as they are complete."""
    from transformers import TextStreamer

    class Printed(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            echo(text, nl=stream_end)

    return Printed(encoder.tokenizer("generation"), skip_prompt=True, skip_special_tokens=True)


def register(app: typer.Typer) -> None:
    app.command("eval")(evaluate)
    app.command()(generate)
