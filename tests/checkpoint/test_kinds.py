"""`lohan.load` loads models that are not causal language models.

The class is the one that config.json names, and weights are streamed from the folder as for any
other model.
"""

from __future__ import annotations

import json

import pytest
import torch
import transformers as hf
from transformers import BertConfig, ViTConfig

import lohan
from lohan.checkpoint.hf_folder import KINDS, kind_of
from lohan.errors import ModelError
from tests.support.architectures import architecture_batches, architecture_model, without_noise
from tests.support.models import assert_close, attached, loss_of, master_weights, plain_run
from tests.support.training_runs import (
    data_fixture,  # noqa: F401 - a fixture
    model_fixture,  # noqa: F401 - a fixture
)


@pytest.fixture
def cli(lohan):
    """Return the command line under a name that the package does not have."""
    return lohan


LOADED = {
    "bert": "AutoModelForSequenceClassification",
    "t5": "AutoModelForSeq2SeqLM",
    "vit": "AutoModelForImageClassification",
    "llava": "AutoModelForImageTextToText",
}


@pytest.mark.parametrize("kind", LOADED)
def test_loads_trains_and_exports(kind, tmp_path):
    result = architecture_model(kind)
    result.save_pretrained(tmp_path / "model")
    net = lohan.load(tmp_path / "model").train()
    assert type(net) is type(result) and all(p.is_meta for p in net.parameters())
    assert kind_of(net.config, tmp_path) == LOADED[kind]
    batches = architecture_batches(kind, 2)
    expected_losses, expected = plain_run(result, batches)
    with attached(net, tmp_path, micro_batch=2) as session:
        losses = []
        for batch in batches:
            loss = loss_of(net, batch)
            loss.backward()
            losses.append(loss.item())
        assert_close(without_noise(master_weights(session)), without_noise(expected))
        session.export(tmp_path / "tuned")
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    tuned = getattr(hf, LOADED[kind]).from_pretrained(tmp_path / "tuned")
    assert type(tuned) is type(result)
    weights = dict(tuned.named_parameters())
    assert_close(without_noise({n: weights[n].detach() for n in expected}), without_noise(expected))


def test_a_model_without_a_loss_is_refused_with_what_there_is(tmp_path):
    for config, name in ((BertConfig(), "BertModel"), (ViTConfig(), "ViTModel")):
        config.architectures = [name]
        config.save_pretrained(tmp_path)
        with pytest.raises(ModelError, match=f"{name} is not a model that LoHan loads") as refused:
            lohan.load(tmp_path)
        assert all(text in str(refused.value) for text in KINDS.values())


def test_the_command_line_names_what_it_trains(cli, data, tmp_path):
    config = {**BertConfig().to_dict(), "architectures": ["BertForMaskedLM"]}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    given = ("--data", data, "--out", tmp_path / "run", "--host", "64MiB")
    ended = cli("train", "--task", "language", "--model", tmp_path / "model", *given)
    assert ended.code == 2
    assert "BertForMaskedLM is not a causal language model" in ended.err
    assert "lohan.load and lohan.attach" in ended.err


def test_loads_diffusers_folder_on_meta_and_rejects_unknown_class(tmp_path):
    pytest.importorskip("diffusers")
    from tests.support.model_folders import load_denoiser, save_pipeline

    folder = save_pipeline(tmp_path / "pipeline", "sd3")
    net = lohan.load(folder, dtype="bf16")
    tensor = load_denoiser(folder / "transformer", "sd3").to(torch.bfloat16)
    assert type(net) is type(tensor) and all(p.is_meta for p in net.parameters())
    buffers = dict(tensor.named_buffers())
    assert buffers and all(torch.equal(b, buffers[n]) for n, b in net.named_buffers())
    (folder / "transformer" / "config.json").write_text('{"_class_name": "UNet2DModel"}')
    with pytest.raises(ModelError, match="UNet2DModel is not a model that LoHan loads from"):
        lohan.load(folder)
