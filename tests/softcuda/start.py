"""Load software CUDA's operators together with torch when a Python of the environment starts."""

from __future__ import annotations

import atexit
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

RACES_FOUND = 86  # exit code of a process in which memory was accessed without an order


def _fail_on_races(operators: Any) -> None:
    """End the process with an error if the order detector has reports that no test has read."""
    if races := operators.take_races():
        for text, count in races.items():
            print(f"software CUDA: {text}, {count} times", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(RACES_FOUND)


class _Then(Loader):
    """torch's own loader, and what follows it."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        result: ModuleType | None = self._inner.create_module(spec)
        return result

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        import lohan_softcuda

        lohan_softcuda.replace()
        module.cuda._lazy_call(lohan_softcuda.watch_memory)
        atexit.register(_fail_on_races, lohan_softcuda)
        module.backends.cudnn.enabled = False  # its convolutions have no stand-in of their own
        module.backends.cuda.enable_cudnn_sdp(False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
