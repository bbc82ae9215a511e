"""Libraries that LoHan uses: their settings in the environment, and which code is theirs.

Libraries read the variables when they are imported. Variables that the user has set are kept.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lohan.util.memory import return_freed_memory

_LIBRARIES = ("torch", "transformers", "diffusers", "peft", "trl", "accelerate", "lohan")


def is_user_code(thing: Any) -> bool:
    """Return whether a function or class was defined outside of libraries."""
    module = getattr(thing, "__module__", None) or ""
    return module.partition(".")[0] not in _LIBRARIES


def set_up_libraries() -> None:
    return_freed_memory()
    # The threads of the optimizer and of I/O share the cores with torch's threads, which by default
    # spin at OpenMP barriers. Without spinning, a prototype of this design was 17 % faster at 256
    # tokens on two cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Let torch reuse device memory for allocations of other sizes. torch reads the variable when it
    # is imported, and ignores it if the system does not support it (WSL2).
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    # Suppress the warnings of transformers; errors are still shown.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@contextmanager
def offline() -> Iterator[None]:
    """Prevent downloads in the `with` body, so that a model is read from its folder only.

    This also works if the hub's libraries are already imported and have read the environment.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
