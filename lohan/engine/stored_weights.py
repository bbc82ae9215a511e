"""The weights of an attached model: saved, copied, merged and attached again by its own methods.

A parameter that was moved to a store refers to the store (`StoredWeights`) and has a name in it,
even after its session is closed. A model may therefore be attached again with its current weights,
and `save_pretrained`, `state_dict`, `deepcopy` and PEFT's `merge_and_unload` read from the store.
They stream weights if they write a folder, and otherwise load them into memory, if there is room.
"""

from __future__ import annotations

import copy
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import torch
from torch import nn

from lohan.capture.blocks import DTYPE_NAMES
from lohan.capture.placeholders import AttachedParameter, lacks_values
from lohan.checkpoint.adapters import AdapterValues, MergedReader, base_of, is_adapted
from lohan.checkpoint.hf_folder import SHARD_BYTES, persistent_buffers
from lohan.checkpoint.replacing import NEW, SAVED, check_joinable, joining
from lohan.checkpoint.safetensors import STEMS, ReadFlat
from lohan.checkpoint.sources import ModuleSource, element_ranges
from lohan.checkpoint.store_io import overwrite, source_of, store_reader
from lohan.engine.export import export_merged, export_session, export_store
from lohan.engine.logged import fold_log
from lohan.engine.session import Session
from lohan.engine.user_code import Copies, WeightRead, read_weight, watch_torch
from lohan.errors import BudgetError, ConfigError, ModelError, StoreError
from lohan.store.files import IDENTITY
from lohan.store.store import Store
from lohan.util.libraries import is_user_code
from lohan.util.memory import host_memory_bytes
from lohan.util.units import format_bytes, parse_bytes

P = ParamSpec("P")


class StoredWeights:
    """The store of a model's weights; `dtype` is the type in which they were given."""

    def __init__(self, session: Session, dtype: torch.dtype) -> None:
        self.model, self.dtype = session.model, dtype
        self.dirs = session.store.dirs
        self._session = weakref.ref(session)
        self._opened: Store | None = None  # the store, while it is being read without a session
        self._writes: dict[str, torch.Tensor] | None = None  # values by name, inside `writing`
        self.names = frozenset(name for name, _ in self.model.named_parameters())
        self.copies = Copies()

    @property
    def session(self) -> Session | None:
        """The session that has the store open, or None."""
        session = self._session()
        return None if session is None or session.closed else session

    @property
    def running_session(self) -> Session | None:
        """The session if the model's blocks run from the store, otherwise None."""
        session = self.session
        return None if session is None or session.execution.stopped else session

    def read(self, parameter: AttachedParameter) -> torch.Tensor:
        """Read the values of a parameter into memory. The result is differentiable."""
        session = self.running_session
        with torch.no_grad():
            if session is not None:
                values = read_weight(session.executor, parameter)
            else:
                values = values_of(self, [parameter])[id(parameter)].detach().to(parameter.dtype)
        if not (torch.is_grad_enabled() and parameter.requires_grad):
            return values
        anchor = torch.zeros((), requires_grad=True, device=values.device)
        differentiable: torch.Tensor = WeightRead.apply(
            anchor, self, parameter.stored_as, parameter.label[0], values
        )
        return differentiable

    def write(self, parameter: AttachedParameter, values: torch.Tensor) -> None:
        """Write the values of a parameter to the store at once or, in `writing`, at its end."""
        if self._writes is not None:
            self._writes[parameter.stored_as] = values.detach()
            return
        with self.writing():
            self.write(parameter, values)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Collect the writes in the `with` body, and commit them together at its end."""
        self._writes = writes = dict[str, torch.Tensor]()
        try:
            yield
        finally:
            self._writes = None
        session = self.session
        if session is not None:
            _write_weights(session, writes)
        elif writes:
            with self.store() as store:
                overwrite(store, writes)

    @contextmanager
    def store(self) -> Iterator[Store]:
        """Commit the last step, and yield the store, which is opened if no session has it open."""
        session = self.session
        if session is not None:
            if not session.execution.stopped:
                session.commit()
            yield session.store
        elif self._opened is not None:
            yield self._opened
        elif (self.dirs[0] / IDENTITY).exists():
            with Store.open(self.dirs, replays=True) as self._opened:
                try:
                    fold_log(self._opened)  # The session may have ended without a commit.
                    yield self._opened
                finally:
                    self._opened = None
        else:
            raise StoreError(
                f"the weights of {type(self.model).__name__} were moved to the store "
                f"{self.dirs[0]}, which is gone; load the model again"
            )

    @contextmanager
    def handing_over(self, *, resume: bool) -> Iterator[None]:
        """Keep the weights readable while another session is created for the model.

        The new session reads its weights from this store or, with `resume`, from its own.
        """
        session = self.session
        if session is None and resume:
            yield
        elif session is None:
            with self.store():
                yield
        elif session.process_group.several:
            raise ConfigError(
                f"{type(self.model).__name__} is attached by {session.process_group.world} ranks; "
                "export it, and attach what lohan.load makes of that folder"
            )
        elif resume:
            session.close()
            yield
        else:
            with _handing_over(session):
                yield

    def current_reader(self) -> ReadFlat:
        """Return a reader of the open store, for a session that takes the model over."""
        session = self.session
        opened = session.store if session is not None else self._opened
        assert opened is not None
        return store_reader(opened)

    @contextmanager
    def reading(self) -> Iterator[ReadFlat]:
        with self.store() as store:
            yield store_reader(store)

    def export(self, out: str | os.PathLike[str], *, merged: bool = False, **how: Any) -> Path:
        """Write the model as `save_pretrained` would, in the type in which it was given.

        For a PEFT model, only the adapter is written or, with `merged`, the merged model.
        """
        session = self.session
        model = base_of(self.model) if merged else self.model
        how = {"dtype": DTYPE_NAMES[self.dtype], "source_folder": None, **how}
        if session is not None and session.process_group.several:
            if merged:
                raise ConfigError(
                    "an adapter is merged by one process, this run has "
                    f"{session.process_group.world} ranks; save it and merge it with `lohan export`"
                )
            buffers = persistent_buffers(base_of(model))
            return export_session(session, out, buffers=buffers, **how)
        with self.store() as store:
            if merged:
                return export_merged(self.model, store_reader(store), out, **how)
            buffers = persistent_buffers(base_of(model))
            return export_store(store, out, model=model, buffers=buffers, **how)


def _write_weights(session: Session, values: Mapping[str, torch.Tensor]) -> None:
    """Write values of parameters, given by their names in the store, and commit them.

    Optimizer state is not changed.
    """
    if session.process_group.several:
        raise ConfigError(
            f"{next(iter(values), 'a parameter')} cannot be written: its values are spread "
            f"over {session.process_group.world} ranks; load the weights before attach"
        )
    with session.execution.paused():
        overwrite(session.store, values)


@contextmanager
def _handing_over(session: Session) -> Iterator[None]:
    """End a session when the body has attached its model to another session.

    If the body raises an error, the session continues with its plan.
    """
    plan = session.plan
    session.commit()
    session.execution.stop()
    try:
        yield
    except BaseException:
        session.execution.start(plan)
        raise
    session.close(flush=False)


def stored_weights_of(model: nn.Module) -> StoredWeights | None:
    """Return the store of a model's weights, or None if they are not in a store."""
    return next(iter(all_stored_weights_of(model)), None)


def redirect_to_store(session: Session, dtype: torch.dtype) -> StoredWeights:
    """Record the store in a model's parameters, and redirect the model's methods to the store.

    Return the object that represents the store.
    """
    stored, model = StoredWeights(session, dtype), session.model
    for parameter in model.parameters():
        parameter.stored_weights = stored  # type: ignore[attr-defined]
    methods: dict[str, Callable[..., Any]] = {}
    if hasattr(type(model), "save_pretrained"):
        methods["save_pretrained"] = _SavePretrained(stored)
    if is_adapted(model) and hasattr(model, "merge_and_unload"):
        methods["merge_and_unload"] = _MergeAndUnload(stored)
    methods["state_dict"] = _StateDict(stored)
    methods["load_state_dict"] = _LoadStateDict(stored)
    for base in {id(m): m for m in (model, base_of(model))}.values():
        if hasattr(type(base), "resize_token_embeddings"):
            base.resize_token_embeddings = _ResizeTokenEmbeddings(stored)  # type: ignore[assignment]
    methods["__deepcopy__"] = _Copy(stored)
    for name, method in methods.items():
        if name not in _SAVING or not _is_of_user(vars(model).get(name)):
            setattr(model, name, method)
    return stored


# -- Code of the user that takes part in saving ----------------------------------------------------


_SAVING = ("save_pretrained", "state_dict")  # methods by which a whole model is saved


def _is_of_user(function: Any) -> bool:
    """Return whether a method or hook exists and was defined outside of libraries."""
    return function is not None and is_user_code(function)


def has_saving_code(model: nn.Module) -> bool:
    """Return whether user code takes part in saving a model.

    It may override methods, or register hooks of `state_dict`, so that the saved values differ from
    those in the store.
    """
    methods = [vars(model).get(name) for name in _SAVING]
    methods += [getattr(type(model), name, None) for name in _SAVING]
    if any(map(_is_of_user, methods)):
        return True
    return any(
        _is_of_user(function)
        for module in model.modules()
        for function in (
            type(module).state_dict,
            type(module)._save_to_state_dict,
            type(module).get_extra_state,
            *module._state_dict_hooks.values(),
            *module._state_dict_pre_hooks.values(),
        )
    )


def all_stored_weights_of(model: nn.Module) -> list[StoredWeights]:
    """Return all stores of a model's weights, in the order of its parameters."""
    stores = [getattr(parameter, "stored_weights", None) for parameter in model.parameters()]
    return [stored for stored in dict.fromkeys(stores) if stored is not None]


def taking_over(
    attach: Callable[Concatenate[nn.Module, P], Session],
) -> Callable[Concatenate[nn.Module, P], Session]:
    """Wrap `attach` so that it ends an earlier session of the model and keeps its weights."""

    @wraps(attach)
    def attached(model: nn.Module, *args: P.args, **named: P.kwargs) -> Session:
        every, originals = all_stored_weights_of(model), list(model.parameters())
        dtype = next((stored.dtype for stored in every), _given_dtype(model))
        resume = named.get("resume", getattr(named.get("store_policy"), "resume", False))
        with ExitStack() as earlier:
            for stored in every:
                earlier.enter_context(stored.handing_over(resume=bool(resume)))
            session = attach(model, *args, **named)
        stored = redirect_to_store(session, dtype)
        for parameter in originals:  # A torch optimizer may still refer to the original parameters.
            parameter.moved_to = stored  # type: ignore[attr-defined]
        watch_torch()
        return session

    return attached


def given_dtype(parameter: nn.Parameter) -> torch.dtype:
    """Return the type in which a parameter was given, even if it computes in another."""
    stored = getattr(parameter, "stored_weights", None)
    return parameter.dtype if stored is None else stored.dtype


def _given_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype for saving: the most common one of the adapter's or all parameters."""
    adapted, sizes = is_adapted(model), Counter[torch.dtype]()
    for parameter in model.parameters():
        if parameter.requires_grad or not adapted:
            sizes[parameter.dtype] += parameter.numel()
    most = max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)
    return most if most in DTYPE_NAMES else torch.float32


def weights_source(model: nn.Module) -> ReadFlat:
    """Return a reader of the initial values of a new store.

    Weights that an earlier store contains are read from that store.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    held: dict[str, Any] = {
        name: p for name, p in named.items() if getattr(p, "stored_weights", None) is not None
    }
    if not held:
        return source_of(model)
    readers = {stored: stored.current_reader() for stored in all_stored_weights_of(model)}
    others = {name: lacks_values(p) for name, p in named.items() if name not in held}
    in_memory = [name for name, meta in others.items() if not meta]
    by_name = dict.fromkeys(in_memory, ModuleSource(model, in_memory).read_flat)
    if any(others.values()):
        drawn = AdapterValues(model).read_flat
        by_name |= dict.fromkeys((name for name, meta in others.items() if meta), drawn)

    def read(name: str, start: int, stop: int) -> torch.Tensor:
        if name in held:
            return readers[held[name].stored_weights](held[name].stored_as, start, stop)
        return by_name[name](name, start, stop)

    return read


# -- The methods of a model whose weights are in a store -------------------------------------------


class _Method:
    def __init__(self, stored: StoredWeights) -> None:
        self._stored = stored

    def __deepcopy__(self, memo: dict[int, Any]) -> _Method:
        raise TypeError("a method of an attached model is not copied")


class _SavePretrained(_Method):
    merged = False

    def __call__(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: Mapping[str, Any] | None = None,
        **how: Any,
    ) -> None:
        stored = self._stored
        if state_dict is not None:  # The values to write are given, so the store is not needed.
            model_class: Any = type(stored.model)
            model_class.save_pretrained(stored.model, save_directory, state_dict=state_dict, **how)
            return
        if not self.merged and has_saving_code(stored.model):
            # Its values are loaded into memory, because they may differ from those in the store.
            if not isinstance(vars(stored.model).get("state_dict"), _StateDict):
                how["state_dict"] = in_memory(stored, stored.model.state_dict())
            if not is_main_process:
                how["is_main_process"] = False
            own_class: Any = type(stored.model)
            own_class.save_pretrained(stored.model, save_directory, **how)
            return
        unknown = {k for k, v in how.items() if v} - {"safe_serialization", "max_shard_size"}
        if unknown:
            raise ConfigError(
                f"save_pretrained with {', '.join(sorted(unknown))}: the weights are streamed from "
                f"{stored.dirs[0]}, which does not know it; leave it out"
            )
        if is_main_process:
            size = how.get("max_shard_size") or SHARD_BYTES
            save_into(
                Path(save_directory),
                stored,
                merged=self.merged,
                max_shard_bytes=parse_bytes(size, name="max_shard_size"),
            )


class _SaveMerged(_SavePretrained):
    merged = True


def save_into(target: Path, stored: StoredWeights, *, merged: bool = False, **how: Any) -> None:
    """Add the files of an export to a folder, replacing files that were saved there before.

    With several ranks, all of them call this, and the first writes.
    """
    session = stored.session
    group = None if session is None else session.process_group
    adapter = is_adapted(stored.model) and not merged
    stems = ("adapter_model",) if adapter else STEMS
    with ExitStack() as saving:
        folder = target / NEW
        with group.all_or_none() if group is not None else nullcontext():
            if group is None or group.ranks.first:
                folder = saving.enter_context(joining(target))
                check_joinable(target, {}, stems=stems)
        stored.export(folder, overwrite=True, mark=SAVED, merged=merged, **how)


class _MergeAndUnload(_Method):
    def __call__(self, *args: Any, **named: Any) -> nn.Module:
        """Return the base model, whose `save_pretrained` streams the merged weights.

        Calls of the returned model still include the adapter.
        """
        base: Any = base_of(self._stored.model)
        with self._stored.reading() as read:
            # Adapters that cannot be merged are refused now, not when the model is saved.
            MergedReader(self._stored.model, read)
        base.save_pretrained = _SaveMerged(self._stored)
        base.state_dict = _MergedStateDict(self._stored)
        base.__deepcopy__ = _MergedCopy(self._stored)
        merged: nn.Module = base
        return merged


class _StateDict(_Method):
    def __call__(self, *args: Any, keep_vars: bool = False, **named: Any) -> dict[str, Any]:
        stored = self._stored
        state_dict: dict[str, Any] = type(stored.model).state_dict(
            stored.model, *args, keep_vars=True, **named
        )
        if keep_vars:
            return state_dict
        values = in_memory(stored, state_dict)
        stored.copies.add({name: values[name] for name in values.keys() & stored.names})
        return values


class _LoadStateDict(_Method):
    def __call__(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Write values to the store, with the checks of PyTorch's `load_state_dict`.

        Optimizer state is not changed, as with a torch optimizer. `assign` is ignored.
        """
        stored = self._stored
        with stored.writing():
            return type(stored.model).load_state_dict(stored.model, state_dict, strict=strict)


class _ResizeTokenEmbeddings(_Method):
    def __call__(self, *args: Any, **named: Any) -> Any:
        model = type(self._stored.model).__name__
        raise ModelError(
            f"resize_token_embeddings: the embeddings of {model} are in the store, with optimizer "
            "state of their size; save the model with save_pretrained(DIR), load and resize it "
            "there, and train that one (before training: resize it before the Trainer is made or "
            "attach is called)"
        )


class _Copy(_Method):
    def __call__(self, memo: dict[int, Any]) -> nn.Module:
        """Return a copy of the model in memory, with the current weights."""
        stored = self._stored
        held = [p for p in stored.model.parameters() if hasattr(p, "stored_weights")]
        memo |= values_of(stored, held)
        with ExitStack() as undo:
            if stored.session is not None:
                undo.enter_context(stored.session.execution.unhooked())
            for attributes in {
                id(m): vars(m) for m in (stored.model, base_of(stored.model))
            }.values():
                methods = {
                    name: attributes.pop(name)
                    for name in [*attributes]
                    if isinstance(attributes[name], _Method)
                }
                undo.callback(attributes.update, methods)
            return copy.deepcopy(stored.model, memo)


class _MergedStateDict(_Method):
    def __call__(self, *args: Any, keep_vars: bool = False, **named: Any) -> dict[str, Any]:
        if keep_vars:
            base = base_of(self._stored.model)
            return type(base).state_dict(base, *args, keep_vars=True, **named)
        return _MergedCopy(self._stored)({}).state_dict(*args, **named)


class _MergedCopy(_Method):
    def __call__(self, memo: dict[int, Any]) -> nn.Module:
        whole: Any = _Copy(self._stored)(memo)
        merged: nn.Module = whole.merge_and_unload()
        return merged


def in_memory(stored: StoredWeights, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state_dict with values in place of the placeholders of parameters."""
    values = values_of(stored, [p for p in state_dict.values() if isinstance(p, AttachedParameter)])
    resolved: dict[str, Any] = {}
    for name, tensor in state_dict.items():
        tensor = values.get(id(tensor), tensor)
        # A module may add an object of any type as its extra state.
        resolved[name] = tensor.detach() if isinstance(tensor, torch.Tensor) else tensor
    return resolved


def values_of(stored: StoredWeights, parameters: list[Any]) -> dict[int, nn.Parameter]:
    """Return parameters with the values from the store, by the id of their placeholders."""
    needed = sum(p.numel() for p in parameters) * stored.dtype.itemsize
    free = host_memory_bytes()
    if needed > free:
        raise BudgetError(
            f"the weights of {type(stored.model).__name__} take {format_bytes(needed)}, "
            f"{format_bytes(free)} of memory are free; save_pretrained(DIR) streams them to a "
            "folder instead"
        )
    by_id: dict[int, nn.Parameter] = {}
    with stored.reading() as read:
        for p in parameters:
            if id(p) not in by_id:
                spans = element_ranges(p.numel())
                flat = [read(p.stored_as, a, b).to(stored.dtype) for a, b in spans]
                values = torch.cat(flat).view(p.shape) if flat else torch.empty(p.shape)
                by_id[id(p)] = nn.Parameter(values, requires_grad=p.requires_grad)
    return by_id
