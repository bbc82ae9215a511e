"""Record what LoHan computes, plans and schedules for a fixed set of small cases."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import lohan
from lohan import _core
from lohan.cli.main import main as command_line
from tests.support import forked_commands, model_folders, ranks
from tests.support.forked_commands import Forge

FROZEN = Path(__file__).parent / "frozen.json"
AGAIN = "python -m tests.replay.record"
STEPS, BATCH, SEQ, VOCAB = 3, 5, 16, 96
DIGITS = 9  # of a forecast that are compared
LONGEST = 8  # entries of a list in a plan that are stored; of more, their number and a digest

# -- cases -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A run of three steps.

    `attach` are options of lohan.attach; with `command`, the run is one of the command line
    with `ranks` processes.
    """

    dtype: str = "fp32"
    lora: int | None = None
    attach: dict[str, Any] = field(default_factory=dict)
    device: str | None = None  # its memory, if it has one
    planned: bool = False  # for a batch: traced, with activations in the plan; takes longer
    command: tuple[str, ...] = ()
    ranks: int = 1
    substitute: bool = False  # slow, and compared only where no digest was recorded


def both(**options: Any) -> dict[str, Case]:
    plain = {**options, "attach": {**options.get("attach", {}), "overlap": False}}
    return {"overlap": Case(**options), "plain": Case(**plain)}


def both_by_command(*words: str, ranks: int = 1) -> dict[str, Case]:
    return {
        "overlap": Case(command=words, ranks=ranks),
        "plain": Case(command=(*words, "--no-overlap"), ranks=ranks, substitute=ranks > 1),
    }


# All cases of a family end with the same bits.
WEIGHTS: dict[str, dict[str, Case]] = {
    "fp32": {
        "plain": Case(attach={"overlap": False, "update_mode": "serial"}),
        **{
            mode: Case(attach={"update_mode": mode})
            for mode in ("serial", "naive", "optimized", "balanced")
        },
        "planned": Case(planned=True),
        "emulated device": Case(attach={"device": "emulated"}, device="8MiB"),
    },
    "fp32, clipped": both(attach={"clip": 1.0}),
    "bf16": both(dtype="bf16", attach={"clip": 1.0}),
    "fp16": both(dtype="fp16", attach={"clip": 1.0}),
    "lora": both(lora=4, attach={"clip": 1.0}),
    "diffusion": both_by_command("--task", "diffusion", "--batch", "4"),
    "two ranks": both_by_command("--batch", "4", "--seq", str(SEQ), ranks=2),
}

PLANS = (
    "--model qwen3-8b --machine rtx4090 --batch 4",
    "--model qwen3-8b --machine rtx3090 --batch 32",
    "--model qwen3-8b --machine rtx4090 --batch 8 --gpus 2",
    "--model qwen3-32b --machine rtx4090 --batch 16 --steps 1000",
    "--model llama-3-70b --machine rtx4090 --batch 8",
    "--model llama-3-70b --machine rtx3090 --batch 1",
    "--model gpt-13b --machine ratel-4090 --batch 32",
    "--model gpt-13b --machine rtx3090 --batch 8 --clip 0",
    "--model gpt-175b --machine ratel-4090 --batch 16",
    "--model gpt-175b --machine rtx4090 --batch 8",
)

# SMALL is a model and DESK a machine, made below.
SCHEDULES = (
    "--model SMALL --machine rtx3090 --batch 4 --seq 128 --host 30MiB --device-memory 30MiB",
    "--model SMALL --machine rtx3090 --batch 4 --seq 128 --host 30MiB --device-memory 30MiB"
    " --log-gradients off",
    "--model SMALL --machine rtx3090 --batch 4 --seq 128 --host 30MiB --device-memory 30MiB"
    " --update-mode optimized --clip 0 --log-gradients off",
    "--model SMALL --machine rtx4090 --batch 4 --seq 128 --host 60MiB --gpus 2",
    "--model SMALL --machine DESK --batch 4 --seq 128 --host 30MiB",
    "--model SMALL --machine DESK --batch 4 --seq 128 --host 40MiB --update-mode naive --clip 0",
)
SMALL = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
DESK = """
name = "desk"
device = "cpu"
compute = [[256, 8e10], [1024, 1e11]]
host_bytes = 16000000000
adam = 1.5e9
[[drives]]
name = "drive"
read = 3e9
write = 1.5e9
bytes = 1000000000000
"""

# -- running them ----------------------------------------------------------------------------------


def command(*words: object) -> str:
    """`lohan WORDS` in this process; what it prints."""
    output, errors, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv, code = ["lohan", *map(str, words)], 0
    try:
        with redirect_stdout(output), redirect_stderr(errors):
            command_line()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.argv = before
    if code:
        raise RuntimeError(f"lohan {' '.join(map(str, words))}: {errors.getvalue()}")
    return output.getvalue()


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread, since the number of threads decides how torch splits a sum."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Bench:
    """Models and data in `place`, and the runs on them."""

    def __init__(self, place: Path, forge: Forge) -> None:
        self._place, self._forge = place, forge
        self._model, self._data = place / "model", place / "data.jsonl"
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, VOCAB, (STEPS, BATCH, SEQ), generator=generator)
        self._ids = ids
        rows = [{"input_ids": row} for row in ids.flatten(0, 1).tolist()]
        self._data.write_text("\n".join(map(json.dumps, rows)))
        self._network().save_pretrained(self._model)

    def _network(self) -> LlamaForCausalLM:
        """Tied weights; large ones, so that gradients are clipped."""
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            max_position_embeddings=64,
            initializer_range=0.3,
            use_cache=False,
        )
        return LlamaForCausalLM(config).train()

    def arithmetic(self) -> str:
        """Return a digest of the results of plain PyTorch on this machine.

        Other processors and builds round differently; then weights cannot be compared with
        recorded ones.
        """
        digest = hashlib.sha256()
        with one_thread():
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                model = self._network().to(dtype)
                loss = model(input_ids=self._ids[0], labels=self._ids[0]).loss
                loss.backward()
                for tensor in (loss, *(p.grad for p in model.parameters())):
                    digest.update(tensor.detach().float().numpy().tobytes())
        return digest.hexdigest()[:12]

    @cached_property
    def key(self) -> str:
        capability = torch.backends.cpu.get_cpu_capability()
        return (
            f"torch {torch.__version__}, {capability}, core {_core.isa()}, "
            f"arithmetic {self.arithmetic()}"
        )

    def weights(self, name: str, case: Case) -> dict[str, Any]:
        place = self._place / name.replace("/", "-")
        with one_thread():
            losses = self._command(place, case) if case.command else self._attach(place, case)
        collected = {"losses": losses, "weights": digest_of(place / "model")}
        shutil.rmtree(place)
        return collected

    def _attach(self, place: Path, case: Case) -> list[float]:
        torch.manual_seed(2)
        model, losses = lohan.load(self._model, dtype=case.dtype, lora=case.lora).train(), []
        batches = [{"input_ids": ids, "labels": ids} for ids in self._ids]
        with lohan.attach(
            model,
            optimizer=lohan.AdamW(lr=2e-3, weight_decay=0.1),
            batch=batches[0] if case.planned else None,
            micro_batch=2,
            budget=lohan.Budget(host="64MiB", ssd=[place], device=case.device),
            **case.attach,
        ) as session:
            for batch in batches:
                loss = model(**batch).loss
                loss.backward()
                losses.append(loss.item())
            session.export(place / "model", dtype="fp32")
        return losses

    def _command(self, place: Path, case: Case) -> list[float]:
        model, data = self._model, self._data
        if "diffusion" in case.command:
            model, data = self._place / "pipeline", self._place / "latents"
            if not model.exists():
                model_folders.save_pipeline(model, "dit")
                model_folders.save_latents(data, "dit")
        words = (
            "train",
            "--model",
            model,
            "--data",
            data,
            "--out",
            place,
            "--steps",
            STEPS,
            "--host",
            "64MiB",
            "--lr",
            "2e-3",
            "--activations",
            "recompute",
            "--seed",
            "3",
            *case.command,
        )
        if case.ranks == 1:
            command(*words)
        else:
            ended = ranks.run_ranks(self._forge, case.ranks, *words)
            if any(rank.code for rank in ended):
                raise RuntimeError(ranks.errors_of_ranks(ended))
        return [row["loss"] for row in forked_commands.metrics_rows(place) if "loss" in row]

    def plan(self, words: str) -> dict[str, Any]:
        plan: dict[str, Any] = json.loads(command("plan", *words.split(), "--json"))
        return {key: rounded(value) for key, value in plan.items()}

    def schedule(self, words: str) -> dict[str, str]:
        """Return the text of each phase, by its title."""
        small, desk = self._place / "small", self._place / "desk.toml"
        small.mkdir(exist_ok=True)
        (small / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL}))
        desk.write_text(DESK)
        given = words.replace("SMALL", str(small / "config.json")).replace("DESK", str(desk))
        phases = json.loads(command("plan", *given.split(), "--schedule", "--json"))["schedule"]
        return {f"{name}, {text.count(' ') + 1} actions": text for name, text in phases.items()}


def digest_of(folder: Path) -> str:
    """Return a digest of all weights in a folder: names, shapes and bits."""
    digest, files = hashlib.sha256(), sorted(folder.glob("*.safetensors"))
    assert files, f"{folder} has no weights"
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    for name in sorted(tensors):
        digest.update(f"{name} {list(tensors[name].shape)} {tensors[name].dtype}\n".encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def rounded(value: Any) -> Any:
    """Return the value rounded so that every machine has the same, and short enough to read."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        created = [rounded(inner) for inner in value]
        if len(created) > LONGEST:
            digest = hashlib.sha256(json.dumps(created).encode()).hexdigest()
            return (
                f"{len(created)} entries from {created[0]} to {created[-1]}, sha256 {digest[:16]}"
            )
        return created
    return value


@contextmanager
def bench(forge: Forge | None = None) -> Iterator[Bench]:
    """Yield a bench in a temporary folder, with a forge of its own if none is given."""
    with tempfile.TemporaryDirectory(prefix="lohan-replay-") as place:
        started = forge or Forge(Path(place))
        try:
            yield Bench(Path(place), started)
        finally:
            if started is not forge:
                started.close()


def main() -> None:
    """Digests of other machines stay while those of this one do: then only theirs could be old."""
    frozen = json.loads(FROZEN.read_text()) if FROZEN.exists() else {"weights": {}}
    with bench() as result:
        families = {}
        for family, cases in WEIGHTS.items():
            actual = {
                name: result.weights(f"{family}/{name}", case) for name, case in cases.items()
            }
            first = next(iter(actual.values()))
            for name, other in actual.items():
                if other != first:
                    raise SystemExit(f"{family}: {name} gives {other}, others {first}")
            families[family] = first
        key = result.key
        if frozen["weights"].get(key, families) != families:
            frozen["weights"] = {}
        frozen["weights"][key] = families
        frozen["plans"] = {words: result.plan(words) for words in PLANS}
        frozen["schedules"] = {words: result.schedule(words) for words in SCHEDULES}
    FROZEN.write_text(json.dumps(frozen, indent=1) + "\n")


if __name__ == "__main__":
    main()
