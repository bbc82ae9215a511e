"""What libraries read from the environment when they are imported; the user's choice stays."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


def set_up_libraries() -> None:
    # Threads of the optimizer and of I/O share the cores with torch's. Those would spin at OpenMP
    # barriers and take the time from them: without it a sketch of this design was 17 % faster at
    # 256 tokens on two cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # transformers tells newcomers about matters of its own; errors still come through.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@contextmanager
def offline() -> Iterator[None]:
    """Nothing is fetched from the hub meanwhile, also where its libraries were imported before and
    have read the environment: a folder is all that a model comes from."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
