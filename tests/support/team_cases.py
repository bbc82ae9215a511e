"""The training loops of ranks (`Forge.start(before=...)`).

LOHAN_CASE names the folder to work in, where each rank leaves its results.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).parents[2]))

import lohan
from lohan.checkpoint.store_io import ShardReader
from lohan.device.emulated import EmulatedDevice
from lohan.device.ranks import ProcessGroup, join
from lohan.engine.session import Session
from lohan.errors import LohanError
from lohan.util.units import MiB

from tests.support.small_models import batches, lr, small_model  # isort: skip
from tests.support.unusual_modules import WIDTH, Plain  # isort: skip

STEPS = 5


def trainers(own_loss: bool = False, **changes: Any) -> None:
    """Run a Trainer script with LoHan's Trainer and with transformers' under DDP."""
    import transformers

    import lohan.hf
    from tests.support.trainer_scripts import SETTINGS, collate, examples, logged

    what: dict[str, Any] = {}
    for kind in (transformers.Trainer, lohan.hf.Trainer):
        out = place() / kind.__module__.partition(".")[0]
        args = transformers.TrainingArguments(
            str(out),
            **{
                **SETTINGS,
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 2,
                "max_steps": 3,
                "eval_strategy": "steps",
                "eval_steps": 3,
                "adam_epsilon": EPS,
                "save_strategy": "steps",
                "save_steps": 3,
                **changes,
            },
        )
        if own_loss:
            kind = with_own_loss(kind)
        trainer = kind(
            model=small_model("llama"),
            args=args,
            train_dataset=examples(24),
            eval_dataset=examples(19, seed=2),
            data_collator=collate,
        )
        trainer.train()
        trainer.save_model()
        names = ("loss", "grad_norm", "eval_loss", "learning_rate")
        what[out.name] = {name: logged(trainer, name) for name in names}
    rank = int(os.environ["RANK"])
    (place() / f"found-{rank}.json").write_text(json.dumps(what))


def trainers_that_evaluate_first() -> None:
    """Evaluate before training, with a temporary store for weights that are not in memory.

    Then train, and with `model_init` train another model.
    """
    import transformers

    import lohan.hf
    from tests.support.trainer_scripts import SETTINGS, collate, examples

    rank = int(os.environ.get("RANK", "0"))
    small_model("llama").save_pretrained(place() / f"model-{rank}")
    args = transformers.TrainingArguments(
        str(place() / "out"), **{**SETTINGS, "per_device_train_batch_size": 2, "max_steps": 2}
    )
    trainer = lohan.hf.Trainer(
        model=lohan.load(place() / f"model-{rank}"),
        args=args,
        train_dataset=examples(24),
        eval_dataset=examples(8, seed=2),
        data_collator=collate,
    )
    first = trainer.evaluate()["eval_loss"]
    trainer.train()
    what = {"first": first, "loss": trainer.state.log_history[-2]["loss"]}
    trainer.model_init = lambda: lohan.load(place() / f"model-{rank}")
    trainer.train()
    what |= {"again": trainer.state.log_history[-2]["loss"], "aborted": trainer._ranks.aborted}
    (place() / f"found-{rank}.json").write_text(json.dumps(what))


def trainers_that_cannot_follow() -> None:
    """Replan where the second rank has no memory for the new plan; both ranks end."""
    import transformers

    import lohan.hf
    from tests.support import replan_at_once
    from tests.support.trainer_scripts import SETTINGS, collate, examples

    (replan_at_once.always, replan_at_once.fails)[int(os.environ["RANK"])]()
    replan_at_once.with_fixed_measurement()
    args = transformers.TrainingArguments(str(place() / "out"), **{**SETTINGS, "max_steps": 5})
    trainer = lohan.hf.Trainer(
        model=small_model("llama"),
        args=args,
        train_dataset=examples(40),
        data_collator=collate,
        lohan=lohan.hf.LohanArguments(host="64MiB"),
    )
    trainer.train()


def chat_trainers() -> None:
    """Run a script with LoHan's SFTTrainer and with TRL's under DDP; load the best model."""
    import trl

    import lohan.hf
    from tests.support.sft_scripts import logged, script

    names = (
        "loss",
        "grad_norm",
        "eval_loss",
        "num_tokens",
        "entropy",
        "mean_token_accuracy",
        "eval_entropy",
        "eval_mean_token_accuracy",
    )
    what: dict[str, Any] = {}
    for kind in (trl.SFTTrainer, lohan.hf.SFTTrainer):
        out = place() / kind.__module__.partition(".")[0]
        trainer = script(
            kind,
            out,
            rows="pairs",
            per_device_train_batch_size=2,
            max_steps=2,
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
            load_best_model_at_end=True,
        )
        trainer.evaluate()
        what[out.name] = {name: logged(trainer, name) for name in names}
    (place() / f"found-{os.environ['RANK']}.json").write_text(json.dumps(what))


def trainers_with_a_loss() -> None:
    trainers(own_loss=True)


def trainers_with_means() -> None:
    """Of each process over its own tokens."""
    trainers(average_tokens_across_devices=False)


def trainers_with_a_drive() -> None:
    """State on another drive than the output folder: begun, and resumed by a new Trainer."""
    import transformers

    import lohan.hf
    from tests.support.trainer_scripts import SETTINGS, collate, examples, logged

    what: dict[str, Any] = {}
    for name, steps in (("whole", [3]), ("parts", [2, 3])):
        for number, last in enumerate(steps):
            args = transformers.TrainingArguments(
                str(place() / name), **{**SETTINGS, "max_steps": 3, "save_strategy": "no"}
            )
            trainer = lohan.hf.Trainer(
                model=small_model("llama"),
                args=args,
                train_dataset=examples(24),
                data_collator=collate,
                callbacks=[Until(last)],
                lohan=lohan.hf.LohanArguments(ssd=(place() / "drive",)),
            )
            trainer.train(resume_from_checkpoint=True if number else None)
            trainer.session.close()
            what[f"{name} {number}"] = logged(trainer, "loss")
    (place() / f"found-{os.environ['RANK']}.json").write_text(json.dumps(what))


class Until(TrainerCallback):
    def __init__(self, last: int) -> None:
        self._last = last

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_training_stop = state.global_step >= self._last
        return control


def with_own_loss(kind: Any) -> Any:
    class Own(kind):
        """The mean over this process's tokens, and a part that is no loss of tokens."""

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any
        ) -> Any:
            out = model(**inputs)
            loss = 2 * out.loss + 0.1 * out.loss**2
            return (loss, out) if return_outputs else loss

    return Own


def preference_trainers() -> None:
    """TRL's trainers of preferences, each process with its share of the batch."""
    from tests.support.preference_scripts import script
    from tests.support.sft_scripts import logged

    world, what = int(os.environ.get("WORLD_SIZE", "1")), {}
    for name in ("dpo", "kto", "reward"):
        trainer = script(
            name,
            place() / name,
            ours=True,
            per_device_train_batch_size=4 // world,
            train_sampling_strategy="sequential",
            eval_strategy="no",
        )
        what[name] = [logged(trainer, "loss"), logged(trainer, "grad_norm")]
    (place() / f"found-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(what))


EPS = 1e-3  # so large that AdamW does not hide a wrong factor of all gradients


def place() -> Path:
    return Path(os.environ["LOHAN_CASE"])


def write_result(process_group: ProcessGroup, what: dict[str, Any]) -> None:
    rank = process_group.rank
    (place() / f"found-{rank}.json").write_text(json.dumps(what))


def own_rows(
    process_group: ProcessGroup, batch: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    rows = len(next(iter(batch.values())))
    start, stop = process_group.ranks.rows(rows)
    return {name: tensor[start:stop] for name, tensor in batch.items()}


def shards(session: Session) -> dict[str, tuple[int, list[float]]]:
    """Return this rank's part of every parameter, and where it begins."""
    session.flush()
    process_group, groups = session.process_group, session.context.blocks.groups
    ranks = process_group.ranks
    reader = ShardReader(session.store, ranks)

    def read(spec: lohan.model.layout.TensorSpec) -> list[float]:
        out = torch.empty(spec.numel)
        reader.read_into(out, spec.name, spec.begin)
        values: list[float] = out.tolist()
        return values

    return {
        spec.name: (spec.begin, read(spec))
        for group in groups
        for spec in ranks.shard(group).tensors
    }


def train(model: nn.Module, data: list[dict[str, torch.Tensor]], **options: Any) -> None:
    process_group = join()
    rank_rows = [own_rows(process_group, batch) for batch in data]
    adamw = lohan.AdamW(lr=lr, betas=(0.9, 0.95), eps=EPS, weight_decay=0.1)
    budget = lohan.Budget(host="64MiB", ssd=[place()])
    losses = []
    with lohan.attach(
        model, optimizer=adamw, budget=budget, process_group=process_group, **options
    ) as session:
        for batch in rank_rows:
            out = model(**batch)
            loss = out if isinstance(out, torch.Tensor) else out.loss
            loss.backward()
            losses.append(loss.item())
        norm = session.grad_norm
        write_result(process_group, {"losses": losses, "norm": norm, "shards": shards(session)})
    process_group.close()


def plain_module() -> None:
    """Train a module with a loss of its own; gradients are averaged over ranks.

    Its class is unknown, so its first calls are compared with plain ones.
    """
    torch.manual_seed(0)
    model = Plain()
    data = Plain.data(STEPS, samples=4)
    half = {name: tensor[:2] for name, tensor in data[0].items()}
    groups = [{"params": "blocks.0", "lr": 1e-3, "betas": (0.8, 0.9), "weight_decay": 0.3}]
    train(model, data, clip=0.5, batch=half, check=True, param_groups=groups)


def emulated() -> None:
    """Every copy and every exchange in its place: what is not there yet is NaN."""
    data = batches(STEPS, batch=4, seq=12)
    device = EmulatedDevice(16 * MiB)
    half = {name: tensor[:2] for name, tensor in data[0].items()}
    train(small_model("llama"), data, device=device, batch=half, clip=0.5, micro_batch=1)


class Partly(nn.Module):
    """A block that uses one layer always, one where it is `wanted`, and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, wanted: bool) -> torch.Tensor:
        return x + self.always(x) + (self.sometimes(x) if wanted else 0.0)


class Partial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Partly() for _ in range(2))
        self.exit = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor, wanted: bool | None = None) -> torch.Tensor:
        wanted = os.environ.get("RANK") == "0" if wanted is None else wanted
        for block in self.blocks:
            x = block(x, wanted)
        return self.exit(x).square().mean()


def partly_used() -> None:
    """Train parameters that have gradients on one rank only, or on none."""
    torch.manual_seed(0)
    train(Partial(), Plain.data(STEPS, samples=4))


class Wanders(Plain):
    """Ranks call their blocks in another order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if os.environ.get("RANK") == "1":
            self.blocks = nn.ModuleList(reversed(list(self.blocks)))
        return super().forward(x)


def another_order() -> None:
    torch.manual_seed(0)
    try:
        train(Wanders(), Plain.data(2, samples=4))
    except LohanError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(3)


def an_error_in_the_loop() -> None:
    """Fail in the loop of one rank; the others must not hang."""
    torch.manual_seed(0)
    data = Plain.data(STEPS, samples=4)
    if os.environ.get("RANK") == "1":
        data[2]["x"] = data[2]["x"][..., :1]  # a shape that the model cannot take
    train(Plain(), data)


def on_a_machine_of_its_own() -> None:
    """As far as ranks can tell."""
    socket.gethostname = lambda: f"box{os.environ['RANK']}"
