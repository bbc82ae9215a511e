"""Parameter groups equal those of torch, with the same bits however a run is scheduled.

Groups that cannot be what the user means are refused.
"""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lohan.config import Config
from lohan.errors import ConfigError
from lohan.optim import SGD, AdamW, Lion, Optimizer
from lohan.param_groups import META_KEY, matches
from lohan.tools.reference import in_memory
from lohan.train.trainer import changed_groups
from tests.support.delayed_runs import (
    PlanTuning,
    RunResult,
    net_batches,
    small_net,
    train_with_delays,
    tune_plans,
)
from tests.support.forked_commands import tiny_arguments, write_tiny_inputs
from tests.support.models import (
    assert_close,
    attached,
    batches,
    lohan_run,
    loss_of,
    lr,
    master_weights,
    small_model,
)

GROUPS: list[dict[str, Any]] = [
    {"params": "embed_tokens", "lr": 1e-4, "weight_decay": 0.0},
    {"params": ["layers.0", "layers.[2-9].mlp"], "lr": lambda step: 3 * lr(step)},
    {"params": "lm_head", "weight_decay": 0.3},
]
OWN: dict[str, dict[str, Any]] = {
    "adamw": {"betas": (0.8, 0.99), "eps": 1e-6},
    "sgd": {"momentum": 0.5, "nesterov": True},
    "lion": {"betas": (0.7, 0.9)},
}


def entry_of(name: str) -> int | None:
    """Return the number of the group in GROUPS that a parameter is in, or None."""
    if "embed_tokens" in name:
        return 0
    if ".layers.0." in name or ".layers.2.mlp." in name:
        return 1
    return 2 if "lm_head" in name else None


def torch_run(
    model: nn.Module,
    rows: list[dict[str, torch.Tensor]],
    optimizer: Optimizer,
    groups: list[dict[str, Any]],
    entry: Callable[[str], int | None],
    *,
    clip: float = 0.0,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Run the same steps in memory, with one of torch's groups for each parameter."""
    model = copy.deepcopy(model)
    created = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        number = entry(name)
        group_values = (
            {} if number is None else {k: v for k, v in groups[number].items() if k != "params"}
        )
        decay = optimizer.weight_decay if parameter.ndim >= 2 else 0.0
        rate = group_values.pop("lr", optimizer.lr)
        created.append({"params": [parameter], "weight_decay": decay, "rate": rate, **group_values})
    stepping, losses = in_memory(optimizer, created), []
    for step, row in enumerate(rows):
        loss = loss_of(model, row)
        loss.backward()
        losses.append(loss.item())
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for group in stepping.param_groups:
            group["lr"] = group["rate"](step) if callable(group["rate"]) else group["rate"]
        stepping.step()
        stepping.zero_grad()
    return losses, {name: p.detach() for name, p in model.named_parameters()}


# -- equal to torch --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "clip"),
    [
        (AdamW(lr=lr, betas=(0.9, 0.95), weight_decay=0.1), 0.0),
        (AdamW(lr=lr, betas=(0.9, 0.95), weight_decay=0.1), 0.3),
        (SGD(lr=lambda step: 20 * lr(step), weight_decay=0.1), 0.3),
    ],
)
def test_groups_equal_those_of_torch(optimizer, clip, tmp_path):
    model, rows = small_model("llama"), batches(6, batch=3, seq=16)
    groups = [dict(group) for group in GROUPS]
    groups[1] |= OWN[optimizer.name]
    expected_losses, expected = torch_run(model, rows, optimizer, groups, entry_of, clip=clip)
    losses, weights = lohan_run(
        model, rows, tmp_path, optimizer=optimizer, param_groups=groups, clip=clip
    )
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_close(weights, expected, 1e-5)
    _, without = torch_run(small_model("llama"), rows, optimizer, [], lambda _: None, clip=clip)
    for name in expected:  # the comparison would show a group that is ignored
        if entry_of(name) is not None and expected[name].ndim > 1:
            assert float((expected[name] - without[name]).abs().max()) > 2e-5, name


def test_lion_takes_the_values_of_groups(tmp_path):
    """One step: later ones depend on the sign of momenta that are nearly zero."""
    model, rows = small_model("llama"), batches(1, batch=3, seq=16)
    optimizer = Lion(lr=lr, weight_decay=0.1)
    groups = [{"params": "layers.0", "lr": 1e-3, "weight_decay": 0.5}]

    def entry(name: str) -> int | None:
        return 0 if ".layers.0." in name else None

    _, expected = torch_run(model, rows, optimizer, groups, entry)
    _, weights = lohan_run(model, rows, tmp_path, optimizer=optimizer, param_groups=groups)
    off = sum(int(((weights[n] - p).abs() > 1e-6).sum()) for n, p in expected.items())
    assert off < 1e-3 * sum(p.numel() for p in expected.values())


def test_lora_plus_trains_second_matrices_faster(tmp_path):
    """The second matrix of every adapter learns faster, and the base stays as it is."""
    pytest.importorskip("peft", reason="adapters need the extra: pip install 'lohan[peft]'")
    from tests.support.models import adapted

    rows, optimizer = batches(4, batch=3, seq=16), AdamW(lr=lr)
    groups = [{"params": "lora_B", "lr": lambda step: 16 * lr(step)}]

    def entry(name: str) -> int | None:
        return 0 if "lora_B" in name else None

    _, expected = torch_run(
        adapted(small_model("llama")),
        rows,
        optimizer,
        groups,
        lambda n: 0 if "lora_B" in n else None,
    )
    _, weights = lohan_run(
        adapted(small_model("llama")), rows, tmp_path, optimizer=optimizer, param_groups=groups
    )
    assert_close(weights, expected, 1e-5)


def test_parameters_are_accepted_instead_of_patterns(tmp_path):
    """Also in the form of named_parameters, and a tied weight by either of its names."""
    rows, collected = batches(2, batch=2, seq=12), []
    for number in range(3):
        model = small_model("gpt2")
        params: Any = [
            "lm_head",
            model.lm_head.weight,
            [(n, p) for n, p in model.named_parameters() if "wte" in n],
        ][number]
        groups = [{"params": params, "lr": 2e-3}]
        del params
        collected.append(lohan_run(model, rows, tmp_path / str(number), param_groups=groups)[1])
    for other in collected[1:]:
        assert [n for n in other if not torch.equal(other[n], collected[0][n])] == []
    _, expected = torch_run(
        small_model("gpt2"),
        rows,
        AdamW(lr=lr, betas=(0.9, 0.95), weight_decay=0.1),
        [{"lr": 2e-3}],
        lambda name: 0 if "wte" in name else None,
    )
    assert_close(collected[0], expected, 1e-5)


# -- the same bits ---------------------------------------------------------------------------------


NET_GROUPS = [
    {"params": ["blocks.0.linear", "blocks.2"], "lr": lambda s: 4 * lr(s), "betas": (0.7, 0.9)},
    {"params": ["entry.bias", "shift"], "lr": lambda step: lr(step + 3), "weight_decay": 0.2},
]
LLAMA_GROUPS = [
    {"params": "layers.1", "lr": lambda step: 4 * lr(step), "betas": (0.7, 0.9)},
    {"params": "lm_head", "lr": lambda step: lr(step + 3), "weight_decay": 0.2},
]


def bits(
    place: Path, monkeypatch, tuning: PlanTuning, *, kind: str = "several", **options
) -> RunResult:
    tune_plans(monkeypatch, tuning)
    groups = LLAMA_GROUPS if kind == "llama" else NET_GROUPS
    dtype = options.pop("dtype", torch.float32)
    rows = net_batches(5, kind=kind, dtype=dtype)
    return train_with_delays(
        small_net(kind, dtype=dtype), rows, place, param_groups=groups, **options
    )


@pytest.mark.parametrize(
    ("clip", "tuning", "more"),
    [
        (0.0, PlanTuning(deferred=0.5, ring=1), {}),  # half of the updates run in the next forward
        (0.3, PlanTuning(spilled=0.5), {}),  # all do
        (0.9, PlanTuning(spilled=0.0), {"update_mode": "optimized"}),  # speculated and rolled back
        (0.5, PlanTuning(cached=0.4, spilled=0.0), {"kind": "llama", "dtype": torch.float16}),
    ],
)
def test_the_schedule_changes_no_bit(clip, tuning, more, tmp_path, monkeypatch):
    """Learning rates change in every step, so an update with those of another step would show."""
    serial = bits(tmp_path / "serial", monkeypatch, PlanTuning(), overlap=False, clip=clip, **more)
    overlapped = bits(tmp_path / "overlapped", monkeypatch, tuning, clip=clip, seed=1, **more)
    if not clip:
        overlapped = RunResult(
            overlapped.losses, serial.norms, overlapped.stored, overlapped.progress
        )
    serial.check(overlapped)


def test_resumed_bits_and_the_record_of_groups(tmp_path):
    rows = batches(4, batch=2, seq=12)
    _, expected = lohan_run(small_model("llama"), rows, tmp_path / "whole", param_groups=GROUPS)
    for resume, part in ((False, rows[:2]), (True, rows[2:])):
        model = small_model("llama")
        with attached(model, tmp_path / "cut", param_groups=GROUPS, resume=resume) as session:
            assert changed_groups(session) == ""
            for row in part:
                loss_of(model, row).backward()
            weights = master_weights(session)
            recorded = session.store.meta[META_KEY]
    assert [n for n in expected if not torch.equal(weights[n], expected[n])] == []
    rates = {group["parameters"]: group["lr"] for group in recorded}
    assert rates[1] in (1e-4, lr(3)) and 3 * lr(3) in rates.values()
    with attached(small_model("llama"), tmp_path / "cut", resume=True) as session:
        assert changed_groups(session).startswith("other parameter groups than in the last step")


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"params": "layer.0"}], r"^param_groups\[0\]: 'layer.0' matches no.*mean layers.0\?"),
        (
            [{"params": "mlp"}, {"params": "layers.1"}],
            r"^parameter \S+layers.1.mlp\S+ is in param_groups\[0\] and in param_groups\[1\]",
        ),
        (
            [{"params": "mlp", "weight_deacy": 0}],
            r"^param_groups\[0\]: AdamW has no 'weight_deacy'"
            r".*did you mean weight_decay\?",
        ),
        ([{"params": "mlp", "moments": "int8"}], "moments is the same for all parameters"),
        ([{"params": "mlp", "betas": (0.9, 1.5)}], r"^param_groups\[0\]: AdamW betas\[1\] is 1.5"),
        ([{"params": "mlp", "momentum": 0.9}], "AdamW has no 'momentum'"),
        ([{"params": []}], r"^param_groups\[0\]: params is \[\]; give a pattern"),
        ([{"lr": 1e-3}], r"a group is a mapping with 'params'"),
        ([{"params": nn.Parameter(torch.ones(2))}], "1 of its parameters are not in LlamaFor"),
        ([{"params": "norm"}], "'norm' matches 1 parameters of LlamaForCausalLM, all of them fro"),
    ],
)
def test_rejects_invalid_groups(groups, message, tmp_path):
    model = small_model("llama")
    model.model.norm.requires_grad_(False)
    with pytest.raises(ConfigError, match=message):
        attached(model, tmp_path, param_groups=groups)
    assert not list(tmp_path.iterdir())


def test_patterns_match_parts_of_names():
    name = "model.layers.10.self_attn.q_proj.weight"
    for pattern in ("q_proj", "layers.10", "layers.*.self_attn", "*_proj", "layers.1?", name):
        assert matches(pattern, name), pattern
    for pattern in ("layers.1", "q", "layers.10.q_proj", f"x.{name}", "proj"):
        assert not matches(pattern, name), pattern


# -- `lohan train` ---------------------------------------------------------------------------------


TABLES = """
model = "m"
data = "d.jsonl"
out = "o"
[train]
lr = 2e-5
[[train.param_groups]]
params = ["embed_tokens", "lm_head"]
lr = 1e-5
weight_decay = 0.0
[[train.param_groups]]
params = "layers.0"
betas = [0.8, 0.9]
"""


def config(text: str = TABLES) -> Config:
    return Config.from_mapping(tomllib.loads(text), base_dir=Path("/here"))


def test_settings_are_written_and_read():
    result = config()
    assert config(result.to_toml()) == result
    first, second = result.train.param_groups_with(100)
    assert first["lr"](50) == pytest.approx(result.train.lr_at(50, 100) / 2)
    assert second == {"params": ("layers.0",), "betas": (0.8, 0.9)}


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("lr = 1e-5", "rate = 1e-5", r"^\[\[train.param_groups\]\] 1: AdamW has no 'rate'"),
        ("lr = 1e-5", 'lr = "fast"', r"^\[\[train.param_groups\]\] 1: AdamW lr is 'fast'"),
        ("[0.8, 0.9]", "[0.8]", r"^\[\[train.param_groups\]\] 2: AdamW betas is \(0.8,\)"),
        ('params = "layers.0"', "", r"param_groups 2: it has no params"),
        ("lr = 2e-5", 'optimizer = "sgd"', r"2: SGD has no 'betas', it takes params, lr,"),
        ('params = "layers.0"', "params = 3", "wants a name, or a list of names"),
    ],
)
def test_rejects_invalid_group_settings(before, after, message):
    with pytest.raises(ConfigError, match=message):
        config(TABLES.replace(before, after))
    with pytest.raises(ConfigError, match=r"write .*train.param_groups.* above each"):
        config(TABLES.partition("[[")[0] + 'param_groups = "bias"')


def test_a_run_with_groups_is_resumed(lohan, tmp_path):
    """After an edit of run.toml, `lohan resume` reports the changed groups."""
    inputs, out = write_tiny_inputs(tmp_path), tmp_path / "run"
    group = 'train.param_groups=[{params = "%s", lr = 1e-4}]'
    refused = lohan("train", *tiny_arguments(inputs, tmp_path / "no", "--set", group % "layer"))
    assert refused.code == 2
    assert "[{params" not in refused.err and "'layer' matches no parameter of Llama" in refused.err
    ended = lohan("train", *tiny_arguments(inputs, out, "--set", group % "layers.0", "--no-export"))
    assert ended.code == 0, ended.err
    file = out / "run.toml"
    file.write_text(file.read_text().replace("layers.0", "layers.1.mlp"))
    ended = lohan("resume", out, "--steps", 7)
    assert ended.code == 0, ended.err
    assert "other parameter groups than in the last step: of " in ended.out
