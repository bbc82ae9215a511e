"""transformers' Trainer and TRL's trainers over models far larger than memory.

    from lohan.hf import Trainer        # instead of: from transformers import Trainer
    from lohan.hf import SFTTrainer     # instead of: from trl import SFTTrainer
    from lohan.hf import DPOTrainer     # and KTOTrainer, ORPOTrainer, CPOTrainer, RewardTrainer

Callbacks, logging, evaluation, schedules and checkpoints are those of the library. There are two
differences. The optimizer updates each block inside backward, and its state is never completely in
memory. A checkpoint holds weights, schedule and random state; resuming opens the existing store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lohan.hf.arguments import LohanArguments as LohanArguments
    from lohan.hf.mixin import Trainer as Trainer
    from lohan.hf.orpo import CPOTrainer as CPOTrainer
    from lohan.hf.orpo import ORPOTrainer as ORPOTrainer
    from lohan.hf.trl import DPOTrainer as DPOTrainer
    from lohan.hf.trl import KTOTrainer as KTOTrainer
    from lohan.hf.trl import RewardTrainer as RewardTrainer
    from lohan.hf.trl import SFTTrainer as SFTTrainer

_PLACES = {
    "LohanArguments": "arguments",
    "Trainer": "mixin",
    "SFTTrainer": "trl",
    "DPOTrainer": "trl",
    "KTOTrainer": "trl",
    "RewardTrainer": "trl",
    "ORPOTrainer": "orpo",
    "CPOTrainer": "orpo",
}


def __getattr__(name: str) -> Any:
    """Import a trainer on first use: TRL is optional, and importing transformers is slow."""
    # `from lohan.hf import ...` would replace the message of an AttributeError.
    if name not in _PLACES and name.endswith("Trainer"):
        raise ImportError(
            f"lohan.hf has no {name}; it has {', '.join(_PLACES)}. Trainers whose steps generate "
            "answers or ask a second model (GRPO, RLOO, PPO, online DPO, distillation) need one in "
            "memory: use TRL's own where it fits, or make preferences of the answers first, and "
            "train on them with DPOTrainer or KTOTrainer"
        )
    if name not in _PLACES:
        raise AttributeError(f"module 'lohan.hf' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"lohan.hf.{_PLACES[name]}"), name)
