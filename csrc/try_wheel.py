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
ROWS = "\n".join(f'{{"input_ids": {[(i * j) % 64 for j in range(1, 12)]}}}' for i in range(20))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dist", type=Path, help="folder of the wheels")
    dist = parser.parse_args().dist.absolute()
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
        only = ["--only-binary", ":all:", "--find-links", str(dist), "lohan"]
        subprocess.run([*pip, *constraints, *only], check=True, env=env)
        train = [python, "-m", "lohan", "train", "--init", "config.json", "--data", "data.jsonl"]
        options = ["--out", "run", "--steps", "3", "--batch", "2", "--seq", "16"]
        subprocess.run([*train, *options, "--host", "64MiB"], check=True, env=env, cwd=work)
        assert (work / "run" / "model" / "model.safetensors").is_file()
    print("installed and trained")


if __name__ == "__main__":
    main()
