"""The command line: `eval` and `generate`, forward only from a run's store or a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from lohan.cli.options import option
from lohan.cli.train import check_dtype, display
from lohan.errors import ConfigError
from lohan.util.display import echo
from lohan.util.system import set_up_libraries
from lohan.util.units import counted

Place = Annotated[
    Path, typer.Argument(metavar="RUN|DIR", help="A run or a model folder.", show_default=False)
]
Host = Annotated[str | None, option("budget.host")]
Device = Annotated[str, option("budget.device")]
DeviceMemory = Annotated[str | None, option("budget.device_memory")]
Ssd = Annotated[
    list[Path] | None,
    typer.Option("--ssd", help="Where the weights of a model folder go meanwhile; may be repeated.",
                 show_default="the current folder"),
]  # fmt: skip
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", help="Compute type for a model folder.", show_default="its own"),
]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]


def evaluate(
    place: Place,
    data: Annotated[Path, typer.Option("--data", help="Data as for training.", show_default=False)],
    host: Host = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Examples at a time.")] = 8,
    seq: Annotated[int, option("train.seq")] = 1024,
    pack: Annotated[bool, typer.Option("--pack", help="Several short examples to a row.")] = False,
    ssd: Ssd = None,
    device: Device = "auto",
    device_memory: DeviceMemory = None,
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Loss and perplexity on a file of examples."""
    check_dtype(dtype)
    set_up_libraries()
    from lohan.cli.forward_run import evaluate_file
    from lohan.engine.policies import Budget

    budget = Budget(host=host, device=device_memory, ssd=ssd or ())
    with display(stderr=as_json) as shown:
        made = evaluate_file(
            place, data, budget=budget, device=device, dtype=dtype, batch=batch, seq=seq,
            pack=pack, shown=shown,
        )  # fmt: skip
        if as_json:
            echo(json.dumps(made, indent=1))
            return
        shown.note(
            f"loss {made['loss']:.4f}  perplexity {made['perplexity']:.4g}  on "
            f"{counted(made['tokens'], 'token')} of {counted(made['examples'], 'example')}, "
            f"{made['tokens_per_s']:,.0f} tok/s"
        )


def generate(
    place: Place,
    prompt: Annotated[
        list[str],
        typer.Option(
            "--prompt", metavar="TEXT|FILE", show_default=False,
            help="A prompt, or a file with one per line; may be repeated. All go together.",
        ),
    ],
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, help="Longest answer in tokens.")
    ] = 128,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0 takes the most likely token.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Choose among the likeliest tokens of this share.")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the choice.")] = 0,
    host: Host = None,
    ssd: Ssd = None,
    device: Device = "auto",
    device_memory: DeviceMemory = None,
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Answers to prompts, by weights that stream from SSD."""
    check_dtype(dtype)
    if not 0 < top_p <= 1:
        raise ConfigError(f"--top-p: got {top_p:g}, wants a share above 0 and at most 1")
    set_up_libraries()
    from lohan.cli.forward_run import answer
    from lohan.engine.policies import Budget
    from lohan.train.forward_only import Sampling

    sampling = Sampling(
        max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed
    )
    budget = Budget(host=host, device=device_memory, ssd=ssd or ())
    with display(stderr=True) as shown:
        pairs = answer(
            place, prompt, sampling, budget=budget, device=device, dtype=dtype, shown=shown,
            live=not as_json,
        )  # fmt: skip
    if as_json:
        echo(json.dumps(pairs, indent=1))
    elif len(pairs) > 1:
        _print_pairs(pairs)


def _print_pairs(pairs: list[dict[str, Any]]) -> None:
    for pair in pairs:
        echo(f"{pair['prompt']}\n  {pair['text']}\n")


def register(app: typer.Typer) -> None:
    app.command("eval")(evaluate)
    app.command()(generate)
