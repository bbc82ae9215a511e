"""The store of a Trainer's output folder: which one it is, and how another replaces it.

A store in the output folder itself is called STORE_FOLDER. If the store is on other drives, or is
that of a second training, the mark of the output folder contains its name. A new training does not
modify the store of an earlier training before it has committed its own first step:

    start       the mark names the earlier store as current and the new one as spare
    first step  committed; the mark names the new store as current and the earlier one as spare
    afterwards  spare stores are removed, unless a model of this process has its weights there

Spare stores left by a process that was killed are removed at the next start.
"""

from __future__ import annotations

import re
import shutil
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import transformers
from torch import nn
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import logging

from lohan.checkpoint.from_snapshot import store_from_snapshot
from lohan.device.ranks import ALONE, ProcessGroup, join
from lohan.engine.policies import STORE_FOLDER
from lohan.engine.session import Session
from lohan.engine.stored_weights import all_stored_weights_of, given_dtype, weights_source
from lohan.errors import LohanError, StoreError
from lohan.hf.arguments import LohanArguments
from lohan.store.admin import describe, find_snapshot, remove
from lohan.store.files import IDENTITY
from lohan.train.run_folder import Mark, new_mark, read_mark, write_file
from lohan.util.files import load_json
from lohan.util.units import counted

logger = logging.get_logger(__name__)
OUTPUT_DIR = "output_dir"  # Key in a store's metadata: the folder that the store belongs to.
# Key in a store's metadata and in TRAINING_FILE: the id of the training that both belong to.
TRAINING = "training"
STATE_FOLDER = "lohan-state"  # Folder in a checkpoint: weights and optimizer state of its step.
# File in a checkpoint: identifies the training that it belongs to.
TRAINING_FILE = "lohan-training.json"
REFERENCES = "lohan-reference-*.npy"  # Files in an output folder: log-probabilities of a reference.


class OutputStore:
    """The part of a Trainer that locates its store."""

    args: Any
    model: Any
    lohan: LohanArguments
    session: Session | None
    _ranks: ProcessGroup | None
    _replacing: Mark | None = None  # the mark of the new store, until its first step is committed

    def _sharing(self) -> dict[str, Any]:
        """Return the arguments of `attach` that make the processes of torchrun share the state."""
        if self.args.world_size > 1 and self._ranks is None:
            self._ranks = join()
        return {} if self._ranks is None else {"process_group": self._ranks}

    @property
    def _out(self) -> Path:
        return Path(self.args.output_dir)

    def _of_rank(self, path: Path) -> Path:
        """Return the path with this rank's suffix, or unchanged if there is only one process."""
        self._sharing()
        ranks = self._ranks
        return path if ranks is None else path.with_name(ranks.ranks.store_name(path.name))

    def _dirs_of(self, name: str) -> list[Path]:
        ssd = self.lohan.budget(self.args.output_dir).ssd
        return [self._of_rank(Path(folder) / name) for folder in ssd]

    def _store_dirs(self) -> list[Path]:
        return self._dirs_of(self._store_name())

    def _store_name(self) -> str:
        """Return the name of the new training's store or, without one, of the current store."""
        mark = self._replacing or read_mark(self._out)
        return STORE_FOLDER if mark is None else mark.store

    def _inside(self) -> bool:
        """Return whether the whole store is in the output folder."""
        return {path.parent.resolve() for path in self._store_dirs()} == {self._out.resolve()}

    def _original(self) -> Path | None:
        """Return the folder that this output folder is a copy of if both share a store, or None."""
        dirs, mark = self._store_dirs(), read_mark(self._out)
        if mark is None or not (dirs[0] / IDENTITY).exists() or self._inside():
            return None
        first = Path(describe(dirs).get("meta", {}).get(OUTPUT_DIR, self._out))
        first_mark = read_mark(first)
        same = first_mark is not None and first_mark.id == mark.id and not first.samefile(self._out)
        return first if same else None

    # -- a new training ---------------------------------------------------------------------------

    def _new_store(self) -> str:
        """Return a name for the store of a new training, without creating the store."""
        out, group = self._out, self._ranks or ALONE
        self._replacing = None
        with group.all_or_none():
            self._remove_spare()
            dirs = self._store_dirs()
            is_ours = self._inside() or (read_mark(out) is not None and self._original() is None)
            earlier = is_ours and (dirs[0] / IDENTITY).exists()
            if earlier and describe(dirs)["state"] == "unfinished":
                end_others(dirs)
                remove(dirs)
                earlier = False
            elif earlier:
                self._warn_of_earlier(dirs)
        if all(group.all_gather_object(is_ours and not earlier)):
            return self._store_name()

        def make() -> list[str]:
            out.mkdir(parents=True, exist_ok=True)
            mark = new_mark(out)
            if earlier:
                before = read_mark(out) or Mark(uuid4().hex[:12], STORE_FOLDER)
                replace(before, spare=(*before.spare, mark.store)).write(out)
            else:
                mark.write(out)
            return [mark.id, mark.store]

        mark_id, name = group.broadcast_made(make)
        if earlier:
            self._replacing = Mark(mark_id, name)
        return str(name)

    def _warn_of_earlier(self, dirs: Sequence[Path]) -> None:
        step = describe(dirs)["meta"].get("progress", {}).get("step", 0)
        logger.warning(
            f"{dirs[0]} holds the state of an earlier training in {self._out}, at step {step}. A "
            "new training starts; the earlier state is removed when the first step of the new one "
            "is committed. To go on with the earlier one, stop now and call "
            "train(resume_from_checkpoint=True)"
        )

    def _take_place(self, session: Session) -> None:
        """Commit the first step of a new training and let its store replace the earlier one."""
        if self._replacing is None:
            return
        session.commit()
        group, out = session.process_group, self._out
        with group.all_or_none():
            if group.ranks.first:
                before = read_mark(out) or Mark(uuid4().hex[:12], STORE_FOLDER)
                spare = [name for name in before.spare if name != self._replacing.store]
                replace(self._replacing, spare=(*spare, before.store)).write(out)
        self._replacing = None
        self._remove_spare()

    def _remove_spare(self) -> None:
        """Remove the spare stores of this output folder that no process uses."""
        mark = read_mark(self._out)
        if mark is None or not mark.spare:
            return
        still_used = tuple(name for name in mark.spare if not remove_unused(self._dirs_of(name)))
        if still_used != mark.spare and (self._ranks or ALONE).ranks.first:
            replace(mark, spare=still_used).write(self._out)

    def _keep_open(self, session: Session) -> None:
        """Keep the session open until its Trainer is deleted, and close it then.

        When the model is deleted too, the store is removed if it is spare.
        """
        _MODELS.add(session.model)
        name = self._store_name()
        # At the end of the process, the most recently created finalizer runs first.
        weakref.finalize(session.model, _remove_if_spare, self._out, name, session.store.dirs)
        weakref.finalize(self, _let_go, session)
        _OPEN.add(session)

    # -- continuing a training ---------------------------------------------------------------------

    def _state_folder(self, checkpoint: Path) -> Path:
        return self._of_rank(checkpoint / STATE_FOLDER)

    def _has_state(self, checkpoint: Path) -> bool:
        try:
            find_snapshot(self._state_folder(checkpoint))
        except StoreError:
            return False
        return True

    def _is_of_store(self, checkpoint: Path) -> bool:
        """Return whether a checkpoint belongs to the training of the output folder's store.

        A checkpoint that contains no state is assumed to belong to that training, because training
        could not continue from the checkpoint otherwise.
        """
        dirs = self._store_dirs()
        if not self._has_state(checkpoint):
            return True
        if not (dirs[0] / IDENTITY).exists() or self._original() is not None:
            return False
        store = describe(dirs)
        if store["state"] == "unfinished":
            return False
        ids = (_training_of(checkpoint), store["meta"].get(TRAINING))
        return None in ids or len(set(ids)) == 1

    def _open_elsewhere(self, checkpoint: Path) -> None:
        """Create a store in the output folder from the state in a checkpoint of another training.

        The checkpoint may belong to another folder. Weights that are not trained come from the
        model.
        """
        self._new_store()
        dirs, group = self._store_dirs(), self._ranks or ALONE
        named = self.model.named_parameters(remove_duplicate=False)
        given_dtypes = {name: given_dtype(p) for name, p in named if not p.requires_grad}
        logger.info(f"{dirs[0]}: the store is made from the state in {checkpoint}")
        with ExitStack() as reading, group.all_or_none():
            for stored in all_stored_weights_of(self.model):
                reading.enter_context(stored.store())
            store_from_snapshot(
                find_snapshot(self._state_folder(checkpoint)),
                dirs,
                weights_source(self.model),
                given_dtypes,
                process_group=group,
                meta={OUTPUT_DIR: str(self._out.resolve())},
            )
        for file in checkpoint.parent.glob(REFERENCES):
            if group.ranks.first and not (self._out / file.name).exists():
                shutil.copyfile(file, self._out / file.name)

    def _saved_step(self, checkpoint: Path) -> int:
        file = checkpoint / TRAINER_STATE_NAME
        if not file.is_file():
            return 0
        if not is_saved(checkpoint):
            raise StoreError(
                f"{file}: cannot be read, the process that wrote it may have died; resume from an "
                "earlier checkpoint, or with train(resume_from_checkpoint=True)"
            )
        return int(transformers.TrainerState.load_from_json(str(file)).global_step)

    def _later_checkpoints(self, checkpoint: Path) -> list[str]:
        """Return the complete checkpoints of the same training that were saved after this one."""
        saved, training = self._saved_step(checkpoint), _training_of(checkpoint)
        return [
            path.name
            for path in checkpoint.parent.glob("checkpoint-*")
            if path.name.rpartition("-")[2].isdigit()
            and is_saved(path)
            and _training_of(path) == training
            and self._saved_step(path) > saved
        ]

    def _name_training(self, checkpoint: Path) -> None:
        """Record in a checkpoint which training it belongs to."""
        training = self.session.store.meta.get(TRAINING) if self.session is not None else None
        if training is not None and checkpoint.is_dir():
            write_file(checkpoint / TRAINING_FILE, f'{{"{TRAINING}": "{training}"}}\n')

    def _stored_step(self) -> int:
        """Return the last committed step of the training in the store."""
        meta = self._stored()
        return int(meta["progress"]["step"]) - int(meta.get("first_step", 0))

    def _stored(self) -> dict[str, Any]:
        """Return the metadata of the store, or raise StoreError if there is no store."""
        dirs = self._store_dirs()
        if not (dirs[0] / IDENTITY).exists():
            stored, current = stored_world_size(dirs[0]), max(1, self.args.world_size)
            if stored and stored != current:
                raise StoreError(
                    f"{dirs[0].parent} has the state of a training with "
                    f"{counted(stored, 'process', 'processes')}, and this one has {current}; "
                    f"resume it with {stored}"
                )
            raise StoreError(
                f"there is no store in {dirs[0].parent}, and the checkpoint has no {STATE_FOLDER}; "
                "name the folders that training began with (LohanArguments.ssd, LOHAN_SSD), or "
                "start a new training from the weights of the checkpoint"
            )
        if (first := self._original()) is not None:
            raise StoreError(
                f"{self.args.output_dir} is a copy of {first}, and both use one store at "
                f"{dirs[0]}; continue in that one, or move it away"
            )
        meta: dict[str, Any] = describe(dirs)["meta"]
        return meta


def stored_world_size(store: Path) -> int:
    """Return how many processes share the training whose store is `store`; 0 if none is found."""
    base = re.sub(r"-rank\d+of\d+$", "", store.name)
    for path in sorted(store.parent.glob(f"{base}*")):
        match = re.fullmatch(rf"{re.escape(base)}(?:-rank\d+of(\d+))?", path.name)
        if match and (path / IDENTITY).exists():
            return int(match[1] or 1)
    return 0


def is_saved(checkpoint: Path) -> bool:
    """Return whether a checkpoint is complete, that is, whether its last file can be read."""
    try:
        load_json(checkpoint / TRAINER_STATE_NAME)
    except (OSError, ValueError):
        return False
    return True


def _training_of(checkpoint: Path) -> str | None:
    try:
        record: dict[str, Any] = load_json(checkpoint / TRAINING_FILE)
        return str(record[TRAINING])
    except (OSError, ValueError, KeyError, TypeError):
        return None


# -- Sessions and models of this process -----------------------------------------------------------


_OPEN: weakref.WeakSet[Session] = weakref.WeakSet()
# models of this process whose weights are in a store
_MODELS: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def end_others(dirs: Sequence[Path]) -> None:
    """Close the sessions of this process that have one of these folders open."""
    for session in list(_OPEN):
        if not session.closed and _resolved(session.store.dirs) & _resolved(dirs):
            session.close()


def remove_unused(dirs: Sequence[Path]) -> bool:
    """Remove a store unless it is used, and return whether it no longer exists."""
    stored = [weights for model in list(_MODELS) for weights in all_stored_weights_of(model)]
    if any(_resolved(weights.dirs) & _resolved(dirs) for weights in stored):
        return False
    if (dirs[0] / IDENTITY).exists():
        try:
            remove(dirs)
        except LohanError:  # Another process has the store open, or its drive is not writable now.
            return False
    return True


def _resolved(dirs: Sequence[Path]) -> set[Path]:
    return {path.resolve() for path in dirs}


def _remove_if_spare(out: Path, name: str, dirs: Sequence[Path]) -> None:
    """Remove the store of a deleted model if another store has replaced it."""
    try:
        mark = read_mark(out)
    except LohanError:
        return
    if mark is not None and name in mark.spare:
        remove_unused(dirs)


def _let_go(session: Session) -> None:
    """Close the session of a deleted Trainer, and log a warning if that fails."""
    try:
        session.close()
        session.process_group.close()
    except LohanError as error:
        logger.warning(f"the store {session.store.dirs[0]} was not closed: {error}")
