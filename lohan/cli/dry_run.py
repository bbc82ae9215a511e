"""`lohan train --dry-run`: what the run would begin with, or the message it would end with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from lohan.cli.plan_run import describe, look_ahead
from lohan.config import Config
from lohan.train.claiming import check_vacant
from lohan.train.inputs import check_room, known_profile, open_inputs
from lohan.train.loggers import check_loggers
from lohan.train.run_folder import RunFolder
from lohan.util.display import Display
from lohan.util.units import counted


def plan_lines(config: Config, display: Display) -> list[str]:
    """The plan for the data that is there. Tokens go to a temporary folder, which is removed."""
    folder = RunFolder(config.out)
    check_vacant(folder, config)
    check_loggers(config.output.log)
    with TemporaryDirectory(prefix="lohan-dry-run-") as place:
        inputs = open_inputs(RunFolder(Path(place)), config, display)
        places = folder.places(config)
        seen = replace(config, train=replace(config.train, steps=inputs.total))
        outlook = look_ahead(seen, known_profile(places, seen.budget), inputs=inputs)
    if inputs.prompts is not None:
        check_room(outlook.plan, inputs.prompts)
    return [counted(inputs.total, "step"), *describe(outlook, schedule=False)]
