"""The default scale of LoRA adapters."""

from __future__ import annotations

import pytest

from lohan.checkpoint.adapters import add_lora
from lohan.optim import Lora
from tests.support.models import small_model

pytest.importorskip("peft", reason="adapters need the extra: pip install 'lohan[peft]'")


@pytest.mark.parametrize("alpha, scale", [(None, 2.0), (2.0, 0.5)])
def test_alpha_is_twice_the_rank_unless_given(alpha, scale):
    lora = Lora(rank=4, alpha=alpha, targets=("q_proj",))
    layers = [m for m in add_lora(small_model("llama"), lora).modules() if hasattr(m, "lora_A")]
    assert len(layers) == 3
    assert {value for layer in layers for value in layer.scaling.values()} == {scale}
