"""Where a Trainer continues: the checkpoint, and the state of the store."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import transformers
from transformers.trainer import TRAINER_STATE_NAME

from lohan.errors import StoreError
from lohan.hf.stores import STATE_FOLDER, end_others, is_saved
from lohan.param_groups import META_KEY
from lohan.store.admin import describe, find_snapshot, rewind
from lohan.store.files import IDENTITY
from lohan.store.store import Store
from lohan.util.files import load_json

GROUPS_FILE = "optimizer_groups.json"  # in a checkpoint: hyper-parameters of each group


class Resumption:
    """The checkpoint that a call of `train` continues from, if any, and the state of that step."""

    def __init__(self, trainer: Any) -> None:
        # A weak reference, so that the session does not keep the Trainer alive.
        self._trainer = weakref.ref(trainer)
        self.active = False  # whether the training continues an earlier one
        self.beyond = 0  # steps that the store has committed after the checkpoint
        self._beginning: Path | None = None  # checkpoint of step 0, if none was saved
        self._snapshot: Path | None = None  # state to restore when the store is opened

    def last_checkpoint(self, work: Path) -> str | bool:
        """Return the last complete checkpoint, or True if there is nothing to resume.

        A process may have died while it saved a checkpoint, or before it saved the first one, with
        committed steps in the store. If there is no complete checkpoint, a checkpoint of step 0 is
        created in `work`.
        """
        trainer: Any = self._trainer()
        numbered = {
            int(path.name.rpartition("-")[2]): path
            for path in Path(trainer.args.output_dir).glob("checkpoint-*")
            if path.name.rpartition("-")[2].isdecimal() and is_saved(path)
        }
        if numbered:
            return str(numbered[max(numbered)])
        dirs = trainer._store_dirs()
        if not (dirs[0] / IDENTITY).exists() or describe(dirs)["state"] == "unfinished":
            return True  # transformers refuses it: there is nothing to resume
        self._beginning = work / "checkpoint-0"
        self._beginning.mkdir()
        transformers.TrainerState().save_to_json(str(self._beginning / TRAINER_STATE_NAME))
        return str(self._beginning)

    def is_beginning(self, checkpoint: str | None) -> bool:
        return self._beginning is not None and checkpoint == str(self._beginning)

    def begin(self, checkpoint: Path) -> None:
        """Choose the store and the state to continue from; the first batch opens the store.

        If the store belongs to the training of the checkpoint and is not behind the checkpoint,
        training continues after the last step of the store. Otherwise the checkpoint must contain
        the state of its step.
        """
        trainer: Any = self._trainer()
        self.active = True
        saved = trainer._saved_step(checkpoint)
        if not trainer._is_of_store(checkpoint):
            trainer._open_elsewhere(checkpoint)
            return
        end_others(trainer._store_dirs())
        stored, later = trainer._stored_step(), trainer._later_checkpoints(checkpoint)
        if stored >= saved and not later:
            return
        if trainer._has_state(checkpoint):
            self._snapshot = find_snapshot(trainer._state_folder(checkpoint))
            return
        state = f"the store is at step {stored}" + (f" and {later[0]} is later" if later else "")
        raise StoreError(
            f"{checkpoint} is of step {saved}, {state}, and it has no {STATE_FOLDER} (it was "
            "saved with save_only_model, or there was no room); resume from the latest "
            "checkpoint, or start a new training from the weights of this one"
        )

    def count_beyond(self, step: int) -> int:
        """Return how many steps the store is beyond `step`, the step of the checkpoint."""
        trainer: Any = self._trainer()
        self.beyond = 0 if self._snapshot else trainer._stored_step() - step
        return self.beyond

    def rewind(self) -> None:
        """Rewind the store to the state of the checkpoint, if training resumes from that state."""
        if self._snapshot is not None:
            trainer: Any = self._trainer()
            # Logged steps are later than the checkpoint, so they are dropped.
            with Store.open(trainer._store_dirs(), replays=True) as store:
                rewind(store, self._snapshot)
            self._snapshot = None

    def recorded_groups(self, checkpoint: Path) -> Any:
        """Return the parameter groups of the step that training resumes after, or None if unknown.

        The groups come from the checkpoint, including values that callbacks wrote after its step,
        or from the manifest of a later committed step.
        """
        trainer: Any = self._trainer()
        file = checkpoint / GROUPS_FILE
        if not self.beyond and file.is_file():
            return load_json(file)
        return None if self._snapshot else trainer._stored().get(META_KEY)
