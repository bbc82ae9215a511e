"""Install a wheel into a new environment without a compiler, and train a tiny model with it.

    python csrc/try_wheel.py DIST

The wheel is the one in the folder DIST that fits the running interpreter. The packages that LoHan
depends on are installed as constraints.txt pins them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIG = """{"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
"max_position_embeddings": 64, "architectures": ["LlamaForCausalLM"]}"""
# Every instruction set of this processor must be in the core, and compute the same bits.
KERNELS = """
import numpy as np
from lohan import _core

def values(frequency, count=100_003):
    whole = np.empty(count + 16, np.float32)
    start = -whole.ctypes.data % 64 // 4
    return np.cos(np.arange(count) * frequency, out=whole[start : start + count], casting="unsafe")

results = set()
for name in _core.supported_isas():
    _core.set_isa(name)
    p, m, v, g = (values(frequency) for frequency in (1, 2, 3, 4))
    v *= v
    hyper = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    _core.adamw_fp32(p, m, v, g, step=7, **hyper)
    results.add(p.tobytes() + m.tobytes() + v.tobytes())
assert len(results) == 1, "instruction sets differ in their bits"
print("native core with", ", ".join(_core.supported_isas()))
"""
ROWS = "\n".join(f'{{"input_ids": {[(i * j) % 64 for j in range(1, 12)]}}}' for i in range(20))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dist", type=Path, help="folder of the wheels")
    dist = parser.parse_args().dist.absolute()
    kind = "cp311" if sys.version_info < (3, 12) else "abi3"
    (wheel,) = map(str, dist.glob(f"lohan-*-{kind}-*.whl"))
    with tempfile.TemporaryDirectory(prefix="lohan-wheel-") as name:
        work = Path(name)
        (work / "config.json").write_text(CONFIG)
        (work / "data.jsonl").write_text(ROWS)
        subprocess.run([sys.executable, "-m", "venv", work / "env"], check=True)
        # Neither a compiler nor a build tool is found on this path.
        env = {**os.environ, "PATH": str(work / "env" / "bin")}
        python = str(work / "env" / "bin" / "python")
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        constraints = ["-c", str(ROOT / "constraints.txt")]
        subprocess.run([*pip, *constraints, "torch"], check=True, env=env)
        # The file is named, because an index could offer another package of this name.
        subprocess.run([*pip, *constraints, "--only-binary", ":all:", wheel], check=True, env=env)
        subprocess.run([python, "-c", KERNELS], check=True, env=env, cwd=work)
        train = [python, "-m", "lohan", "train", "--init", "config.json", "--data", "data.jsonl"]
        options = ["--out", "run", "--steps", "3", "--batch", "2", "--seq", "16"]
        subprocess.run([*train, *options, "--host", "64MiB"], check=True, env=env, cwd=work)
        assert (work / "run" / "model" / "model.safetensors").is_file()
    print("installed and trained")


if __name__ == "__main__":
    main()
