"""Activations from SSD equal those that were written, also if some are not needed any more."""

from __future__ import annotations

import torch

from lohan.capture.saved_call import SavedCall
from lohan.capture.selective_checkpoint import SavedOps
from lohan.engine.buffers import HostPool
from lohan.engine.offload import ActivationSpill
from lohan.util.units import MiB


def kept(values: torch.Tensor) -> SavedOps:
    result = SavedOps(tensors=[values])
    result.seal()
    return result


def test_a_result_that_changed_on_its_way_does_not_shift_the_others(tmp_path):
    spill = ActivationSpill([tmp_path], HostPool(4 * MiB), {0: 4096}, buffers=1)
    inputs = torch.randn(2, 8, requires_grad=True)
    call = SavedCall("block", (inputs, torch.arange(2)), {})
    call.detach()
    first, second = torch.randn(16), torch.randn(16)
    call.saved_ops = [kept(first), None, kept(second.clone())]
    try:
        spill.forward_done(0, call)
        spill.wait(list(spill.write(0, 0)))
        first.add_(1)  # in place, after the block has returned it
        spill.written(0)
        assert call.evicted and call.tensors[0].numel() == 0 and call.saved_ops[0].lost
        spill.wait(list(spill.read(0, 0)))
        spill.load_inputs(0, call, (0,))
        assert torch.equal(call.tensors[0], inputs.detach()) and not call.evicted
        assert torch.equal(call.tensors[1], torch.arange(2))
        assert call.saved_ops[0].tensors == [] and torch.equal(call.saved_ops[2].tensors[0], second)
    finally:
        spill.close()
