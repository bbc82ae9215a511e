"""LoHan: exact full-parameter fine-tuning of models far larger than memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lohan.errors import LohanError

if TYPE_CHECKING:
    from lohan.engine.attach import Budget, attach, load
    from lohan.engine.session import Session
    from lohan.optim import SGD, AdamW, Lion, Lora

__version__ = "0.1.0"
__all__ = ["SGD", "AdamW", "Budget", "Lion", "LohanError", "Lora", "Session", "attach", "load"]


def __getattr__(name: str) -> Any:
    """torch is imported with the first call that needs it, not with the package."""
    if name in ("AdamW", "Lion", "SGD"):
        from lohan import optim

        return getattr(optim, name)
    if name == "Lora":
        from lohan.optim import Lora

        return Lora
    if name == "Session":
        from lohan.engine.session import Session

        return Session
    if name in __all__:
        from lohan.engine import attach as api

        return getattr(api, name)
    raise AttributeError(f"module 'lohan' has no attribute {name!r}")
