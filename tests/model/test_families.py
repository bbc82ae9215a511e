"""Shapes of GPT, Llama and DiT blocks have the published numbers."""

from __future__ import annotations

import pytest

from lohan.errors import ConfigError
from lohan.model.shapes import Activation, BlockShape, dit_shape, gated_block, gpt_block, gpt_shape

SEQ = 1024


def part(block: BlockShape, name: str) -> Activation:
    (actual,) = [part for part in block.activations if part.name == name]
    return actual


def test_a_gpt_block_keeps_34_bytes_per_hidden_element_and_token():
    for hidden in (1600, 5120):
        block = gpt_shape(2, 25 if hidden == 1600 else 40, hidden).blocks[0]
        assert block.input_elements == hidden
        assert block.elements * 2 == 34 * hidden


def test_matrix_products_of_a_gpt_block():
    h = 5120
    block = gpt_shape(1, 40, h).blocks[0]
    assert part(block, "qkv").flops == 6 * h * h
    assert part(block, "projection").flops == pytest.approx(2 * h * h, rel=1e-3)
    assert part(block, "fc1").flops == 8 * h * h
    assert part(block, "attention").flops_per_context == 2 * h
    assert block.flops == pytest.approx(24 * h * h, rel=2e-3)
    assert block.flops_at(SEQ) == block.flops + 2 * h * SEQ


def test_repeating_all_of_a_block_leaves_out_what_makes_its_output():
    h = 5120
    block = gpt_shape(1, 40, h).blocks[0]
    left_out = block.flops_at(SEQ) - block.recompute_flops_at(SEQ)
    assert left_out == pytest.approx(8 * h * h, rel=1e-3)
    everything = [each.name for each in block.activations]
    assert block.recompute_flops_at(SEQ, everything) == 0
    saved = block.recompute_flops_at(SEQ) - block.recompute_flops_at(SEQ, ["qkv", "attention"])
    assert saved == 6 * h * h + 2 * h * SEQ


def test_products_come_first_in_the_order_of_benefit():
    block = gpt_shape(1, 40, 5120).blocks[0]
    names = [each.name for each in block.by_benefit(SEQ)]
    assert set(names[:4]) == {"qkv", "projection", "fc1", "attention"}
    # a longer sequence makes attention dearer to repeat, at the same size
    assert names[0] != "attention"
    assert block.by_benefit(64 * SEQ)[0].name == "attention"


def test_without_dropout_or_in_parallel_a_block_keeps_less():
    sizes = {"parameters": 1, "hidden": 64, "inner": 256}
    assert gpt_block(**sizes).elements == 17 * 64
    assert gpt_block(**sizes, dropout=False).elements == 16 * 64
    assert gpt_block(**sizes, dropout=False, parallel=True).elements == 15 * 64
    assert gpt_block(**sizes, dropout=False, parallel=True, norms=1).elements == 14 * 64
    assert gpt_block(**sizes, dropout=False, relu=True).elements == 12 * 64
    plain = gpt_block(**sizes, dropout=False).flops
    assert gpt_block(**sizes, dropout=False, parallel=True).flops == pytest.approx(plain, rel=0.02)


def test_llama_block_counts_elements_and_flops():
    h, kv, inner = 4096, 1024, 14336
    block = gated_block(parameters=1, hidden=h, queries=h, keys=kv, inner=inner)
    assert block.elements == 5 * h + (h + 2 * kv) + 4 * inner
    products = 2 * (h * (h + 2 * kv) + h * h + 3 * h * inner)
    assert block.flops == pytest.approx(products, rel=2e-3)
    assert part(block, "qkv").elements == h + 2 * kv
    assert block.flops_at(SEQ) - block.recompute_flops_at(SEQ) == pytest.approx(
        2 * inner * h, rel=1e-3
    )


@pytest.mark.parametrize(
    ("sizes", "billions"),
    [((48, 25, 1600), 1.5576), ((40, 40, 5120), 12.85), ((96, 96, 12288), 174.6)],
)
def test_sizes_of_gpt(sizes, billions):
    assert gpt_shape(*sizes).parameters / 1e9 == pytest.approx(billions, rel=1e-3)


def test_dit_xl_2_has_its_published_size():
    shape = dit_shape(28, 16, 1152)
    assert shape.sample_tokens == 1024
    # 675,129,632 are published for 256 x 256, fixed positions of 256 tokens included
    assert shape.parameters == 675_129_632 - 256 * 1152
    assert shape.vocabulary == 0 and shape.head_flops == 0


def test_modulation_of_a_dit_block_is_parameters_and_hardly_work():
    h = 4096
    block = dit_shape(28, 32, h).blocks[0]
    assert block.parameters == pytest.approx(18 * h * h, rel=1e-3)
    assert block.flops == pytest.approx(24 * h * h, rel=2e-3)
    assert block.flops_per_context == 4 * h


def test_heads_must_divide_the_hidden_size():
    with pytest.raises(ConfigError, match="100 does not divide by 3"):
        gpt_shape(2, 3, 100)
