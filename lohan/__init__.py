"""LoHan: exact full-parameter fine-tuning of models far larger than memory."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lohan.errors import LohanError

if TYPE_CHECKING:
    from lohan.engine.attach import attach, load
    from lohan.engine.policies import (
        Budget,
        ModelPolicy,
        OffloadPolicy,
        StorePolicy,
    )
    from lohan.engine.session import Session
    from lohan.optim import SGD, AdamW, Lion, Lora

__version__ = "0.1.0"
_MODULE_OF = {
    "AdamW": "optim",
    "Lion": "optim",
    "Lora": "optim",
    "SGD": "optim",
    "Session": "engine.session",
    "attach": "engine.attach",
    "load": "engine.attach",
    "Budget": "engine.policies",
    "ModelPolicy": "engine.policies",
    "OffloadPolicy": "engine.policies",
    "StorePolicy": "engine.policies",
}
__all__ = [
    "SGD",
    "AdamW",
    "Budget",
    "Lion",
    "LohanError",
    "Lora",
    "ModelPolicy",
    "OffloadPolicy",
    "Session",
    "StorePolicy",
    "attach",
    "load",
]


def __getattr__(name: str) -> Any:
    """Import torch when a name that needs it is first used, not when the package is imported."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'lohan' has no attribute {name!r}")
    return getattr(import_module(f"lohan.{_MODULE_OF[name]}"), name)
