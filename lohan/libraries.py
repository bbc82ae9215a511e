"""What libraries read from the environment when they are imported; the user's choice stays."""

from __future__ import annotations

import os


def set_up_libraries() -> None:
    # Threads of the optimizer and of I/O share the cores with torch's. Those would spin at OpenMP
    # barriers and take the time from them: without it a sketch of this design was 17 % faster at
    # 256 tokens on two cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # transformers tells newcomers about matters of its own; errors still come through.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
