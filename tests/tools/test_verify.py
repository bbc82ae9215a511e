"""`lohan verify` passes what is right in every mode, and fails what is wrong by a little."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, Qwen3Config

from lohan.capture import blocks
from lohan.checkpoint.hf_folder import load_config
from lohan.checkpoint.sources import FolderSource
from lohan.config import TrainConfig
from lohan.engine import attach as api
from lohan.errors import ModelError
from lohan.optim import AdamW
from lohan.tools import verify as whole
from lohan.tools.reference import Recipe, loaded
from lohan.tools.verify import (
    TOLERANCES,
    Difference,
    Noise,
    copy_model,
    judge_losses,
    judge_weights,
    worst,
)
from lohan.train import inputs as starting
from lohan.util.units import GiB
from tests.support.model_folders import write_random_checkpoint
from tests.support.training_runs import assert_refused, modification_times

SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_random_checkpoint(folder / "model", LlamaConfig(**SIZES), std=0.05)
    rows = [{"input_ids": [1 + (i * j * 7) % 66 for j in range(1, 9 + i % 9)]} for i in range(24)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


TRACED: dict = {}


@pytest.fixture(autouse=True)
def traced_once(monkeypatch: pytest.MonkeyPatch):
    """Cache the traces of models.

    Tracing a model on fake tensors takes most of the time of a run this small, and the result
    is always the same.
    """
    for module, name in ((api, "workload_of"), (whole, "workload_of"), (blocks, "used_outside")):
        monkeypatch.setattr(module, name, remembered(getattr(module, name)))


def remembered(find):
    def found(model, cut, batch, *place):
        shape = [(n, str(p.shape), str(p.dtype)) for n, p in model.named_parameters()]
        key = find.__name__, str(shape), str(batch), model.config.to_json_string(), place
        if key not in TRACED:
            TRACED[key] = find(model, cut, batch, *place)
        return TRACED[key]

    found.__name__ = find.__name__
    return found


@pytest.fixture
def verify(lohan, inputs: Path, tmp_path: Path):
    """Return a function that runs `lohan verify` and returns how it ended and its JSON."""

    def run(*more: object, model: Path | None = None, steps: int = 2):
        before = modification_times(tmp_path)
        ended = lohan(
            "verify",
            "--model",
            model or inputs / "model",
            "--data",
            inputs / "data.jsonl",
            "--host",
            "600KiB",
            "--ssd",
            tmp_path,
            "--batch",
            3,
            "--seq",
            16,
            "--lr",
            "1e-3",
            "--steps",
            steps,
            "--json",
            *more,
        )
        assert modification_times(tmp_path).keys() == before.keys(), "something was left behind"
        return ended, json.loads(ended.out) if ended.out.startswith("{") else {}

    return run


# -- what is right --------------------------------------------------------------------------------


def test_every_mode_passes(verify, inputs):
    ended, result = verify("--all-modes", steps=4)
    assert ended.code == 0, ended
    assert result["pass"] and not result["noise_measured"]
    assert (result["layers"], result["all_layers"]) == (3, 3)
    modes = [(m["update_mode"], m["activations"], m["overlap"]) for m in result["modes"]]
    assert {mode[0] for mode in modes} == {"serial", "naive", "optimized", "balanced"}
    assert {mode[1] for mode in modes} == {"holistic", "recompute", "all"}
    assert [mode for mode in modes if not mode[2]] == [("balanced", "holistic", False)]
    names = {name for name, _ in whole.load(inputs / "model").named_parameters()}
    for mode in result["modes"]:
        assert mode["pass"] and mode["other_bits_than"] is None
        assert [step["step"] for step in mode["steps"]] == [1, 2, 3, 4]
        for step in mode["steps"]:
            assert {tensor["name"] for tensor in step["tensors"]} == names
            assert all(tensor["way"] > 0 for tensor in step["tensors"])  # the run does train
            assert step["loss_difference"] == abs(step["loss"] - step["reference_loss"])


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_16_bit_types(verify, dtype):
    ended, result = verify("--dtype", dtype, "--lr", "1e-4")
    assert ended.code == 0, ended
    assert result["dtype"] == dtype


@pytest.mark.parametrize(
    "more",
    [
        ("--micro-batch", 2),
        pytest.param(("--clip", 0), marks=pytest.mark.slow),
    ],
)
def test_other_settings(verify, more):
    ended, result = verify(*more)
    assert ended.code == 0, ended
    assert result["pass"]


@pytest.mark.parametrize(
    ("optimizer", "rate"), [("sgd", "0.05"), pytest.param("lion", "1e-4", marks=pytest.mark.slow)]
)
def test_other_optimizers(verify, optimizer, rate):
    ended, result = verify("--set", f"train.optimizer={optimizer}", "--lr", rate, steps=3)
    assert ended.code == 0, ended
    assert result["pass"]


def test_rounded_moments_have_nothing_to_be_compared_with(verify):
    ended, _ = verify("--set", "train.moments=int8")
    assert_refused(
        ended, "--moments int8 rounds what PyTorch keeps in fp32", "--set train.moments=fp32"
    )


def test_rejects_model_folder_without_weights(verify, inputs, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    (empty / "config.json").write_bytes((inputs / "model" / "config.json").read_bytes())
    ended, _ = verify(model=empty)
    assert_refused(ended, rf"{empty}: holds neither model.safetensors nor", "give a folder with")
    recipe = Recipe(
        model=empty, train=TrainConfig(), dtype="fp32", seed=0, steps=1, total=1, batch=lambda _: {}
    )
    with pytest.raises(ModelError, match=r"cannot load this model: .*no file named .*that it can"):
        loaded(recipe, torch.float32)


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_verifies_adapters_against_peft(verify, dtype, tmp_path):
    """The base stays as it is, the adapters learn as PEFT's would."""
    pytest.importorskip("peft")
    config = tmp_path / "lora.toml"
    config.write_text("[train]\nlora = 2\n")
    ended, result = verify("--config", config, "--dtype", dtype)
    assert ended.code == 0, ended
    last = result["modes"][0]["steps"][-1]["tensors"]
    moved = [tensor["name"] for tensor in last if tensor["way"] > 0]
    assert moved and all(".lora_" in name for name in moved)
    still = [tensor for tensor in last if ".lora_" not in tensor["name"]]
    assert len(still) == 30 and all(tensor["distance"] == 0 for tensor in still)


@pytest.mark.parametrize(
    "base", ["nf4", *(pytest.param(one, marks=pytest.mark.slow) for one in ("int8", "fp8"))]
)
def test_packed_base_is_compared_with_dequantised_reference(verify, base, tmp_path, monkeypatch):
    """As PEFT on the dequantised base in memory; the base itself would be another model."""
    pytest.importorskip("peft")
    config = tmp_path / "lora.toml"
    config.write_text(f'[train]\nlora = 2\nbase = "{base}"\n')
    ended, result = verify("--config", config)
    assert ended.code == 0 and result["pass"], ended
    last = result["modes"][0]["steps"][-1]["tensors"]
    assert any(".lora_" in tensor["name"] and tensor["way"] > 0 for tensor in last)
    monkeypatch.setattr("lohan.tools.reference._dequantise_base", lambda *_: None)
    ended, result = verify("--config", config)
    assert ended.code == 1 and not result["pass"], ended


def test_on_an_emulated_device(verify):
    ended, _ = verify("--set", "budget.device='emulated'", "--set", "budget.device_memory='8MiB'")
    assert ended.code == 0, ended


@pytest.mark.slow
def test_packed_rows(verify):
    ended, _ = verify("--set", "train.pack=true")
    assert ended.code == 0, ended


def test_dropout_is_off_in_both(verify, inputs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2") / "model"
    config = GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=4,
        vocab_size=67,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
        attn_pdrop=0.1,
        resid_pdrop=0.1,
    )
    write_random_checkpoint(folder, config, std=0.05)
    ended, result = verify(model=folder)
    assert ended.code == 0, ended
    assert "attn_pdrop" in result["notes"][0] and "resid_pdrop" in result["notes"][0]


def test_prints_summary_of_passed_verification(lohan, inputs, tmp_path):
    (tmp_path / "run.toml").write_text(
        f'model = "{inputs}/model"\ndata = "{inputs}/data.jsonl"\nout = "run"\n'
        '[train]\nbatch = 2\nseq = 16\nlr = 1e-3\n[budget]\nhost = "2MiB"\n'
        f'ssd = ["{tmp_path}"]\n'
    )
    ended = lohan("verify", "--config", tmp_path / "run.toml", "--steps", 2)
    assert ended.code == 0, ended
    assert "pass: 30 tensors and the loss of every step" in ended.out
    assert "balanced, activations holistic" in ended.out
    assert "the first 2 steps of 12" in ended.out
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


# -- what is wrong --------------------------------------------------------------------------------


def attach_with(monkeypatch, **changed):
    """LoHan's side with other settings than the user's."""
    attach = starting.attach

    def other(model, **given):
        return attach(model, **{k: changed.get(k, lambda v: v)(v) for k, v in given.items()})

    monkeypatch.setattr(starting, "attach", other)


def test_detects_wrong_learning_rate(verify, monkeypatch):
    lr_at = AdamW.lr_at
    monkeypatch.setattr(AdamW, "lr_at", lambda own, step: 1.01 * lr_at(own, step))
    ended, result = verify()
    assert ended.code == 1 and not result["pass"]


def test_clipping_lost(verify, monkeypatch):
    attach_with(monkeypatch, clip=lambda value: 0.0)
    ended, result = verify("--clip", 0.01)
    assert ended.code == 1 and not result["pass"]


def test_decay_lost(verify, monkeypatch, inputs, tmp_path):
    config = tmp_path / "decay.toml"
    config.write_text("[train]\nweight_decay = 0.5\n")
    assert verify("--config", config)[0].code == 0
    attach_with(monkeypatch, optimizer=lambda adamw: replace(adamw, weight_decay=0.0))
    ended, _ = verify("--config", config)
    assert ended.code == 1


def test_parameter_groups(verify, monkeypatch, tmp_path):
    """Both sides have the groups of the settings; a run that ignores them differs."""
    config = tmp_path / "groups.toml"
    config.write_text(
        "[train]\nweight_decay = 0.1\n"
        '[[train.param_groups]]\nparams = "layers.1"\nlr = 1e-3\nbetas = [0.5, 0.9]\n'
        '[[train.param_groups]]\nparams = ["norm", "embed_tokens"]\nweight_decay = 0.5\n'
    )
    assert verify("--config", config)[0].code == 0
    attach_with(monkeypatch, param_groups=lambda groups: ())
    assert verify("--config", config)[0].code == 1


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_detects_one_weight_read_wrong(verify, monkeypatch, dtype):
    """One weight of 1536."""
    bad = "model.layers.1.mlp.up_proj.weight"
    read = FolderSource.read_flat

    def corrupted(self, name: str, start: int, stop: int) -> torch.Tensor:
        values = read(self, name, start, stop)
        if name == bad and start == 0:
            values = values.clone()
            values[3] += 0.1
        return values

    monkeypatch.setattr(FolderSource, "read_flat", corrupted)
    ended, result = verify("--dtype", dtype, "--lr", "1e-4")
    assert ended.code == 1
    first = result["modes"][0]["steps"][0]["tensors"]
    assert bad in [tensor["name"] for tensor in first if not tensor["pass"]]
    far = max(first, key=lambda tensor: tensor["largest"])
    assert far["name"] == bad and far["largest"] == pytest.approx(0.1, rel=0.1)


def test_bits_that_depend_on_the_mode(verify, monkeypatch):
    """Within the tolerance, but not the same in every mode: that too is a failure."""
    digest = whole.lohan_run

    def other(recipe, config, *args, **kwargs):
        result = digest(recipe, config, *args, **kwargs)
        return replace(result, digest="x") if config.train.update_mode == "naive" else result

    monkeypatch.setattr(whole, "lohan_run", other)
    monkeypatch.setattr(whole, "ALL_ACTIVATIONS", ())
    monkeypatch.setattr(whole, "UPDATE_MODES", ("balanced", "naive"))
    ended, result = verify("--all-modes", steps=1)
    assert ended.code == 1
    assert {m["update_mode"] for m in result["modes"] if m["other_bits_than"]} == {"naive"}


# -- what does not fit ----------------------------------------------------------------------------


def test_layers_option_verifies_copy_with_fewer_layers(verify):
    ended, result = verify("--layers", 2)
    assert ended.code == 0, ended
    assert (result["layers"], result["all_layers"]) == (2, 3)


def test_model_that_does_not_fit_is_compared_with_fewer_layers(verify, monkeypatch):
    whole_bytes = []
    needed = whole._needed

    def watched(config, per):
        result = needed(config, per)
        whole_bytes.append(result(3))
        monkeypatch.setattr(whole, "host_memory_bytes", lambda: int(result(3) / 0.8) - 1)
        return result

    monkeypatch.setattr(whole, "_needed", watched)
    ended, result = verify()
    assert ended.code == 0, ended
    assert (result["layers"], result["all_layers"]) == (2, 3)
    assert "of all 3 layers needs" in result["notes"][0] and "first 2 layers" in result["notes"][0]
    tensors = {tensor["name"] for tensor in result["modes"][0]["steps"][0]["tensors"]}
    assert "model.layers.1.mlp.up_proj.weight" in tensors
    assert not any(name.startswith("model.layers.2.") for name in tensors)


def test_refuses_when_one_layer_exceeds_memory(verify, monkeypatch):
    monkeypatch.setattr(whole, "host_memory_bytes", lambda: 1000)
    ended, _ = verify()
    assert_refused(ended, "one layer needs .* 800 B is available; lower --batch or --seq")


def test_estimate_of_memory(inputs):
    """16 bytes per parameter, and activations and logits of the batch."""
    config = whole.Config(model=inputs / "model", data=inputs / "data.jsonl", out=inputs)
    needed = whole._needed(config, 16)
    parameters = sum(p.numel() for p in whole.load(inputs / "model").parameters())
    logits = 8 * 1024 * 67 * 4
    assert needed(3) > needed(2) > needed(1) > logits
    assert 16 * parameters + logits < needed(3) < GiB


# -- parts ----------------------------------------------------------------------------------------


def test_lists_with_an_entry_per_layer_are_cut(tmp_path):
    config = Qwen3Config(
        **{**SIZES, "num_hidden_layers": 4},
        head_dim=8,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=2,
    )
    assert len(config.layer_types) == 4
    write_random_checkpoint(tmp_path / "model", config)
    result = copy_model(tmp_path / "model", tmp_path / "copy", layers=3)
    assert (result.layers, result.all_layers, result.shrunk) == (3, 4, True)
    assert load_config(tmp_path / "copy").layer_types == config.layer_types[:3]
    assert (tmp_path / "copy" / "model.safetensors").is_symlink()


def difference(distance: float, name: str = "w", count: int = 100) -> Difference:
    return Difference(name, distance, distance, update=1.0, size=0.0, count=count)


def test_compares_differences_with_the_tolerances():
    fp32 = TOLERANCES["fp32"]
    (step,) = judge_weights([[difference(0.9e-3)]], fp32, None)
    assert step[0].passed and step[0].share == pytest.approx(0.9)
    (step,) = judge_weights([[difference(1.1e-3)]], fp32, None)
    assert not step[0].passed
    noise = Noise(losses=[0.1], weights=[{"w": 1e-3}])
    (step,) = judge_weights([[difference(2.4e-3)]], fp32, noise)
    assert step[0].passed and step[0].limit == pytest.approx(2.5e-3)
    assert judge_losses([2.0], [2.00001], fp32, None)[0].passed
    assert not judge_losses([2.0], [2.0001], fp32, None)[0].passed
    assert judge_losses([2.0], [2.1], fp32, noise)[0].passed


def test_tolerates_few_sign_flips():
    """A few weights that move the other way pass only where most tensors are noisy.

    If one of 100 weights does, the distance is a fifth of the update. Where most tensors are
    noisy that is chance; where the others are not, it is an error.
    """
    tensors = [difference(0.0, "a"), difference(0.0, "b"), difference(0.2, "c")]
    noisy = Noise(losses=[0.0], weights=[{"a": 0.1, "b": 0.1, "c": 0.0}])
    (step,) = judge_weights([tensors], TOLERANCES["bf16"], noisy)
    assert step[2].passed
    quiet = Noise(losses=[0.0], weights=[{"a": 1.0, "b": 1e-4, "c": 1e-4}])
    (step,) = judge_weights([tensors], TOLERANCES["bf16"], quiet)
    assert not step[2].passed
    many = [*tensors[:2], difference(1.0, "c")]
    (step,) = judge_weights([many], TOLERANCES["bf16"], noisy)
    assert not step[2].passed


def test_nan_never_passes():
    nan = float("nan")
    (step,) = judge_weights([[difference(5.0), difference(nan)]], TOLERANCES["fp32"], None)
    assert not step[1].passed and worst(step) is step[1]
    assert not judge_losses([nan], [2.0], TOLERANCES["fp32"], None)[0].passed
