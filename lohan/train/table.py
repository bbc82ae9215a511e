"""The tasks by name; another one is its module and a line here."""

from __future__ import annotations

from typing import Any

from lohan.checkpoint.diffusers_folder import find_place
from lohan.config import Config
from lohan.train import diffusion, language
from lohan.train.task import Task

TASKS: dict[str, Task[Any]] = {"language": language, "diffusion": diffusion}


def task_of(config: Config) -> Task[Any]:
    """The task that a run asks for, or the one that its model is made for."""
    found = "language" if find_place(config.model) is None else "diffusion"
    task = TASKS[config.task or found]
    task.check(config)
    return task
