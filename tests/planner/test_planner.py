"""Blocks and a budget give a plan that fits, or a refusal with both numbers and advice."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lohan.capture.blocks import cut
from lohan.checkpoint.hf_folder import build_from_config
from lohan.engine.context import workload_of
from lohan.errors import BudgetError
from lohan.model.layout import RankInfo
from lohan.model.options import PlanOptions
from lohan.model.plan import Plan
from lohan.model.workload import BatchWorkload, Footprint
from lohan.planner import presets
from lohan.planner.machine_plan import load_of_shape
from lohan.planner.planner import PlanProblem, closed_form_plan, lower_hint, make_plan
from lohan.util.units import MiB, format_bytes, parse_bytes

CONFIG = LlamaConfig(
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=8000,
    use_cache=False,
    tie_word_embeddings=False,
)


@pytest.fixture(scope="module")
def parts():
    """Return blocks and workload of a batch of 8 x 128 tokens, without memory for parameters."""
    model = build_from_config(CONFIG, dtype=torch.float32).train()
    blocks = cut(model)
    shape = torch.empty((8, 128), dtype=torch.long, device="meta")
    return blocks, workload_of(model, blocks, {"input_ids": shape})


def plan_for(blocks, *, host_bytes, workload=None, **options) -> Plan:
    return closed_form_plan(
        PlanProblem(blocks, PlanOptions(**options), host_bytes=host_bytes, workload=workload)
    )


def test_a_plan_fits_its_budget_and_shrinks_with_it(parts):
    blocks, workload = parts
    plans = {
        size: plan_for(blocks, dtype="fp32", host_bytes=size * MiB, workload=workload)
        for size in (400, 120, 70, 40)
    }
    for size, plan in plans.items():
        assert plan.tier_bytes("host") <= size * MiB
    assert plans[400].micro_batch == 8
    assert plans[40].micro_batch < 8
    for larger, smaller in ((400, 120), (120, 70), (70, 40)):
        assert plans[smaller].tier_bytes("host") <= plans[larger].tier_bytes("host")
        assert plans[smaller].micro_batch <= plans[larger].micro_batch


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_refusal_names_both_numbers_and_the_advice_is_enough(parts, dtype):
    blocks, workload = parts
    with pytest.raises(BudgetError) as refused:
        plan_for(blocks, dtype=dtype, host_bytes=5 * MiB, workload=workload)
    message = str(refused.value)
    assert "--host allows 5.00 MiB" in message
    assert "--batch (now 8) or --seq (now 128)" in message
    needed = re.search(r"the run needs ([\d.]+ \w+),", message)[1]
    assert f"raise --host to {needed}" in message
    owners = re.search(r"largest: (.*?)\)", message)[1]
    assert owners.count("iB") == 3
    enough = parse_bytes(needed)
    plan = plan_for(blocks, dtype=dtype, host_bytes=enough, workload=workload)
    assert 0.99 * enough < plan.tier_bytes("host") <= enough
    with pytest.raises(BudgetError):
        plan_for(blocks, dtype=dtype, host_bytes=int(0.99 * enough), workload=workload)


@pytest.mark.parametrize(
    ("workload", "options", "words"),
    [
        ({}, {}, ", or lower --batch (now 8) or --seq (now 32)"),
        ({"batch": 1}, {}, ", or lower --seq (now 32)"),
        (
            {},
            {"micro_batch": 4},
            ", or lower --batch (now 8) or --micro-batch (now 4) or --seq (now 32)",
        ),
        ({}, {"world": 2}, ", or lower --batch (now 8 for each rank) or --seq (now 32)"),
        ({"text": False}, {}, ", or lower --batch (now 8), or train on smaller images or latents"),
        ({"text": False, "batch": 1}, {}, ", or train on smaller images or latents"),
    ],
)
def test_advice_names_only_options_that_apply(workload, options, words):
    requested = BatchWorkload(
        **{"batch": 8, "seq": 32, "measure": lambda n: Footprint(), **workload}
    )
    assert lower_hint(requested, PlanOptions(dtype="fp32", **options)) == words


def test_images_have_no_seq():
    for name, text in (("dit-0.9b", False), ("llama-3-8b", True)):
        result = load_of_shape(presets.model(name), batch=2, seq=64, dtype="bf16")
        assert result.text is text


def test_ranks_on_the_cpu_get_advice_on_host_memory(parts):
    """There is no --device-memory to raise: compute works in host memory."""
    whole, workload = parts
    shards, options = RankInfo(world=2).shards(whole), PlanOptions(dtype="fp32", world=2)

    def one_memory(host_bytes: int) -> PlanProblem:
        how = {"host_bytes": host_bytes, "workload": workload, "in_one_memory": True}
        return PlanProblem(shards, options, **how)

    with pytest.raises(BudgetError) as refused:
        make_plan(one_memory(5 * MiB))
    message = str(refused.value)
    assert "its share of --host is 5.00 MiB" in message and "--device-memory" not in message
    assert "--batch (now 8 for each rank) or --seq (now 128), or start fewer ranks" in message
    needed = parse_bytes(re.search(r"each of 2 ranks needs ([\d.]+ \w+) for", message)[1])
    raised = parse_bytes(re.search(r"raise --host to ([\d.]+ \w+) for 2 ranks", message)[1])
    assert raised == pytest.approx(2 * needed, rel=0.01)
    enough = raised // 2
    planned = make_plan(one_memory(enough))
    plan, room = planned.plan, planned.device_bytes
    assert plan.tier_bytes("host") + plan.tier_bytes("device") <= enough and 0 < room < enough
    with pytest.raises(BudgetError):
        make_plan(one_memory(int(0.9 * needed)))


def test_a_given_micro_batch_is_kept_or_refused(parts):
    blocks, workload = parts
    plan = plan_for(blocks, dtype="fp32", host_bytes=400 * MiB, workload=workload, micro_batch=3)
    assert plan.micro_batch == 3
    tight = plan_for(blocks, dtype="fp32", host_bytes=36 * MiB, workload=workload)
    least = tight.tier_bytes("host")
    eight = {"dtype": "fp32", "host_bytes": least, "workload": workload, "micro_batch": 8}
    with pytest.raises(BudgetError):
        plan_for(blocks, **eight, tiles="off")
    assert plan_for(blocks, **eight).tiles  # it takes tiles to fit


def test_state_bytes_by_mode(parts):
    """12 bytes of SSD per parameter, 14 for fp16, in two slots."""
    blocks, _ = parts
    for dtype, each in (("fp32", 12), ("bf16", 12), ("fp16", 14)):
        plan = plan_for(blocks, dtype=dtype, host_bytes=400 * MiB)
        total = sum(group.numel for group in blocks.groups)
        state = next(e for e in plan.ledger if e.owner == "weights and state x2")
        assert state.bytes == 2 * each * total
        held = plan.tier_bytes("ssd") - state.bytes
        assert held == (4 * total if dtype == "fp16" else 0)  # loss scaling holds gradients


def test_plan_round_trips_and_prints(parts):
    blocks, workload = parts
    plan = plan_for(blocks, dtype="bf16", host_bytes=100 * MiB, workload=workload)
    assert Plan.from_json(plan.to_json()) == plan
    lines = plan.describe(host_bytes=100 * MiB)
    assert len(lines) == len(plan.ledger) + 2
    assert max(map(len, lines)) < 80
    for entry in plan.ledger:
        assert any(entry.owner in line and format_bytes(entry.bytes) in line for line in lines)
    totals = [line for line in lines if " total " in line]
    assert format_bytes(plan.tier_bytes("host")) in totals[0] and "of 100.00 MiB" in totals[0]
    assert format_bytes(plan.tier_bytes("ssd")) in totals[1]


def test_chunks_are_no_larger_than_the_largest_group():
    tiny = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    blocks = cut(AutoModelForCausalLM.from_config(tiny))
    plan = plan_for(blocks, dtype="fp32", host_bytes=100 * MiB)
    assert plan.chunk_params == max(group.numel for group in blocks.groups)
