"""One batch as a reader follows it: each function of the package that a step calls, in the order of
its first call, without those of one line, and how often the next one is in another file.

python docs/step_walk.py          the count
python docs/step_walk.py --list   the functions, file by file
"""

from __future__ import annotations

import ast
import sys
import tempfile
from itertools import groupby, pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lohan

PACKAGE = Path(lohan.__file__).parent


def lines_of_functions() -> dict[tuple[str, int], int]:
    """By file and first line, decorators included: lines of the body without its docstring."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                body = node.body[ast.get_docstring(node) is not None :]
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                lines = sum((one.end_lineno or 0) - one.lineno + 1 for one in body)
                found[str(path), first] = lines
    return found


def walk() -> list[tuple[str, str]]:
    """(file, function) of the fourth step of a small Llama, one action after the other."""
    lines, seen = lines_of_functions(), dict[tuple[str, int], tuple[str, str]]()

    def called(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        key = code.co_filename, code.co_firstlineno
        if event == "call" and lines.get(key, 0) > 1 and key not in seen:
            seen[key] = str(Path(code.co_filename).relative_to(PACKAGE)), code.co_name

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    tokens = torch.randint(0, 64, (4, 16))
    batch = {"input_ids": tokens, "labels": tokens}
    with tempfile.TemporaryDirectory() as folder, lohan.attach(
        model, optimizer=lohan.AdamW(lr=1e-3), budget=lohan.Budget(host="1GiB", ssd=[folder]),
        batch=batch, clip=1.0, overlap=False, micro_batch=2,
    ) as session:  # fmt: skip
        for _ in range(3):
            model(**batch).loss.backward()
        session.flush()
        sys.setprofile(called)
        model(**batch).loss.backward()
        session.flush()
        sys.setprofile(None)
    return list(seen.values())


def main() -> None:
    steps = walk()
    files = [file for file, _ in steps]
    changes = sum(one != other for one, other in pairwise(files))
    print(f"{len(steps)} functions in {len(set(files))} files, {changes} changes of file")
    if "--list" in sys.argv:
        for file, some in groupby(steps, key=lambda step: step[0]):
            print(f"{file:36} {' '.join(name for _, name in some)}")


if __name__ == "__main__":
    main()
