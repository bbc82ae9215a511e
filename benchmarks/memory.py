"""Peak memory of a real run: a 1.1B Llama (13 GB of state) takes two steps in a 1.5 GiB budget.

Writes a random checkpoint, runs `lohan train` in a process of its own, prints the plan's ledger and
the process's peak resident memory (VmHWM) against the limit; then the same run inside a memory
cgroup of that limit, where the machine allows one. Everything it wrote is removed at the end.

    python benchmarks/memory.py [--work DIR] [--layers 22] [--host 1.5GiB] [--limit 2.6GiB]
    python benchmarks/memory.py --lora 16 --base nf4 --host 1GiB     (a packed base under adapters)
    python benchmarks/memory.py --lora 16 --base nf4 --host 1GiB --verify     (compared with PEFT)
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common import machine, versions

from lohan.optim import PACKINGS
from lohan.util.units import format_bytes, parse_bytes

PACKAGES = ("lohan", "torch", "transformers")

# The child prints its own VmHWM, because the RSS of children that the kernel reports to a parent
# would mix several children. The child joins the cgroup before it imports anything.
CHILD = """
import os, sys
group, arguments = sys.argv[1], sys.argv[2:]
if group:
    open(group, "w").write(str(os.getpid()))
sys.argv = ["lohan", *arguments]
from lohan.cli.main import main
code = 0
try:
    main()
except SystemExit as end:
    code = end.code or 0
from pathlib import Path
status = Path("/proc/self/status").read_text()
print("VmHWM", int(status.split("VmHWM:")[1].split()[0]) * 1024, flush=True)
sys.exit(code)
"""


@dataclass(frozen=True)
class Measured:
    code: int
    peak_bytes: int | None
    seconds: float
    lines: list[str]


def main() -> int:
    options = parse()
    work = Path(tempfile.mkdtemp(prefix="lohan-memory-", dir=options.work))
    try:
        return bench(options, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path.cwd(), help="folder on the SSD to use")
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=5632)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--host", default="1.5GiB")
    parser.add_argument("--limit", default="2.6GiB", help="what the process may have resident")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters, over a frozen base")
    parser.add_argument("--base", choices=PACKINGS, help="how the base is packed, with --lora")
    parser.add_argument("--no-cgroup", action="store_true", help="only the run without a cgroup")
    parser.add_argument(
        "--verify", action="store_true", help="compare with a run in memory instead"
    )
    return parser.parse_args()


def bench(options: argparse.Namespace, work: Path) -> int:
    limit = parse_bytes(options.limit)
    for name, value in {**machine(work), "versions": versions(*PACKAGES)}.items():
        print(f"{name:13} {value}")
    parameters = write_inputs(options, work)
    print(f"model         {parameters / 1e9:.3f} B parameters, {options.layers} layers")
    if options.verify:
        return verify(options, work)
    arguments = [
        "train",
        "--model",
        str(work / "model"),
        "--data",
        str(work / "data.jsonl"),
        "--host",
        options.host,
        "--steps",
        str(options.steps),
        "--batch",
        str(options.batch),
        "--seq",
        str(options.seq),
        "--dtype",
        options.dtype,
        "--no-export",
        "--lora",
        str(options.lora),
        *(["--base", options.base] if options.base else []),
    ]
    print("command       lohan", " ".join(arguments), "--out", work / "run", flush=True)
    good = report("no cgroup", run(arguments, work), limit)
    if not options.no_cgroup:
        good &= in_cgroup(arguments, work, limit)
    return 0 if good else 1


def verify(options: argparse.Namespace, work: Path) -> int:
    """Run `lohan verify` with the same settings. The reference needs the model in memory."""
    arguments = [
        "verify",
        "--model",
        str(work / "model"),
        "--data",
        str(work / "data.jsonl"),
        "--host",
        options.host,
        "--ssd",
        str(work),
        "--steps",
        str(options.steps),
        "--batch",
        str(options.batch),
        "--seq",
        str(options.seq),
        "--dtype",
        options.dtype,
        "--set",
        f"train.lora={options.lora}",
        *(["--set", f"train.base={options.base!r}"] if options.base else []),
    ]
    print("command       lohan", " ".join(arguments), flush=True)
    return subprocess.run([sys.executable, "-m", "lohan", *arguments], check=False).returncode


def in_cgroup(arguments: list[str], work: Path, limit: int) -> bool:
    group = make_cgroup(limit)
    if isinstance(group, str):
        print(f"\ncgroup        not done: {group}")
        return True
    try:
        measured = run(arguments, work, group=group.members)
        good = report(f"memory cgroup of {format_bytes(limit)}", measured, limit)
        print(f"cgroup peak   {group.peak()} (page cache of reading the checkpoint included)")
        return good
    finally:
        group.remove()


def write_inputs(options: argparse.Namespace, work: Path) -> int:
    from transformers import LlamaConfig

    from lohan.capture.blocks import dtype_of
    from lohan.checkpoint.hf_folder import build_from_config
    from lohan.model.state import STATE_FORMATS
    from tests.support.model_folders import write_random_checkpoint

    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        vocab_size=options.vocabulary,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    start = time.monotonic()
    write_random_checkpoint(work / "model", config, dtype=dtype_of(STATE_FORMATS["bf16"]))
    rows = [
        {"input_ids": [(7 * i + j * j) % options.vocabulary for j in range(options.seq)]}
        for i in range(options.batch * options.steps)
    ]
    (work / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    print(f"checkpoint    written in {time.monotonic() - start:.0f} s", flush=True)
    model = build_from_config(config, dtype=dtype_of(STATE_FORMATS["bf16"]))
    return sum(parameter.numel() for parameter in model.parameters())


def run(arguments: list[str], work: Path, *, group: Path | None = None) -> Measured:
    """Run one training in a process of its own, in a folder that is removed afterwards."""
    out = work / "run"
    command = [sys.executable, "-c", CHILD, str(group or ""), *arguments, "--out", str(out)]
    start = time.monotonic()
    ended = subprocess.run(command, capture_output=True, text=True)
    seconds = time.monotonic() - start
    lines = ended.stdout.splitlines()
    if (out / "metrics.jsonl").is_file():
        rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        read = [format_bytes(row["ssd_read_bytes"]) for row in rows]
        lines.append(f"ssd     read in each step: {', '.join(read)}")
    shutil.rmtree(out, ignore_errors=True)
    peaks = [int(line.split()[1]) for line in lines if line.startswith("VmHWM ")]
    if ended.returncode:
        lines += ended.stderr.splitlines()
    return Measured(ended.returncode, peaks[0] if peaks else None, seconds, lines)


def report(title: str, measured: Measured, limit: int) -> bool:
    print(f"\n{title}")
    for line in measured.lines:
        if line.startswith(("host ", "ssd ", "step ")) or measured.code:
            print(f"  {line}")
    print(f"  run           {measured.seconds:.0f} s, exit code {measured.code}")
    if measured.peak_bytes is None:
        print("  peak          unknown: the process was killed, most likely for its memory")
        return False
    good = measured.code == 0 and measured.peak_bytes <= limit
    peak, allowed = format_bytes(measured.peak_bytes), format_bytes(limit)
    print(f"  peak VmHWM    {peak}, limit {allowed}: {'ok' if good else 'FAILED'}", flush=True)
    return good


@dataclass(frozen=True)
class Cgroup:
    folder: Path
    members: Path
    peak: Callable[[], str]

    def remove(self) -> None:
        self.folder.rmdir()


def make_cgroup(limit: int) -> Cgroup | str:
    """Create a memory cgroup, or return the reason why this is impossible."""
    name = f"lohan-memory-{os.getpid()}"
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    if (v1 / "cgroup.procs").exists():
        folder, settings = v1 / name, {"memory.limit_in_bytes": limit}
        swap, peak = ("memory.memsw.limit_in_bytes", limit), "memory.max_usage_in_bytes"
    elif (v2 / "cgroup.controllers").exists():
        if "memory" not in (v2 / "cgroup.subtree_control").read_text().split():
            return "the memory controller is not enabled for children of the root cgroup"
        folder, settings = v2 / name, {"memory.max": limit}
        swap, peak = ("memory.swap.max", 0), "memory.peak"
    else:
        return "this machine has no memory cgroups"
    try:
        folder.mkdir()
        if (folder / swap[0]).exists():
            settings[swap[0]] = swap[1]
        for file, value in settings.items():
            (folder / file).write_text(str(value))
    except OSError as error:
        if folder.exists():
            folder.rmdir()
        return f"{folder}: {error.strerror}"

    def read_peak() -> str:
        file = folder / peak
        return format_bytes(int(file.read_text())) if file.exists() else "not reported"

    return Cgroup(folder, folder / "cgroup.procs", read_peak)


if __name__ == "__main__":
    sys.exit(main())
