"""Liger's own kernels in a run, by Triton's interpreter.

The packages are no dependency: `pip install --no-deps liger-kernel triton` installs them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.models import attached, batches, small_model

ROOT = Path(__file__).resolve().parents[2]
MISSING = [name for name in ("liger_kernel", "triton") if find_spec(name) is None]


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}")
def test_liger_trains_and_is_planned_by_the_forwards_that_it_replaces(tmp_path):
    """Triton reads the setting when it is imported, so this needs a new process."""
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    plain, liger = json.loads(done.stdout.splitlines()[-1])
    assert liger["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert liger["ledger"] == plain["ledger"]


def main(place: Path) -> None:
    """Print losses and the memory ledger of a run with and without Liger's kernels."""
    plain, model = small_model("llama"), small_model("llama")
    collected = [run(plain, place / "plain", activations="recompute")]
    liger_with_interpreter()._apply_liger_kernel_to_instance(
        model=model, cross_entropy=False, fused_linear_cross_entropy=False
    )
    print(json.dumps([*collected, run(model, place / "liger", activations="all")]))


def run(model: Any, place: Path, **options: Any) -> dict[str, Any]:
    rows, losses = batches(3, batch=2, seq=6), []
    with attached(model, place, batch=rows[0], micro_batch=1, **options) as session:
        for row in rows:
            loss = session.model(**row).loss
            loss.backward()
            losses.append(loss.item())
        ledger = {f"{line.tier} {line.owner}": line.bytes for line in session.plan.ledger}
    return {"losses": losses, "ledger": ledger}


def liger_with_interpreter() -> Any:
    """Add what Triton's interpreter lacks for Liger's kernels: numbers and a function of CUDA's."""
    import liger_kernel.ops.rms_norm
    import liger_kernel.transformers
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def convert_numbers(value: Any) -> Any:
        if not isinstance(value, float):
            return convert(value)
        handle = interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    interpreter._implicit_cvt = convert_numbers
    liger_kernel.ops.rms_norm.rsqrt = lambda x: tl.math.rsqrt(x)
    return liger_kernel.transformers


if __name__ == "__main__":
    main(Path(sys.argv[1]))
