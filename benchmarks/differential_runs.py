"""The runs that benchmarks/differential.py compares: in memory, through `attach`, `lohan train`.

Each function runs in its own process and returns a dictionary of values that must be equal. The run
in memory uses PyTorch only. From the LoHan run it gets the steps that fp16 skipped, and the values
of a packed base.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import lohan
from benchmarks.differential_models import (
    DTYPES,
    FAMILIES,
    Batch,
    batches,
    build_model,
    inner_module,
    loss_of,
)
from lohan.capture.casting import cast_inputs
from lohan.checkpoint.adapters import unify_dtype
from lohan.checkpoint.store_io import gathering_reader
from lohan.device.emulated import EmulatedDevice
from lohan.device.ranks import ALONE, ProcessGroup
from lohan.engine import attach as attaching
from lohan.engine.replanning import OomGuard
from lohan.engine.session import Session
from lohan.errors import BudgetError, RankError
from lohan.model.plan import Plan
from lohan.planner.planner import PlanProblem, make_plan
from lohan.store.io_engine import aligned_buffer
from lohan.util.units import parse_bytes

Case = dict[str, Any]
LARGE = 256 * 2**20  # bytes: every model here fits many times
TINY = 1024  # bytes: no model here fits
WEIGHT_DECAY, BETAS = 0.1, (0.9, 0.95)
RATES = {"adamw": 1e-3, "sgd": 3e-2, "lion": 3e-4}
LOSS_SCALE = 1024.0  # of the 16-bit run in memory, against underflow
EVALUATIONS = ("eval", "inference")


class Mismatch(Exception):
    """Raised when two values inside one run differ that must be equal."""


class Tripped(Exception):
    """The error that a case raises inside the model's own code."""


def learning_rate(case: Case) -> Callable[[int], float]:
    """Return a rate that changes in every step, so that a stale or shifted one is detected."""
    peak = RATES[case["optimizer"]]
    return lambda step: peak * 0.9**step


# -- in memory, with PyTorch ----------------------------------------------------------------------


class Lion(torch.optim.Optimizer):
    """Lion as published, for parameters in memory."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        beta1, beta2 = BETAS
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                sign = (beta1 * m + (1 - beta1) * p.grad).sign()
                p.sub_(group["lr"] * (sign + group["weight_decay"] * p))
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


def torch_optimizer(case: Case, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if case["optimizer"] == "sgd":
        return torch.optim.SGD(groups, lr=1.0, momentum=0.9)
    if case["optimizer"] == "lion":
        return Lion(groups)
    return torch.optim.AdamW(groups, lr=1.0, betas=BETAS, foreach=False)


def clip_in_memory(case: Case, masters: Mapping[str, nn.Parameter]) -> float:
    """Clip gradients as `torch.nn.utils.clip_grad_norm_`, and return their norm."""
    grads = {n: p.grad for n, p in masters.items() if p.grad is not None}
    norm = sum(float(g.double().square().sum()) for g in grads.values()) ** 0.5
    if case["clip"]:
        for gradient in grads.values():
            gradient.mul_(min(1.0, case["clip"] / (norm + 1e-6)))
    return norm


def plain_run(case: Case, result: Mapping[str, Any], *, wide: bool = False) -> dict[str, Any]:
    """Train in memory.

    `result` is the result of the LoHan run, from which come the steps that fp16 skipped and the
    values of a packed base. With `wide`, everything is computed in fp64.
    """
    model = build_model(case)
    dtype, width = DTYPES[case["dtype"]], torch.float64 if wide else torch.float32
    if case["cast"] == "model":
        model = model.to(dtype)
    masters = {n: nn.Parameter(p.detach().to(width).clone()) for n, p in named(model)}
    for name, value in result["packed"].items():
        masters[name] = nn.Parameter(value.to(width))
    if wide:
        model = model.double()
    else:
        unify_dtype(model, dtype)
        cast_inputs(model)  # plain torch refuses BatchNorm whose statistics are wider
    trained = {n: p for n, p in named(model) if p.requires_grad}
    optimizer = torch_optimizer(case, [masters[n] for n in trained])
    ema = {n: p.detach().clone() for n, p in masters.items()}
    steps, evaluation = batches(case)
    rate, losses, norms, evals = learning_rate(case), [], [], []
    scale = 1.0 if wide or case["dtype"] == "fp32" else LOSS_SCALE

    def cast(batch: Batch) -> Batch:
        return {n: t.double() if wide and t.is_floating_point() else t for n, t in batch.items()}

    def publish() -> None:
        with torch.no_grad():
            for name, parameter in named(model):
                parameter.copy_(masters[name])

    publish()
    for number, parts in enumerate(steps):
        for event in case["events"]:
            if event[0] == number and event[1] in EVALUATIONS:
                evals.append(evaluate(model, cast(evaluation), event[1]))
        torch.manual_seed(1000 + number)
        for part in parts:
            loss = loss_of(model, cast(part))
            (loss * scale * case["loss_factor"]).backward()
            losses.append(loss.item())
        for name, parameter in trained.items():
            grad = parameter.grad
            masters[name].grad = None if grad is None else grad.to(width) / scale
            parameter.grad = None
        norms.append(clip_in_memory(case, masters))
        if result["updated"][number]:
            for group in optimizer.param_groups:
                group["lr"] = rate(number)
            optimizer.step()
            with torch.no_grad():
                for name in trained:
                    ema[name].lerp_(masters[name].detach(), 1 - case["ema"])
        publish()
    return {
        "losses": losses,
        "norms": norms,
        "evals": evals,
        "weights": {n: p.detach().double() for n, p in masters.items()},
        "ema": {n: t.double() for n, t in ema.items()},
        "buffers": {n: b.double() for n, b in model.named_buffers()},
        "trained": set(trained),
    }


def named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    yield from model.named_parameters()


def evaluate(model: nn.Module, batch: Batch, how: str) -> float:
    """Return the loss of a batch without gradients; the model trains again afterwards."""
    torch.manual_seed(7)
    model.eval()
    with torch.inference_mode() if how == "inference" else torch.no_grad():
        value = loss_of(model, batch).item()
    model.train()
    return value


# -- through attach -------------------------------------------------------------------------------


def optimizer_of(case: Case) -> Any:
    shared = {
        "lr": learning_rate(case),
        "weight_decay": WEIGHT_DECAY,
        "moments": case["moments"],
        "ema": case["ema"],
    }
    if case["optimizer"] == "sgd":
        return lohan.SGD(momentum=0.9, **shared)
    kind = lohan.Lion if case["optimizer"] == "lion" else lohan.AdamW
    return kind(betas=BETAS, **shared)


class SessionRun:
    """One training through `attach`, with the events of its case between and inside of steps.

    `reference` is the plan of the run to be compared with. If it is given, this run is serial
    (`overlap=False`) in ample memory, with the same micro-batches and slices, and its only events
    are evaluations.
    """

    def __init__(
        self,
        case: Case,
        folder: Path,
        *,
        reference: Plan | None = None,
        group: ProcessGroup = ALONE,
    ) -> None:
        self.case, self.folder, self.reference, self.group = case, folder, reference, group
        self.family = FAMILIES[case["model"]]
        steps, evaluation = batches(case)
        self.steps = [[self.own_rows(part) for part in parts] for parts in steps]
        self.evaluation = self.own_rows(evaluation)
        self.limits: dict[str, str | int | None] = {"host": LARGE, "device": None}
        self.losses: list[float] = []
        self.norms: list[float | None] = []
        self.evals: list[float] = []
        self.updated: list[bool] = []
        self.numerics: set[tuple[Any, ...]] = set()  # of all plans that were followed
        self.packed: dict[str, torch.Tensor] = {}
        self.model: nn.Module
        self.session: Session
        self.guard: OomGuard | None = None

    def own_rows(self, batch: Batch) -> Batch:
        start, stop = self.group.ranks.rows(len(next(iter(batch.values()))))
        return {name: tensor[start:stop] for name, tensor in batch.items()}

    # -- budgets --

    def choose_limits(self) -> None:
        """Find budgets near the minimum as a user would, by following the advice of refusals."""
        case = self.case
        emulated = case["device"] == "emulated"
        self.limits = {"host": LARGE, "device": LARGE if emulated else None}
        if self.reference is not None:
            return
        chosen = dict(self.limits)
        for tier, option, requested in (
            ("host", "--host", case["host"]),
            ("device", "--device-memory", case["device_memory"]),
        ):
            if requested == "large" or chosen[tier] is None:
                continue
            advised = self.advised(tier, option)
            # Use exactly the size in the message, or a multiple.
            size = parse_bytes(advised, name=tier)
            chosen[tier] = advised if requested == 1.0 else int(size * requested)
        self.limits = chosen

    def advised(self, tier: str, option: str) -> str:
        """Return the size that the error for a tiny budget advises.

        With several ranks, only the first one has the message.
        """
        actual: str | None = None
        try:
            self.attach(build_for(self.case), "probe", {**self.limits, tier: TINY}).close()
        except RankError as error:
            if not error.reported:
                raise
        except BudgetError as error:
            size = re.search(rf"raise {option} to ([\d.]+ \w+)", str(error))
            if size is None:
                raise
            actual = size[1]
        actual = self.group.all_gather_object(actual)[0]
        if actual is None:
            raise Mismatch(f"a {tier} budget of {TINY} bytes was accepted")
        return actual

    def check_refusal(self, error: BudgetError) -> None:
        """Raise if a budget was refused that an earlier refusal had advised."""
        settings = {"host": self.case["host"], "device": self.case["device_memory"]}
        near = [tier for tier, size in settings.items() if size != "large"]
        if self.reference is None and len(near) == 1 and settings[near[0]] >= 1.0:
            raise Mismatch(f"refused the {near[0]} budget that was advised: {error}") from error

    # -- the session --

    def attach(
        self, model: nn.Module, name: str, limits: Mapping[str, Any], *, resume: bool = False
    ) -> Session:
        case, serial = self.case, self.reference
        options: dict[str, Any] = {
            "update_mode": case["update_mode"],
            "activations": case["activations"],
            "micro_batch": case["micro_batch"],
            "tiles": case["tiles"],
            "run_again": case["run_again"],
        }
        device, commit, known_batch = case["device"], case["commit_every"], case["known_batch"]
        if serial is not None:
            options = {"overlap": False}
            commit = "step"
            if self.family.adapters and not serial.tiles:
                known_batch = False  # tracing takes most of the time
            if not case["clip"]:  # A device sums the squares of a norm in another order.
                device = "cpu"
        if case["cast"] == "attach":
            options["dtype"] = case["dtype"]
        if known_batch:
            options["batch"] = self.steps[0][0]
        own_memory = device == "emulated"
        budget = lohan.Budget(
            host=limits["host"],
            device=limits["device"] if own_memory else None,
            ssd=[self.folder / name],
            commit_every=commit,
        )
        return lohan.attach(
            model,
            optimizer=optimizer_of(case),
            budget=budget,
            clip=case["clip"],
            device=device,
            base=case["base"],
            resume=resume,
            process_group=self.group,
            **options,
        )

    def open(self, *, resume: bool = False) -> None:
        self.model = build_for(self.case)
        with planned_as(self.reference):
            try:
                self.session = self.attach(self.model, "store", self.limits, resume=resume)
            except BudgetError as error:
                self.check_refusal(error)
                raise
        self.session.executor.lanes.stall_s = 20.0
        self.guard = None
        if self.case["delays"] and self.reference is None:
            from tests.support.delayed_runs import delay_lanes

            delay_lanes(self.session, self.case["delays"])
        self.note_plan()

    def note_plan(self) -> None:
        plan = self.session.plan
        rows = plan.micro_batch or self.case["batch"]
        self.numerics.add((min(rows, self.case["batch"]), plan.tiles, plan.head_tokens))

    def run(self) -> dict[str, Any]:
        self.choose_limits()
        self.open()
        first = self.session.plan
        try:
            if self.case["base"]:
                self.packed = self.weights(packed=True)
            self.train()
            return self.result(first)
        finally:
            self.session.close()

    def train(self) -> None:
        """Run all steps, with the events of each before it.

        A failed step may revert earlier steps that were not committed; they run again, as
        in a loop over `session.step`.
        """
        events = list(self.case["events"])
        while (number := self.session.step) < self.case["steps"]:
            del self.losses[number * self.case["accumulate"] :]
            del self.norms[number:], self.updated[number:]
            if events and events[0][0] <= number:
                self.event(events.pop(0)[1], number)
            else:
                self.step(number)

    def step(self, number: int) -> None:
        before = self.session.executor.record.train_state.updates
        losses = self.compute(number)
        while self.session.must_run_again:
            losses = self.compute(number)
        if self.session.step != number + 1:
            raise Mismatch(f"step {number + 1} ended as step {self.session.step}")
        self.losses += losses
        self.norms.append(self.session.grad_norm)
        self.updated.append(self.session.executor.record.train_state.updates > before)

    def compute(self, number: int) -> list[float]:
        torch.manual_seed(1000 + number)
        losses, parts = [], self.steps[number]
        with self.session.accumulate() if len(parts) > 1 else nullcontext():
            for part in parts:
                loss = loss_of(self.model, part)
                (loss * self.case["loss_factor"]).backward()
                losses.append(loss.item())
        return losses

    # -- events --

    def event(self, name: str, number: int) -> None:
        """Run an event before a step. Some take the step themselves."""
        if name in EVALUATIONS:
            self.evals.append(evaluate(self.model, self.evaluation, name))
        elif self.reference is None:
            getattr(self, f"event_{name}")(number)

    def event_flush(self, number: int) -> None:
        self.session.flush()

    def event_commit(self, number: int) -> None:
        self.session.commit()

    def event_forward(self, number: int) -> None:
        """Run a forward whose loss is dropped."""
        torch.manual_seed(3)
        loss_of(self.model, self.steps[number][0])

    def event_state_dict(self, number: int) -> None:
        self.check_copy(self.model.state_dict(), "state_dict")

    def event_deepcopy(self, number: int) -> None:
        self.check_copy(copy.deepcopy(self.model).state_dict(), "deepcopy")

    def check_copy(self, values: Mapping[str, torch.Tensor], what: str) -> None:
        weights = self.weights()
        for name, value in values.items():
            wanted = weights.get(name)
            if wanted is not None and not torch.equal(value, wanted.to(value.dtype)):
                raise Mismatch(f"{what} has another {name} than the store")

    def event_export(self, number: int) -> None:
        """Export, and compare the files with the store. Adapters have other names in the files."""
        out = self.session.export(self.folder / f"export-{number}", dtype="fp32")
        if self.case["lora"] or not self.group.ranks.first:
            self.group.barrier()
            return
        from safetensors.torch import load_file

        written: dict[str, torch.Tensor] = {}
        for file in sorted(out.glob("*.safetensors")):
            written.update(load_file(file))
        self.group.barrier()
        if not self.group.several:
            self.check_copy(written, "the export")

    def event_resume(self, number: int) -> None:
        self.session.close()
        self.open(resume=True)
        if self.session.step != number:
            raise Mismatch(f"resumed at step {self.session.step} instead of {number}")

    def event_replan(self, number: int) -> None:
        """Follow a plan that keeps other activations."""
        context, plan = self.session.context, self.session.plan
        kept = "recompute" if plan.kept else "all"
        options = replace(context.options.fixed_by(plan), activations=kept, world=plan.world)
        other = make_plan(
            PlanProblem(
                context.shards,
                options,
                host_bytes=context.host_bytes,
                workload=context.workload,
                profile=context.profile,
                device_bytes=context.device_bytes,
            )
        ).plan
        self.session.follow(other)

    def event_forward_error(self, number: int) -> None:
        self.fail_in("forward", number)

    def event_backward_error(self, number: int) -> None:
        self.fail_in("backward", number)

    def fail_in(self, where: str, number: int) -> None:
        """Let the model's own code fail in this step, which is then repeated."""

        def fail(*_: Any) -> None:
            raise Tripped(where)

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if where == "forward":
                fail()
            first = output[0] if isinstance(output, tuple) else output
            if first.requires_grad:
                first.register_hook(fail)

        handle = inner_module(self.model).register_forward_hook(hook)
        try:
            self.compute(number)
        except Tripped:
            return
        finally:
            handle.remove()
        raise Mismatch(f"an error in the model's {where} was swallowed")

    def event_out_of_memory(self, number: int) -> None:
        """Let the device run out of memory in this step, which is then repeated."""
        device = self.session.context.device
        if not isinstance(device, EmulatedDevice):
            return
        memory, whole = device.memory, device.memory.budget
        memory.budget = int(memory.live + 0.3 * max(0, memory.peak - memory.live)) + 64
        try:
            self.step(number)
        except torch.OutOfMemoryError:
            pass
        finally:
            memory.budget = whole

    def event_oom_guard(self, number: int) -> None:
        """Run out of memory inside the guard that `lohan train` puts around its steps."""
        device = self.session.context.device
        if not isinstance(device, EmulatedDevice):
            return
        memory, whole = device.memory, device.memory.budget
        used = self.session.plan.tier_bytes("device")
        memory.budget = max(int(0.7 * used), memory.live + 64)
        guard = OomGuard(self.session, lambda text: setattr(memory, "budget", whole))
        try:
            guard.run(lambda: self.step(number))
        finally:
            memory.budget = whole
        self.note_plan()

    # -- what is compared --

    def weights(self, *, packed: bool = False, ema: bool = False) -> dict[str, torch.Tensor]:
        """Return the fp32 values of all parameters, or only those of a packed base.

        Only the first rank has them.
        """
        self.session.commit()
        with gathering_reader(self.group, self.session.store, ema=ema) as read:
            if read is None:
                return {}
            return {
                tensor.name: read(tensor.name, 0, tensor.parameters).view(tensor.shape).clone()
                for group in self.session.context.blocks.groups
                for tensor in group.tensors
                if tensor.packing or not packed
            }

    def stored(self) -> dict[str, str]:
        """Return a digest of all bytes in the store by key."""
        store, result = self.session.store, dict[str, str]()
        for region in store.layout.regions:
            if region.scratch:
                continue
            digest = hashlib.sha256()
            for chunk, size in enumerate(region.chunks):
                buffer = aligned_buffer(size)
                store.wait(store.read(region.key, chunk, buffer))
                digest.update(buffer.tobytes())
            result[region.key] = digest.hexdigest()
        return result

    def result(self, first: Plan) -> dict[str, Any]:
        weights = self.weights()
        return {
            "losses": self.losses,
            "norms": self.norms,
            "evals": self.evals,
            "updated": self.updated,
            "stored": self.stored(),
            "weights": weights,
            "ema": self.weights(ema=True) if self.case["ema"] else {},
            "progress": repr(self.session.executor.record.train_state),
            "buffers": {n: b.clone() for n, b in self.model.named_buffers()},
            "packed": self.packed,
            "plan": first.to_json(),
            "numerics": sorted(self.numerics),
        }


def build_for(case: Case) -> nn.Module:
    model = build_model(case)
    return model.to(DTYPES[case["dtype"]]) if case["cast"] == "model" else model


@contextmanager
def planned_as(reference: Plan | None) -> Iterator[list[Plan]]:
    """Collect the plans that are made.

    If a reference is given, its micro-batches, slices and chunks are used.
    """
    agree, plans = attaching.agreed_plan, list[Plan]()

    def agreed(context: Any, given: Plan | None) -> Any:
        if reference is not None:
            context = replace(context, options=context.options.fixed_by(reference))
        plan, context = agree(context, given)
        plans.append(plan)
        return plan, context

    attaching.agreed_plan = agreed
    try:
        yield plans
    finally:
        attaching.agreed_plan = agree


# -- `lohan train` --------------------------------------------------------------------------------


def write_inputs(case: Case, folder: Path) -> None:
    """Write a model folder and tokenised data of different lengths."""
    from benchmarks.differential_models import VOCAB

    model = build_model({**case, "lora": 0, "frozen": "none"})
    model.save_pretrained(folder / "model")
    rows = [[3 + i * j % (VOCAB - 3) for j in range(1, 6 + i % 7)] for i in range(20)]
    lines = (json.dumps({"input_ids": row}) for row in rows)
    (folder / "data.jsonl").write_text("\n".join(lines))


def train_arguments(case: Case, folder: Path, *, serial: bool) -> list[str]:
    """Return the command line of a case; with `serial`, without overlap in ample memory."""
    out = folder / ("serial" if serial else "run")
    words: list[object] = [
        "train",
        "--model",
        folder / "model",
        "--data",
        folder / "data.jsonl",
        "--out",
        out,
        "--steps",
        case["steps"],
        "--batch",
        case["batch"],
        "--seq",
        case["seq"],
        "--lr",
        RATES[case["optimizer"]],
        "--weight-decay",
        WEIGHT_DECAY,
        "--optimizer",
        case["optimizer"],
        "--moments",
        case["moments"],
        "--ema",
        case["ema"],
        "--dtype",
        case["dtype"],
        "--clip",
        case["clip"],
    ]
    if case["lora"]:
        words += ["--lora", case["lora"]]
    if case["base"]:
        words += ["--base", case["base"]]
    if case["pack"]:
        words += ["--pack"]
    if case["eval_split"]:
        words += ["--eval-split", case["eval_split"], "--eval-every", 2]
    if serial:
        words += ["--host", LARGE, "--no-overlap", "--device", "cpu"]
        return [str(word) for word in words]
    words += ["--host", host_of(case), "--device", case["device"]]
    if case["device"] == "emulated":
        words += ["--device-memory", "64MiB"]
    words += ["--update-mode", case["update_mode"], "--activations", case["activations"]]
    words += ["--commit-every", case["commit_every"], "--tiles", case["tiles"]]
    if case["micro_batch"]:
        words += ["--micro-batch", case["micro_batch"]]
    return [str(word) for word in words]


def host_of(case: Case) -> object:
    return LARGE if case["host"] == "large" else f"{int(160 * case['host'])}KiB"


def train_run(
    words: list[str], reference: Plan | None, *, kill: int = 0
) -> tuple[int, Plan | None]:
    """Run the command line in this process; return its exit code and its first plan.

    If `kill` is not 0, the process is killed at the sync with this number.
    """
    from lohan.__main__ import main

    if kill:
        kill_at_sync(kill)
    sys.argv, code = ["lohan", *words], 0
    with planned_as(reference) as plans:
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return code, plans[0] if plans else None


def kill_at_sync(number: int) -> None:
    """Kill this process when it is about to sync a file for the given time."""
    sync, left = os.fsync, [number]

    def counted(file: Any) -> None:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        sync(file)

    os.fsync = counted


def train_result(case: Case, out: Path) -> dict[str, Any]:
    """Return the logged numbers and the exported weights of a run."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    files = sorted((out / "model").glob("*.safetensors"))
    digests = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
    if not digests:
        raise Mismatch(f"{out.name}/model has no weights")
    return {
        "losses": [(row["step"], row["loss"], row["lr"]) for row in rows if "loss" in row],
        "evals": [(row["step"], row["eval_loss"]) for row in rows if "eval_loss" in row],
        "stored": digests,
    }
