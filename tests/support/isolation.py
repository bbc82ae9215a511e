"""Keep the test suite away from everything that belongs to the user who runs it."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from pathlib import Path

# Variables by which a user's settings, tokens and caches reach LoHan and the libraries it uses.
USER_PREFIXES = (
    "HF_",
    "HUGGINGFACE_",
    "HUGGING_FACE_",
    "TRANSFORMERS_",
    "DIFFUSERS_",
    "XDG_",
    "LOHAN_",
    "WANDB_",
    "TORCHINDUCTOR_",
    "TRITON_",
)
USER_VARIABLES = (
    "TORCH_HOME",
    "TORCH_EXTENSIONS_DIR",
    "MPLCONFIGDIR",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def restore_ctrl_c() -> None:
    """Let Ctrl-C interrupt this process and its children again.

    A shell that starts the suite in the background makes it ignore SIGINT, and children inherit
    that. Tests that send SIGINT would then wait for ever.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def isolate_from_user() -> Path:
    """Give this process and its children an empty home folder, and return it.

    Caches, configuration and the Hugging Face cache are below the home folder, so all of them are
    empty too. The folder is removed when the process ends. Call this before importing torch,
    transformers or lohan, because they read the environment when they are imported.
    """
    for name in list(os.environ):
        if name in USER_VARIABLES or name.startswith(USER_PREFIXES):
            del os.environ[name]
    home = Path(tempfile.mkdtemp(prefix="lohan-test-home-"))
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a fork inherits the exit handler, but not the folder
            shutil.rmtree(home, ignore_errors=True)

    atexit.register(remove)
    os.environ |= {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "XDG_DATA_HOME": str(home / ".local" / "share"),
        "XDG_STATE_HOME": str(home / ".local" / "state"),
        "HF_HOME": str(home / ".cache" / "huggingface"),
        "HF_HUB_OFFLINE": "1",  # never look for a missing model on the network
    }
    return home
