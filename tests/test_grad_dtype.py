"""`--grad-dtype bf16`: sums of slices are rounded once, in every mode to the same bits."""

from __future__ import annotations

import pytest
import torch

import lohan
from lohan.device.emulated import EmulatedDevice
from lohan.errors import ConfigError
from lohan.model.plan import PlanOptions
from lohan.util.units import MiB
from tests.models import attached, batches, master_weights, small_model
from tests.overlapping import Tuning, data, net, train, tuned
from tests.test_gradient_sums import RATE, ROWS, WIDTH, Twice


@pytest.mark.parametrize(("grad_dtype", "expected"), [("fp32", 259.0), ("bf16", 260.0)])
def test_a_sum_is_rounded_once(grad_dtype, expected, tmp_path):
    """256 + 1 + 1 + 1 is 259 in fp32 and rounds to 260; sums in bf16 would have stayed at 256."""
    model = Twice(tied=False).to(torch.bfloat16)
    batch = {"x": torch.tensor(ROWS, dtype=torch.bfloat16)[:, None].expand(-1, WIDTH).contiguous()}
    with attached(
        model, tmp_path, optimizer=lohan.SGD(lr=RATE, momentum=0.0), micro_batch=1, batch=batch,
        grad_dtype=grad_dtype,
    ) as session:  # fmt: skip
        model(**batch).backward()
        moved = torch.eye(WIDTH) - master_weights(session)["blocks.0.weight"]
    assert (moved / RATE).unique().tolist() == [expected]


@pytest.mark.parametrize("kind", ["tied", "several"])
def test_the_same_bits_with_and_without_overlap(kind, tmp_path, monkeypatch):
    """In memory, on SSD and past a device, and the norm is that of the rounded ones; not the bits
    of a run that does not round."""
    made = data(4, kind=kind, dtype=torch.bfloat16, still={2: 1})
    found = []
    for number, (overlap, spilled, emulated, grad_dtype) in enumerate(
        [
            (False, 0.0, False, "bf16"),
            (True, 0.0, False, "bf16"),
            (True, 1.0, False, "bf16"),
            (True, 0.5, True, "bf16"),
            (True, 0.0, False, "fp32"),
        ]
    ):
        tuned(monkeypatch, Tuning(spilled=spilled, cached=0.3))
        options = {"clip": 0.01, "batch": made[0], "micro_batch": 2, "overlap": overlap}
        if emulated:
            options["device"] = EmulatedDevice(64 * MiB, h2d=1e10, d2h=1e10)
        model, place = net(kind, dtype=torch.bfloat16), tmp_path / str(number)
        found.append(train(model, made, place, grad_dtype=grad_dtype, **options))
    for other in found[1:4]:
        other.check(found[0])
    assert found[4].norms != found[0].norms and found[4].stored != found[0].stored


def test_a_plan_holds_half(tmp_path):
    """Of what waits, and it says so."""
    batch, rows = batches(1, batch=4, seq=8)[0], {}
    for grad_dtype in ("fp32", "bf16"):
        options = {"clip": 1.0, "batch": batch, "micro_batch": 2, "grad_dtype": grad_dtype}
        model = small_model("llama", dtype=torch.bfloat16)
        with attached(model, tmp_path / grad_dtype, **options) as session:
            held = {e.owner: e.bytes for e in session.plan.ledger if e.tier == "host"}
            rows[grad_dtype] = held["waiting gradients"]
            assert session.plan.grad_dtype == grad_dtype
    assert rows["bf16"] <= 0.55 * rows["fp32"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "fp32"}, "this run has dtype fp32; leave it out"),
        ({"dtype": "fp16"}, "this run has dtype fp16; leave it out"),
        ({"dtype": "bf16", "world": 2}, "2 ranks sum them in fp32; leave it out"),
        ({"dtype": "bf16", "grad_dtype": "fp8"}, "'fp8'; choose fp32, bf16"),
    ],
)
def test_where_it_cannot_act_it_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        PlanOptions(**{"grad_dtype": "bf16", **options})


def test_one_slice_is_refused(tmp_path):
    made = data(1, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="the 4 examples of this batch go through a block"):
        attached(net(dtype=torch.bfloat16), tmp_path, batch=made[0], grad_dtype="bf16")
