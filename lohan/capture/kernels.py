"""Kernels that torch does not dispatch: Triton, pybind and ctypes code that takes data pointers.

Planning runs a model on fake tensors, which have no memory. An operator that torch dispatches only
computes shapes there. A kernel that takes pointers would write to address 0. Fake tensors therefore
refuse to return a pointer, and `pointer_error` converts the error to a message that names the
module.

Liger replaces the forward of modules, and rotary position embeddings, by such kernels, with the
same results. Planning runs the forward of the class instead (`plain_forwards`), which has the same
shapes and needs no less memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from lohan.errors import ModelError

LIGER = "liger_kernel"
_NO_POINTER = "Cannot access data pointer"  # part of torch's message
# Packages that run the code of other packages, so they are not the origin of a kernel.
_LAUNCHERS = ("torch", "triton", "contextlib", "lohan")


def pointer_error(model: nn.Module, error: RuntimeError) -> ModelError | None:
    """Return the message for a kernel that asked a fake tensor for its data.

    The result is None if `error` has another cause.
    """
    if _NO_POINTER not in str(error):
        return None
    module, caller = _origin(error)
    package, owner = caller.partition(".")[0], type(module).__module__.partition(".")[0]
    names = (name for name, child in model.named_modules() if child is module)
    subject = f"module {next(names, '') or type(model).__name__} ({type(module).__name__})"
    remedy = (
        "register the kernel as an operator with torch.library, with a fake implementation for "
        "shapes"
    )
    if package == LIGER:
        remedy = (
            "apply Liger to the model after it has been created, as use_liger_kernel=True of "
            "lohan.hf does, so that the forward of the replaced module is planned"
        )
    elif package not in ("", owner):
        remedy = f"uninstall {package}, if the model also runs without it; or {remedy}"
    return ModelError(
        f"{subject} calls a kernel that torch does not dispatch{f' ({caller})' if caller else ''}: "
        "it takes the addresses of its tensors, and planning has only their shapes; "
        f"{remedy}; or leave `batch` out of lohan.attach"
    )


def _origin(error: BaseException) -> tuple[nn.Module | None, str]:
    """Return the module whose code raised the error, and the Python module that asked for data.

    Each is the innermost of its kind in the traceback. Python modules of torch and Triton are not
    considered, so the second result is in the package that launches the kernel.
    """
    module, caller, trace = None, "", error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        module = owner if isinstance(owner, nn.Module) else module
        name = str(trace.tb_frame.f_globals.get("__name__", ""))
        caller = caller if name.partition(".")[0] in _LAUNCHERS else name
        trace = trace.tb_next
    return module, caller


def runs_liger(module: nn.Module) -> bool:
    """Return whether Liger has replaced code of the module or of one of its submodules."""
    return any(_is_liger(vars(child).get("forward")) for child in module.modules()) or any(
        True for _ in _replaced_functions(module)
    )


@contextmanager
def plain_forwards(model: nn.Module) -> Iterator[None]:
    """Temporarily undo Liger's replacements in the modules of a model."""
    with ExitStack() as undo:
        for module in model.modules():
            if _is_liger(replaced := vars(module).get("forward")):
                del module.forward
                undo.callback(setattr, module, "forward", replaced)
        for source, attribute, function in list(_replaced_functions(model)):
            setattr(source, attribute, _rotary)
            undo.callback(setattr, source, attribute, function)
        yield


def _replaced_functions(model: nn.Module) -> Iterator[tuple[ModuleType, str, Any]]:
    """Yield the functions that Liger has replaced in the Python modules of a model's classes.

    All of them apply rotary position embeddings.
    """
    for name in {type(module).__module__ for module in model.modules()}:
        source = sys.modules.get(name)
        for attribute, function in list(vars(source).items()) if source else ():
            if _is_liger(function) and "rotary" in function.__name__:
                assert source is not None
                yield source, attribute, function


def _is_liger(function: Any) -> bool:
    function = function.__func__ if isinstance(function, MethodType) else function
    return isinstance(function, FunctionType) and function.__module__.startswith(LIGER)


def _rotary(
    q: torch.Tensor, k: torch.Tensor, *_angles: Any, **_options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand in for any form of rotary position embedding in a run on shapes.

    The forms differ in their angles. All return tensors like `q` and `k`, and need temporaries of
    the same size.
    """
    return _rotated(q), _rotated(k)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * 0.5 + torch.cat((-second, first), dim=-1) * 0.5
