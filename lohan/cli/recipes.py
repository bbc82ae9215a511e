"""`lohan init`, which writes a commented settings file, and the setting names of other trainers.

The file contains what the planner would choose for a model, data and a machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lohan.cli.options import MODEL_HELP, Gpus, Json, Machine, Ssds, option
from lohan.config import field_of
from lohan.errors import BudgetError, ConfigError
from lohan.util.display import echo
from lohan.util.files import write_atomic
from lohan.util.units import AUTO, GiB, align_up, format_bytes, format_seconds

if TYPE_CHECKING:
    from lohan.model.machine import Profile
    from lohan.planner.machine_plan import MachinePlan, PlanRequest

BATCHES = tuple(2**n for n in range(9))
FAST_SHARE = 0.9  # share of the best speed from which a batch counts as nearly the fastest
USUAL_BATCH = 8  # rows; training is usually stable with this many, and fewer are a last resort
SAMPLED_EXAMPLES = 500  # examples that are tokenised to choose the sequence length
SEQ, LONGEST = 1024, 8192  # default and largest sequence length, in tokens
STEPS_PER_PASS = 10  # smallest number of steps in an epoch
UNKNOWN_EXAMPLES = 2**30  # number of examples if they were not counted


def init(
    model: Annotated[str, typer.Option("--model", help=MODEL_HELP, show_default=False)],
    data: Annotated[Path, typer.Option("--data", help="Training data file.", show_default=False)],
    file: Annotated[Path, typer.Option("--file", "-o", help="Settings file to write.")] = Path(
        "lohan.toml"
    ),
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Run folder. Default: FILE-run."),
    ] = None,
    ssd: Annotated[list[Path] | None, option("budget.ssd")] = None,
    machine: Machine = None,
    ssds: Ssds = None,
    gpus: Gpus = None,
    as_json: Json = False,
) -> None:
    """Write a settings file with the planner's choices and their reasons.

    Without --machine it is for this machine, which is measured once; that takes less than a
    minute.
    """
    if os.path.lexists(file):  # a dangling link is not overwritten either
        raise ConfigError(f"--file {file}: the file already exists; give another name")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"--file {file}: no such folder; create it, or give another name")
    run = (out or file.with_name(f"{file.stem}-run")).resolve()
    if not data.exists():
        raise ConfigError(f"--data {data}: no such file; check the name")
    from lohan.model.options import PlanOptions, with_log
    from lohan.planner import presets
    from lohan.planner.machine_plan import PlanRequest
    from lohan.tools.plan_request import machine_of

    if machine is None:
        profile, drives = _this_machine(ssd or [], file, ssds=ssds, gpus=gpus)
    else:
        profile = machine_of(machine, ssds=len(ssd) if ssd else ssds, gpus=gpus)
        drives = [str(p) for p in ssd or []] or [f"/nvme{n}" for n in range(len(profile.drives))]
    host = _host(profile.host_bytes)
    host_line = (
        f"host = {_size(host)}  # of {format_bytes(profile.host_bytes)}; the rest is for Python"
    )
    budget = [host_line, f"ssd = {json.dumps(drives)}  # a folder on each drive"]
    budget += [f"gpus = {profile.gpus}"] if profile.gpus > 1 else []
    task = _task(Path(model), data)
    if task not in ("language", "preference"):
        _write(file, _plain_recipe(Path(model), data, file, run, task, profile, budget))
        if as_json:
            echo(json.dumps({"file": str(file), "task": task, "host_bytes": host}, indent=1))
            return
        echo(
            f"{file}: --task {task}, {format_bytes(host)} of memory; `lohan train --config {file} "
            "--dry-run` plans it"
        )
        return
    answers = 2 if task == "preference" else 1  # per row
    seq, why_seq, examples = _sequence(Path(model), data, preferences=answers == 2)
    dtype = "bf16" if profile.has_gpu else "fp32"
    options = PlanOptions(dtype=dtype, clip=1.0, can_rerun=True, commit=None)
    request = PlanRequest(
        model=presets.model(model),
        machine=profile,
        batch=1,
        seq=seq,
        host=host,
        options=with_log(options, AUTO, commit_every=AUTO),
    )
    speeds, planned = _batches(request, most=max(1, examples // STEPS_PER_PASS), answers=answers)
    batch = planned.batch // answers
    _write(file, _recipe(model, data, file, run, task, planned, batch, speeds, budget, why_seq))
    if as_json:
        facts = {"file": str(file), "task": task, "batch": batch, "seq": seq, "host_bytes": host}
        echo(json.dumps(facts, indent=1))
        return
    echo(f"{file}: batch {batch}, {seq} tokens, {format_bytes(host)} of memory")
    echo(f"start with: lohan train --config {file}")


def _write(file: Path, text: str) -> None:
    try:
        write_atomic(file, text.encode())
    except OSError as error:
        raise ConfigError(
            f"--file {file}: cannot be written: {error.strerror}; give another name"
        ) from None


def _this_machine(
    ssd: list[Path], file: Path, *, ssds: int | None, gpus: int | None
) -> tuple[Profile, list[str]]:
    """Measure this machine and return its profile and the folders on its drives.

    The folders are those of --ssd, otherwise those of the last `lohan profile`, otherwise the
    folder of the settings file.
    """
    if ssds is not None:
        raise ConfigError(
            f"--ssds {ssds}: this machine's drives are named, not counted; give --ssd DIR once for "
            "each, or --machine"
        )
    from dataclasses import replace

    from lohan.device.choose import canonical_name
    from lohan.engine.profile import ComputePlace, cached_profile, latest_profile
    from lohan.util.display import open_display
    from lohan.util.libraries import set_up_libraries

    set_up_libraries()
    last = None if ssd else latest_profile()
    folders = ssd or [Path(drive.name) for drive in (last.drives if last else ())]
    if not folders or (last and not all(folder.is_dir() for folder in folders)):
        folders, last = [file.absolute().parent], None
    if last is None:
        from rich.console import Console

        shown = open_display(Console(stderr=True))
        try:
            place = ComputePlace(canonical_name("auto"))
            last = cached_profile(folders, place=place, progress=shown.advance)
        finally:
            shown.close()
    profile = last if gpus is None else replace(last, gpus=gpus)
    return profile, [str(folder.resolve()) for folder in folders]


def _host(free: int) -> int:
    """Return the host budget for `free` bytes; Python and torch need memory in addition to it."""
    most = max(free // 2, min(int(0.95 * free), free - GiB))
    return most // GiB * GiB or most


def _size(host: int) -> str:
    return json.dumps(format_bytes(host).replace(" ", "").replace(".00", ""))


def _task(model: Path, data: Path) -> str:
    """Return the task that fits the model folder and the data; presets are language models."""
    task = "language"
    if model.is_dir():
        from lohan.train.inputs import task_of_model
        from lohan.util.libraries import set_up_libraries

        set_up_libraries()
        task = task_of_model(model)
    return "preference" if task == "language" and _loss(data) else task


def _loss(data: Path) -> str:
    """Return the preference loss that fits the first row of the data, or "" for other data."""
    from lohan.data.reading import files_of, read_rows, suffix_of

    if suffix_of(data) == ".txt" or not files_of(data):
        return ""
    _, row = next(iter(read_rows(data, lambda done, total: None)), ("", {}))
    if {"chosen", "rejected"} <= row.keys():
        return "dpo"
    return "kto" if {"prompt", "completion", "label"} <= row.keys() else ""


def _plain_recipe(
    model: Path,
    data: Path,
    file: Path,
    run: Path,
    task: str,
    machine: Profile,
    budget: list[str],
) -> str:
    """Return a settings file without a forecast, because only language models have one."""
    lines = [
        f"# {task} on {machine.name}: lohan train --config {file.name}; --dry-run plans it",
        "",
        f"model = {json.dumps(str(model.resolve()))}",
        f"data = {json.dumps(str(data.resolve()))}  # docs/tasks.md says what rows it has",
        f"out = {json.dumps(str(run))}",
        f"task = {json.dumps(task)}  # what the model is made for",
        "",
        "[train]",
        "batch = 8",
        *(["seq = 1024  # longer examples are cut"] if task != "diffusion" else []),
        f"dtype = {json.dumps('bf16' if machine.has_gpu else 'fp32')}",
        "epochs = 1.0",
        "lr = 1e-5",
        *(
            ['# freeze = ["none"]  # trains the vision tower too']
            if task == "vision-language"
            else []
        ),
        "",
        "[budget]",
        *budget,
        "",
        "[eval]",
        "split = 0.02  # held back, and evaluated at the end",
    ]
    return "\n".join(lines) + "\n"


def _sequence(model: Path, data: Path, *, preferences: bool) -> tuple[int, str, int]:
    """Return the sequence length, the reason for it, and a lower bound on the number of examples.

    The length has room for the longest of the first examples.
    """
    if not model.is_dir():
        return SEQ, "the default: there is no tokenizer to look at the data with", UNKNOWN_EXAMPLES
    from lohan.data.reading import read_examples, suffix_of
    from lohan.data.text import Encoder
    from lohan.util.libraries import set_up_libraries

    set_up_libraries()
    if suffix_of(data) == ".txt":
        return SEQ, "the default: a text is cut into pieces of any length", UNKNOWN_EXAMPLES
    encoder = Encoder(model)
    read = read_examples(data, encoder=encoder, seq=LONGEST, progress=None, preferences=preferences)
    lengths = [max(len(ids) for ids, _ in unit) for _, (unit, _) in islice(read, SAMPLED_EXAMPLES)]
    longest = max(lengths)
    seq = min(LONGEST, align_up(longest, 64))
    count = len(lengths) if len(lengths) < SAMPLED_EXAMPLES else UNKNOWN_EXAMPLES
    return seq, f"the longest of the first {len(lengths)} examples has {longest} tokens", count


def _batches(
    request: PlanRequest, *, most: int, answers: int
) -> tuple[dict[int, float], MachinePlan]:
    """Return tokens per second by batch, and the plan for the proposed batch.

    The proposed batch is the smallest batch of at least USUAL_BATCH rows that is nearly the
    fastest. If none of those fits, it is the largest batch that fits. Batches above `most` are not
    considered. Each row has `answers` answers.
    """
    from dataclasses import replace

    from lohan.planner.machine_plan import plan_for_machine

    plans: dict[int, MachinePlan] = {}
    for batch in (batch for batch in BATCHES if batch <= most):
        try:
            plans[batch] = plan_for_machine(replace(request, batch=batch * answers))
        except BudgetError:
            if not plans:
                raise
            break
    speeds = {b: plan.forecast.tokens_per_s for b, plan in plans.items() if plan.forecast}
    usual_speeds = {batch: speed for batch, speed in speeds.items() if batch >= USUAL_BATCH}
    usual_speeds = usual_speeds or {max(speeds): speeds[max(speeds)]}
    best = max(usual_speeds.values())
    chosen = next(batch for batch, speed in usual_speeds.items() if speed >= FAST_SHARE * best)
    return speeds, plans[chosen]


def _why_batch(batch: int) -> str:
    if batch < USUAL_BATCH:
        return f"the largest that fits, or of which the data has {STEPS_PER_PASS}; more is usual"
    return f"the smallest from {USUAL_BATCH} on that has {FAST_SHARE:.0%} of the best speed"


def _recipe(
    model: str,
    data: Path,
    file: Path,
    run: Path,
    task: str,
    planned: MachinePlan,
    batch: int,
    speeds: dict[int, float],
    budget: list[str],
    why_seq: str,
) -> str:
    machine = planned.machine
    assert machine is not None
    table = ", ".join(f"{batch}: {speed:,.0f}" for batch, speed in speeds.items())
    folder = Path(model).resolve() if Path(model).is_dir() else Path("MODEL-FOLDER")
    quoted = json.dumps
    pairs = task == "preference"
    kind = ['task = "preference"  # by the first row; docs/tasks.md'] if pairs else []
    loss = ["[preference]", f"loss = {quoted(_loss(data))}", "beta = 0.1", ""] if pairs else []
    busiest = planned.forecast.binding if planned.forecast else ""
    lines = [
        f"# {planned.model} on {machine.name}: lohan train --config {file.name}",
        f"# Forecast: a step takes {format_seconds(planned.step_s)}, 1,000 steps "
        f"{format_seconds(1000 * planned.step_s)}; {busiest} is busiest.",
        "",
        f"model = {quoted(str(folder))}",
        f"data = {quoted(str(data.resolve()))}",
        f"out = {quoted(str(run))}  # everything goes there",
        *kind,
        "",
        "[train]",
        f"# Tokens a second by batch: {table}.",
        f"batch = {batch}  # {_why_batch(batch)}",
        f"seq = {planned.workload.seq}  # {why_seq}",
        f"dtype = {quoted(planned.options.dtype)}",
        "epochs = 1.0",
        *(
            ["lr = 1e-6  # usual for preferences; 1e-5 with lora"]
            if pairs
            else ["lr = 1e-5  # usual for a whole model; 1e-4 with lora"]
        ),
        "clip = 1.0  # 0: gradients are not clipped",
        "# lora = 16  # trains an adapter over a base that is only read",
        '# moments = "int8"  # a quarter of their bytes on SSD',
        "",
        *loss,
        "[budget]",
        f"# The state takes {format_bytes(planned.peak_bytes['ssd'])} of the drives.",
        *budget,
        "",
        "[eval]",
        "split = 0.02  # held back, and evaluated at the end",
    ]
    return "\n".join(lines) + "\n"


# -- settings of other trainers --------------------------------------------------------------------


NAMES = {
    "base_model": "model",
    "model_name_or_path": "model",
    "datasets": "data",
    "dataset": "data",
    "output_dir": "out",
    "sequence_len": "train.seq",
    "cutoff_len": "train.seq",
    "max_length": "train.seq",
    "max_seq_len": "train.seq",
    "max_seq_length": "train.seq",
    "seq_len": "train.seq",
    "batch_size": "train.batch",
    "train_batch_size": "train.batch",
    "train_file": "data",
    "gpu_memory": "budget.device_memory",
    "host_memory": "budget.host",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "max_steps": "train.steps",
    "micro_batch_size": "train.batch",
    "per_device_train_batch_size": "train.batch",
    "gradient_accumulation_steps": "train.batch",
    "learning_rate": "train.lr",
    "lr_scheduler": "train.schedule",
    "lr_scheduler_type": "train.schedule",
    "warmup_steps": "train.warmup",
    "warmup_ratio": "train.warmup",
    "weight_decay": "train.weight_decay",
    "max_grad_norm": "train.clip",
    "optimizer": "train.optimizer",
    "optim": "train.optimizer",
    "lora_r": "train.lora",
    "lora_rank": "train.lora",
    "sample_packing": "train.pack",
    "packing": "train.pack",
    "val_set_size": "eval.split",
    "val_size": "eval.split",
    "eval_steps": "eval.every",
    "seed": "seed",
    "chat_template": "train.chat_template",
    "template": "train.chat_template",
    "rl": "preference.loss",
    "pref_loss": "preference.loss",
    "pref_beta": "preference.beta",
    "bf16": "train.dtype",
    "fp16": "train.dtype",
}


# The settings that `lohan resume` offers as options. The others are given by --set.
OPTIONS_OF_RESUME = ("train.lr", "train.batch", "train.micro_batch", "budget.host", "budget.ssd")


def refuse_foreign_options(words: Sequence[str], *, resumes: bool = False) -> None:
    """Raise ConfigError for an option that has another name in another trainer."""
    for word in words:
        option = word.partition("=")[0]
        setting = NAMES.get(option.removeprefix("--").replace("-", "_"))
        if setting is not None and option.startswith("--") and option != field_of(setting).option:
            by_set = resumes and setting not in (*OPTIONS_OF_RESUME, "train.steps")
            here = f"--set {setting}=VALUE" if by_set else field_of(setting).option
            raise ConfigError(f"{option}: no such option; it is called {here} here")


def refuse_yaml(file: Path) -> None:
    """Refuse a YAML file of Axolotl or LLaMA-Factory, and name LoHan's settings for its keys."""
    if file.suffix.lower() not in (".yaml", ".yml"):
        return
    import yaml

    try:  # BaseLoader reads every value as text, which is sufficient because only the keys matter.
        settings: Any = yaml.load(file.read_text(encoding="utf-8"), yaml.BaseLoader)
    except RecursionError:
        raise ConfigError(f"{file}: cannot be read: nested too deep; give a TOML file") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{file}: cannot be read: {reason}; give a TOML file") from None
    keys = [str(key) for key in settings] if isinstance(settings, dict) else []
    renamed = [f"{key} is {NAMES[key]}" for key in keys if key in NAMES]
    if not renamed:
        raise ConfigError(f"{file}: settings are TOML; `lohan init` writes such a file")
    other = [key for key in keys if key not in NAMES]
    rest = f"; without a counterpart: {', '.join(other)}" if other else ""
    raise ConfigError(
        f"{file}: these are settings of another trainer, and LoHan reads TOML; "
        f"{', '.join(renamed)} (a batch is the rows of a whole step, accumulation included){rest}; "
        "`lohan init` writes a file to fill in"
    )


def register(app: typer.Typer) -> None:
    app.command()(init)
