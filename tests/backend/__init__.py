"""A torch backend behind torch.accelerator, registered from outside torch's tree."""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
import types
from functools import cache
from pathlib import Path
from typing import Any

import torch

NAME, MODULE = "trial", "lohan_trial_backend"
HERE = Path(__file__).parent


def compiler() -> str | None:
    """Return a C++ compiler, or None if there is none."""
    return shutil.which("c++") or shutil.which("g++")


@cache
def extension() -> Any:
    """Return the compiled backend, built once for these sources, this torch and this Python."""
    from torch.utils.cpp_extension import load

    sources = sorted(HERE.glob("*.cpp"))
    read = [path.read_bytes() for path in (*sources, *sorted(HERE.glob("*.hpp")))]
    versions = f"{torch.__version__} {sys.version}".encode()
    mark = hashlib.sha256(b"\0".join((versions, *read))).hexdigest()[:12]
    place = Path(tempfile.gettempdir()) / f"lohan-trial-backend-{mark}"
    if (place / f"{MODULE}.so").exists():
        return _loaded(place / f"{MODULE}.so")
    # Elsewhere at first: torch waits for the lock of a build that was killed, without end.
    work = Path(tempfile.mkdtemp(prefix="lohan-trial-backend-"))
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja
    result = load(MODULE, list(map(str, sources)), extra_cflags=["-O1"], build_directory=str(work))
    try:
        work.rename(place)
    except OSError:  # another process was faster
        shutil.rmtree(work)
    return result


def _loaded(library: Path) -> Any:
    spec = importlib.util.spec_from_file_location(MODULE, library)
    assert spec is not None and spec.loader is not None
    result = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(result)
    return result


@cache
def register() -> Any:
    """Register the device with torch and return the extension."""
    torch.utils.rename_privateuse1_backend(NAME)
    backend = extension()
    torch._register_device_module(NAME, _module(backend))
    atexit.register(torch.accelerator.synchronize)
    return backend


def _module(backend: Any) -> types.ModuleType:
    """Return the module that torch and others look for as `torch.trial`."""
    module: Any = types.ModuleType(f"torch.{NAME}")
    generator = backend.default_generator()
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = torch.accelerator.set_device_index
    module.manual_seed = module.manual_seed_all = generator.manual_seed
    module.get_rng_state = lambda device=NAME: generator.get_state()
    module.set_rng_state = lambda state, device=NAME: generator.set_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.mem_get_info = lambda device=None: backend.memory_info()
    module.set_per_process_memory_fraction = lambda part, device=None: backend.set_fraction(part)
    return module
