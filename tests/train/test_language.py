"""What a language model's plan is made for, and what stops its run."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lohan.capture.blocks import cut_for
from lohan.capture.footprint import inventories
from lohan.config import TrainConfig
from lohan.train.language import CausalLM
from lohan.train.trainer import stop_signals
from tests.support import HANG_S
from tests.support.models import small_model
from tests.support.training_runs import RecordingDisplay


def shapes(*lengths: int, pack: bool = False) -> dict[str, torch.Tensor]:
    config: Any = SimpleNamespace(train=TrainConfig(batch=4, seq=64, pack=pack))
    examples: Any = SimpleNamespace(longest=max(lengths), shortest=min(lengths), seq=64)
    return CausalLM().shapes(config, [examples], dtype="fp32")


def test_a_plan_has_the_mask_that_batches_will_have():
    """Attention with a mask is another kernel, with other needs."""
    assert shapes(24, 24).keys() == {"input_ids", "labels"}
    assert shapes(20, 24).keys() == {"input_ids", "labels", "attention_mask"}
    assert shapes(20, 24, pack=True).keys() == {"input_ids", "labels", "position_ids"}


def test_classes_of_activations_are_not_named_after_kernels():
    """Rows of one length have no mask, others do: what was planned as kept is kept in both."""
    model, collected = small_model("gpt2"), []
    ids = torch.empty((2, 16), dtype=torch.long, device="meta")
    for batch in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": ids}):
        kinds, _ = inventories(model, cut_for(model, batch), batch, micro_batch=2)
        collected.append(next(iter(kinds.values())).keys.keys())
    assert collected[0] == collected[1]
    assert any("attention" in name for name in collected[0])
    assert not any("scaled_dot_product" in name for name in collected[0])


@pytest.mark.parametrize("stuck", [True, False])
def test_third_signal_ends_a_process_with_a_blocked_main_thread(stuck):
    """As in a backward that runs on a device's thread. One that hears them ends by itself."""
    child = os.fork()
    if child == 0:
        signal.alarm(HANG_S)  # whatever happens
        os.close(2)
        with stop_signals(RecordingDisplay()):
            sleeper = threading.Thread(target=time.sleep, args=(2 * HANG_S,), daemon=True)
            sleeper.start()
            if stuck:  # in C, where Python hears of no signal
                mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
                lock(mutex), lock(mutex)
            try:
                sleeper.join()
            except KeyboardInterrupt:
                os._exit(7)
        os._exit(8)
    handled = Path(f"/proc/{child}/status")
    bit = 1 << (signal.SIGINT - 1)
    while not _caught(handled) & bit or len(list(Path(f"/proc/{child}/task").iterdir())) < 3:
        time.sleep(0.01)
    time.sleep(0.1)
    for _ in range(3 if stuck else 2):
        os.kill(child, signal.SIGINT)
        while _is_pending(child, signal.SIGINT):  # two that are pending at once count as one
            time.sleep(0.01)
        time.sleep(0.05 if stuck else 0.5)  # a main thread that hears it needs some time
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == (128 + signal.SIGINT if stuck else 7)


def _is_pending(child: int, number: int) -> bool:
    lines = Path(f"/proc/{child}/status").read_text().splitlines()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd", "ShdPnd"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


def _caught(status: Path) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt"))
    return int(line.split()[1], 16)
