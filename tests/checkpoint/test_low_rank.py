"""A full fine-tune as a LoRA adapter: the best approximation of its rank, which PEFT loads."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from lohan.checkpoint.low_rank import best_factors
from tests.support.training_runs import (
    evaluated_inputs_fixture,  # noqa: F401 - a fixture
    run_evaluated,
)


@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (7, 7)])
def test_factors_are_the_truncated_singular_value_decomposition(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    a, b, held = best_factors(matrix, 3)
    torch.testing.assert_close(b @ a, u[:, :3] * s[:3] @ vt[:3], rtol=1e-4, atol=1e-5)
    assert held == pytest.approx(float(s[:3].square().sum()), rel=1e-5)


def test_factors_of_a_larger_rank_than_the_matrix_reproduce_it():
    matrix = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    a, b, held = best_factors(matrix, 10)
    assert (a.shape, b.shape) == ((10, 6), (4, 10))
    torch.testing.assert_close(b @ a, matrix, rtol=1e-4, atol=1e-5)
    assert held == pytest.approx(float(matrix.square().sum()), rel=1e-5)


def test_exported_adapter_holds_the_stated_share_and_loads_in_peft(lohan, inputs, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from transformers import AutoModelForCausalLM

    run_evaluated(inputs, tmp_path / "run")
    words = ["export", tmp_path / "run", "--out", tmp_path / "adapter", "--as-lora", "2", "--json"]
    ran = lohan(*words)
    assert ran.code == 0, ran.err
    facts = json.loads(ran.out)
    base = load_file(inputs / "model" / "model.safetensors")
    trained = load_file(tmp_path / "run" / "model" / "model.safetensors")
    plain = AutoModelForCausalLM.from_pretrained(inputs / "model")
    merged = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").merge_and_unload()
    state = merged.state_dict()
    matrices = [name for name, share in facts["parameters"].items() if 0 < share < 1]
    assert matrices and 0 < facts["share"] < 1
    for name in matrices:
        difference = (trained[name] - base[name]).double()
        left = (trained[name] - state[name]).double().square().sum()
        share = 1 - float(left / difference.square().sum())
        s = torch.linalg.svdvals(difference).square()
        assert share == pytest.approx(float(s[:2].sum() / s.sum()), abs=1e-3)
        assert facts["parameters"][name] == pytest.approx(share, abs=1e-3)
