"""`lohan` as several ranks, each a fork of the forge, and the training loops that ranks run.

A process that runs one of these loops reads the folder to work in from LOHAN_CASE and leaves its
results there.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig

import lohan
from lohan.checkpoint.store_io import ShardReader
from lohan.device.emulated import EmulatedDevice
from lohan.device.ranks import ProcessGroup, join
from lohan.engine.session import Session
from lohan.errors import LohanError
from lohan.util.units import MiB
from tests.support import forked_commands
from tests.support.architectures import MODULE_WIDTH, Plain
from tests.support.forked_commands import Ended, Forge, Run
from tests.support.model_folders import write_random_checkpoint
from tests.support.models import batches, lr, small_model

# -- processes and their results -------------------------------------------------------------------


def rank_environment(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return int(place.getsockname()[1])


def start_ranks(forge: Forge, world: int, *args: object, **options: dict[int, Any]) -> list[Run]:
    """Start a command on every rank; `options` are those of the forge, by rank."""
    port = free_port()
    return [
        forge.start(
            *args,
            env=rank_environment(rank, world, port) if world > 1 else None,
            **{name: by_rank[rank] for name, by_rank in options.items() if rank in by_rank},
        )
        for rank in range(world)
    ]


def run_ranks(forge: Forge, world: int, *args: object, **options: dict[int, Any]) -> list[Ended]:
    return [process.wait() for process in start_ranks(forge, world, *args, **options)]


def errors_of_ranks(ended: list[Ended]) -> str:
    """Return all error output, for an assertion."""
    return "\n".join(f"rank {n} ended with {e.code}: {e.err}" for n, e in enumerate(ended))


def run_case(forge: Forge, world: int, name: str, folder: Path) -> list[Ended]:
    """Run a function of this module on every rank, or without ranks if there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    port, given = free_port(), {"LOHAN_CASE": str(folder)}
    processes = [
        forge.start(
            "--help",
            before=f"tests.support.ranks:{name}",
            env=given | (rank_environment(rank, world, port) if world > 1 else {}),
        )
        for rank in range(world)
    ]
    return [process.wait() for process in processes]


def case_results(folder: Path, world: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(world)]


def assembled_parameters(parts: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the parameters, assembled from the shards of all ranks."""
    whole: dict[str, list[float]] = {}
    for rank in parts:
        for name, (begin, values) in rank["shards"].items():
            assert not values or len(whole.get(name, [])) == begin
            whole[name] = whole.get(name, []) + values
    return whole


RANK_STEPS = 10


@pytest.fixture(name="inputs", scope="module")
def rank_inputs_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny Llama, and rows of different lengths: ranks have different target counts."""
    folder = tmp_path_factory.mktemp("inputs")
    config = LlamaConfig(
        vocab_size=80,
        hidden_size=32,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    write_random_checkpoint(folder / "model", config)
    dropping = LlamaConfig(**{**config.to_dict(), "attention_dropout": 0.1})
    write_random_checkpoint(folder / "dropping", dropping)
    rows = [{"input_ids": [(i * j) % 79 for j in range(1, 6 + i % 11)]} for i in range(24)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "held.jsonl").write_text("\n".join(map(json.dumps, rows[:7])))
    return folder


def rank_arguments(
    inputs: Path, out: Path, *more: object, model: str = "model", steps: int = RANK_STEPS
) -> list[object]:
    return [
        "train",
        "--model",
        inputs / model,
        "--data",
        inputs / "data.jsonl",
        "--out",
        out,
        "--host",
        "3MiB",
        "--steps",
        steps,
        "--batch",
        5,
        "--micro-batch",
        1,
        "--seq",
        16,
        "--lr",
        "2e-3",
        "--weight-decay",
        "0.1",
        "--activations",
        "recompute",
        *more,
    ]


def exported_weights(out: Path, folder: str = "model") -> dict[str, torch.Tensor]:
    return load_file(out / folder / "model.safetensors")


def assert_equal_runs(out: Path, other: Path, *, within: float = 2e-6) -> None:
    """Compare losses and norms of every step, and the weights at the end."""
    actual, wanted = forked_commands.metrics_rows(out), forked_commands.metrics_rows(other)
    keys = ("loss", "grad_norm") if "grad_norm" in wanted[0] else ("loss",)
    for key in keys:
        values = [row[key] for row in wanted]
        assert [row[key] for row in actual] == pytest.approx(values, rel=10 * within)
    lohan_result, expected = exported_weights(out), exported_weights(other)
    assert lohan_result.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(lohan_result[name], tensor, rtol=within, atol=within), name


# -- training loops --------------------------------------------------------------------------------

CASE_STEPS = 5


def trainers(own_loss: bool = False, **changes: Any) -> None:
    """Run a Trainer script with LoHan's Trainer and with transformers' under DDP."""
    import transformers

    import lohan.hf
    from tests.support.trainer_scripts import (
        TRAINER_SETTINGS,
        collate_padded,
        logged_values,
        token_examples,
    )

    what: dict[str, Any] = {}
    for kind in (transformers.Trainer, lohan.hf.Trainer):
        out = case_folder() / kind.__module__.partition(".")[0]
        args = transformers.TrainingArguments(
            str(out),
            **{
                **TRAINER_SETTINGS,
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 2,
                "max_steps": 3,
                "eval_strategy": "steps",
                "eval_steps": 3,
                "adam_epsilon": CASE_EPS,
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
            train_dataset=token_examples(24),
            eval_dataset=token_examples(19, seed=2),
            data_collator=collate_padded,
        )
        trainer.train()
        trainer.save_model()
        names = ("loss", "grad_norm", "eval_loss", "learning_rate")
        what[out.name] = {name: logged_values(trainer, name) for name in names}
    rank = int(os.environ["RANK"])
    (case_folder() / f"found-{rank}.json").write_text(json.dumps(what))


def trainers_that_evaluate_first() -> None:
    """Evaluate before training, with a temporary store for weights that are not in memory.

    Then train, and with `model_init` train another model.
    """
    import transformers

    import lohan.hf
    from tests.support.trainer_scripts import TRAINER_SETTINGS, collate_padded, token_examples

    rank = int(os.environ.get("RANK", "0"))
    small_model("llama").save_pretrained(case_folder() / f"model-{rank}")
    args = transformers.TrainingArguments(
        str(case_folder() / "out"),
        **{**TRAINER_SETTINGS, "per_device_train_batch_size": 2, "max_steps": 2},
    )
    trainer = lohan.hf.Trainer(
        model=lohan.load(case_folder() / f"model-{rank}"),
        args=args,
        train_dataset=token_examples(24),
        eval_dataset=token_examples(8, seed=2),
        data_collator=collate_padded,
    )
    first = trainer.evaluate()["eval_loss"]
    trainer.train()
    what = {"first": first, "loss": trainer.state.log_history[-2]["loss"]}
    trainer.model_init = lambda: lohan.load(case_folder() / f"model-{rank}")
    trainer.train()
    what |= {"again": trainer.state.log_history[-2]["loss"], "aborted": trainer._ranks.aborted}
    (case_folder() / f"found-{rank}.json").write_text(json.dumps(what))


def trainers_that_cannot_follow() -> None:
    """Replan where the second rank has no memory for the new plan; both ranks end."""
    import transformers

    import lohan.hf
    from tests.support import process_hooks
    from tests.support.trainer_scripts import TRAINER_SETTINGS, collate_padded, token_examples

    (process_hooks.replan_at_once, process_hooks.fail_to_replan)[int(os.environ["RANK"])]()
    process_hooks.measure_fixed_profile()
    args = transformers.TrainingArguments(
        str(case_folder() / "out"), **{**TRAINER_SETTINGS, "max_steps": 5}
    )
    trainer = lohan.hf.Trainer(
        model=small_model("llama"),
        args=args,
        train_dataset=token_examples(40),
        data_collator=collate_padded,
        lohan=lohan.hf.LohanArguments(host="64MiB"),
    )
    trainer.train()


def chat_trainers() -> None:
    """Run a script with LoHan's SFTTrainer and with TRL's under DDP; load the best model."""
    import trl

    import lohan.hf
    from tests.support.trainer_scripts import logged_values, run_sft_trainer

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
        out = case_folder() / kind.__module__.partition(".")[0]
        trainer = run_sft_trainer(
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
        what[out.name] = {name: logged_values(trainer, name) for name in names}
    (case_folder() / f"found-{os.environ['RANK']}.json").write_text(json.dumps(what))


def trainers_with_a_loss() -> None:
    trainers(own_loss=True)


def trainers_with_means() -> None:
    """Train with the mean loss of each process over its own tokens."""
    trainers(average_tokens_across_devices=False)


def trainers_with_a_drive() -> None:
    """Train with the store on another drive than the output, in one run and in two."""
    import transformers

    import lohan.hf
    from tests.support.trainer_scripts import (
        TRAINER_SETTINGS,
        collate_padded,
        logged_values,
        token_examples,
    )

    what: dict[str, Any] = {}
    for name, steps in (("whole", [3]), ("parts", [2, 3])):
        for number, last in enumerate(steps):
            args = transformers.TrainingArguments(
                str(case_folder() / name),
                **{**TRAINER_SETTINGS, "max_steps": 3, "save_strategy": "no"},
            )
            trainer = lohan.hf.Trainer(
                model=small_model("llama"),
                args=args,
                train_dataset=token_examples(24),
                data_collator=collate_padded,
                callbacks=[stop_after(last)],
                lohan=lohan.hf.LohanArguments(ssd=(case_folder() / "drive",)),
            )
            trainer.train(resume_from_checkpoint=True if number else None)
            trainer.session.close()
            what[f"{name} {number}"] = logged_values(trainer, "loss")
    (case_folder() / f"found-{os.environ['RANK']}.json").write_text(json.dumps(what))


def stop_after(last: int) -> Any:
    """Return a callback that stops a Trainer after a step."""
    from transformers import TrainerCallback

    class StopAfter(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            control.should_training_stop = state.global_step >= last
            return control

    return StopAfter()


def with_own_loss(kind: Any) -> Any:
    class Own(kind):
        """A Trainer whose loss is not only a mean over this process's tokens."""

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any
        ) -> Any:
            out = model(**inputs)
            loss = 2 * out.loss + 0.1 * out.loss**2
            return (loss, out) if return_outputs else loss

    return Own


def preference_trainers() -> None:
    """Run TRL's preference scripts, each process with its share of the batch."""
    from tests.support.trainer_scripts import logged_values, run_preference_trainer

    world, what = int(os.environ.get("WORLD_SIZE", "1")), {}
    for name in ("dpo", "kto", "reward"):
        trainer = run_preference_trainer(
            name,
            case_folder() / name,
            ours=True,
            per_device_train_batch_size=4 // world,
            train_sampling_strategy="sequential",
            eval_strategy="no",
        )
        what[name] = [logged_values(trainer, "loss"), logged_values(trainer, "grad_norm")]
    (case_folder() / f"found-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(what))


CASE_EPS = 1e-3  # so large that AdamW does not hide a wrong factor of all gradients


def case_folder() -> Path:
    return Path(os.environ["LOHAN_CASE"])


def write_case_result(process_group: ProcessGroup, what: dict[str, Any]) -> None:
    rank = process_group.rank
    (case_folder() / f"found-{rank}.json").write_text(json.dumps(what))


def rows_of_rank(
    process_group: ProcessGroup, batch: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    rows = len(next(iter(batch.values())))
    start, stop = process_group.ranks.rows(rows)
    return {name: tensor[start:stop] for name, tensor in batch.items()}


def parameter_shards(session: Session) -> dict[str, tuple[int, list[float]]]:
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


def train_on_rank(model: nn.Module, data: list[dict[str, torch.Tensor]], **options: Any) -> None:
    process_group = join()
    rank_rows = [rows_of_rank(process_group, batch) for batch in data]
    adamw = lohan.AdamW(lr=lr, betas=(0.9, 0.95), eps=CASE_EPS, weight_decay=0.1)
    budget = lohan.Budget(host="64MiB", ssd=[case_folder()])
    losses = []
    with lohan.attach(
        model, optimizer=adamw, budget=budget, process_group=process_group, **options
    ) as session:
        for batch in rank_rows:
            out = model(**batch)
            loss = out if isinstance(out, torch.Tensor) else out.loss
            loss.backward()
            losses.append(loss.item())
        norm = session.executor.grad_norm
        write_case_result(
            process_group, {"losses": losses, "norm": norm, "shards": parameter_shards(session)}
        )
    process_group.close()


def plain_module() -> None:
    """Train a module with a loss of its own; gradients are averaged over ranks.

    Its class is unknown, so its first calls are compared with plain ones.
    """
    torch.manual_seed(0)
    model = Plain()
    data = Plain.data(CASE_STEPS, samples=4)
    half = {name: tensor[:2] for name, tensor in data[0].items()}
    groups = [{"params": "blocks.0", "lr": 1e-3, "betas": (0.8, 0.9), "weight_decay": 0.3}]
    train_on_rank(model, data, clip=0.5, batch=half, check=True, param_groups=groups)


def emulated() -> None:
    """Train on the emulated device, where bytes that are read too early are NaN."""
    data = batches(CASE_STEPS, batch=4, seq=12)
    device = EmulatedDevice(16 * MiB)
    half = {name: tensor[:2] for name, tensor in data[0].items()}
    train_on_rank(small_model("llama"), data, device=device, batch=half, clip=0.5, micro_batch=1)


class PartlyUsedBlock(nn.Module):
    """A block that uses one layer always, one if it is `wanted`, and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (
            nn.Linear(MODULE_WIDTH, MODULE_WIDTH) for _ in range(3)
        )

    def forward(self, x: torch.Tensor, wanted: bool) -> torch.Tensor:
        return x + self.always(x) + (self.sometimes(x) if wanted else 0.0)


class PartlyUsedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PartlyUsedBlock() for _ in range(2))
        self.exit = nn.Linear(MODULE_WIDTH, 2)

    def forward(self, x: torch.Tensor, wanted: bool | None = None) -> torch.Tensor:
        wanted = os.environ.get("RANK") == "0" if wanted is None else wanted
        for block in self.blocks:
            x = block(x, wanted)
        return self.exit(x).square().mean()


def partly_used() -> None:
    """Train parameters that have gradients on one rank only, or on none."""
    torch.manual_seed(0)
    train_on_rank(PartlyUsedModel(), Plain.data(CASE_STEPS, samples=4))


class ReorderedModel(Plain):
    """A model whose blocks are called in another order on rank 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if os.environ.get("RANK") == "1":
            self.blocks = nn.ModuleList(reversed(list(self.blocks)))
        return super().forward(x)


def another_order() -> None:
    torch.manual_seed(0)
    try:
        train_on_rank(ReorderedModel(), Plain.data(2, samples=4))
    except LohanError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(3)


def an_error_in_the_loop() -> None:
    """Fail in the loop of one rank; the others must not hang."""
    torch.manual_seed(0)
    data = Plain.data(CASE_STEPS, samples=4)
    if os.environ.get("RANK") == "1":
        data[2]["x"] = data[2]["x"][..., :1]  # a shape that the model cannot take
    train_on_rank(Plain(), data)


def on_a_machine_of_its_own() -> None:
    """Give this rank a host name of its own."""
    socket.gethostname = lambda: f"box{os.environ['RANK']}"
