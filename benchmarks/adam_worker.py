"""A child of adam.py that runs passes of one library with one number of threads.

Every pass goes once through all parameters in chunks, so that each chunk comes from memory and not
from a cache. The process reads requests as JSON lines and answers with the seconds of one pass.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

LR, BETAS, EPS, DECAY = 1e-4, (0.9, 0.95), 1e-8, 0.01
Pass = Callable[[], None]


def main() -> None:
    library, threads = sys.argv[1], int(sys.argv[2])
    answers = sys.stdout
    sys.stdout = sys.stderr  # deepspeed prints while it compiles
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    make = {
        "lohan": lohan_pass,
        "torch": torch_pass,
        "deepspeed": deepspeed_pass,
        "copy": copy_pass,
        "triad": triad_pass,
        "in place": in_place_pass,
    }
    run: Pass = lambda: None  # noqa: E731
    for line in sys.stdin:
        request = json.loads(line)
        if "mode" in request:
            run = lambda: None  # noqa: E731 - the arrays of the last request go first
            name = request.get("loop", library)
            run = make[name](request["mode"], request["parameters"], request["chunk"], threads)
            run()
        start = time.perf_counter()
        run()
        answers.write(json.dumps(time.perf_counter() - start) + "\n")
        answers.flush()


def lohan_pass(mode: str, parameters: int, chunk: int, threads: int) -> Pass:
    """Return a pass of the native kernel, which updates compute weights and state together.

    Memory is laid out as in training: a buffer from the pool for the state of each chunk, with
    its arrays one after another, and one for the weights. Gradients are torch tensors.
    """
    import torch

    from lohan import _core
    from lohan.capture.blocks import dtype_of, split
    from lohan.engine.buffers import MASTER_ARRAYS, HostPool
    from lohan.model.state import STATE_FORMATS

    _core.set_threads(threads)
    kind, pool = STATE_FORMATS[mode], HostPool(32 * parameters)
    dtype, kernel = dtype_of(kind), getattr(_core, f"adamw_{mode}")
    weights = pool.allocate("weights", parameters * kind.weight_bytes).tensor(dtype)
    weights.copy_(torch.randn(parameters) * 0.02)
    pieces: list[tuple[Any, ...]] = []
    for parts, grad in zip(
        weights.split(chunk), torch.randn(parameters).to(dtype).split(chunk), strict=True
    ):
        flat = pool.allocate("state", kind.state_size(len(parts))).tensor(torch.uint8)
        state = split(kind, flat, len(parts))
        for name, array in state.items():
            array.copy_(parts) if name == "master" else array.zero_()
        pieces.append((parts, *(state[n] for n in (*MASTER_ARRAYS[mode], "m", "v")), grad))
    steps = 0

    def run() -> None:
        nonlocal steps
        steps += 1
        for piece in pieces:
            kernel(
                *piece,
                lr=LR,
                beta1=BETAS[0],
                beta2=BETAS[1],
                eps=EPS,
                weight_decay=DECAY,
                step=steps,
            )

    return run


def torch_pass(mode: str, parameters: int, chunk: int, threads: int) -> Pass:
    import torch

    weights = fp32_parameters(parameters, chunk)
    optimizer = torch.optim.AdamW(
        weights, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True
    )
    return with_copies(optimizer.step, weights, mode)


def deepspeed_pass(mode: str, parameters: int, chunk: int, threads: int) -> Pass:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    weights = fp32_parameters(parameters, chunk)
    optimizer = DeepSpeedCPUAdam(
        weights, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, adamw_mode=True
    )
    return with_copies(optimizer.step, weights, mode)


def fp32_parameters(parameters: int, chunk: int) -> list[Any]:
    """Return fp32 masters and gradients, which both libraries need for any compute dtype."""
    import torch

    values, grads = torch.randn(parameters) * 0.02, torch.randn(parameters)
    created = []
    for value, grad in zip(values.split(chunk), grads.split(chunk), strict=True):
        parameter = torch.nn.Parameter(value)
        parameter.grad = grad
        created.append(parameter)
    return created


def with_copies(step: Callable[[], Any], weights: list[Any], mode: str) -> Pass:
    """Return the step followed, for 16-bit modes, by the copy to the compute weights."""
    import torch

    if mode == "fp32":
        return step
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[mode]
    compute = [torch.empty_like(weight, dtype=dtype) for weight in weights]

    def run() -> None:
        step()
        with torch.no_grad():
            for narrow, weight in zip(compute, weights, strict=True):
                narrow.copy_(weight)

    return run


# -- memory bandwidth ------------------------------------------------------------------------------


def copy_pass(mode: str, parameters: int, chunk: int, threads: int) -> Pass:
    import torch

    a, b = torch.zeros(parameters), torch.ones(parameters)
    return lambda: a.copy_(b)


def triad_pass(mode: str, parameters: int, chunk: int, threads: int) -> Pass:
    import torch

    a, b, c = torch.zeros(parameters), torch.ones(parameters), torch.ones(parameters)
    return lambda: torch.add(b, c, alpha=0.5, out=a)


def in_place_pass(mode: str, parameters: int, chunk: int, threads: int) -> Pass:
    import torch

    a, b = torch.zeros(parameters), torch.ones(parameters)
    return lambda: a.add_(b, alpha=0.5)


if __name__ == "__main__":
    main()
