"""Parameter groups: hyper-parameters that apply to some of a model's parameters.

A group is written as in torch.optim: a mapping with `params` and any of the optimizer's fields.
`params` are parameters or patterns. Fields that a group does not set, and parameters that are in no
group, have the values of the optimizer. The stored state does not depend on groups, so they may
change when a run is resumed. Every manifest records the groups of its step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from lohan.errors import ConfigError
from lohan.optim import Optimizer
from lohan.util.settings import kind, names, wrong

PARAMS = "params"
META_KEY = "param_groups"  # Key in a store's meta: the groups of the last step.
# These fields determine what a store holds, so all parameters share them.
_STATE_FIELDS = ("moments", "ema")
_NAMES_SHOWN = 3  # The number of names shown in messages.


def group_fields(optimizer: Optimizer | type[Optimizer]) -> tuple[str, ...]:
    """Return the fields of an optimizer that a group may set."""
    return tuple(f.name for f in fields(optimizer) if f.name not in _STATE_FIELDS)


# -- The hyper-parameters of a step ----------------------------------------------------------------


@dataclass(frozen=True)
class GroupValues:
    """The hyper-parameters of every parameter in one step."""

    optimizers: tuple[Optimizer, ...]  # One per group; their `lr` is not used.
    rates: tuple[float, ...]  # The learning rate of each group.
    # Maps a parameter to the number of its group; missing parameters are in group 0.
    index: Mapping[str, int]

    def of(self, parameter: str) -> tuple[float, Optimizer]:
        """Return the learning rate and the other hyper-parameters of a parameter."""
        number = self.index.get(parameter, 0)
        return self.rates[number], self.optimizers[number]


class HyperParameters(Protocol):
    """The source from which an executor takes the hyper-parameters of each step."""

    # The optimizer that defines what all groups share: the update rule and the format of the state.
    optimizer: Optimizer

    def at(self, step: int) -> GroupValues:
        """Return the values of a step, counted from 0."""

    def to_json(self, values: GroupValues) -> list[dict[str, Any]]:
        """Return what the manifest of a step records about its groups."""


class ParamGroups:
    """Groups with constant values, except for learning rates that are functions of the step."""

    def __init__(self, optimizers: Sequence[Optimizer], index: Mapping[str, int]) -> None:
        self.optimizer = optimizers[0]
        self._optimizers, self._index = tuple(optimizers), index
        self._members = members_by_group(len(optimizers), index)

    def at(self, step: int) -> GroupValues:
        rates = tuple(optimizer.lr_at(step) for optimizer in self._optimizers)
        return GroupValues(self._optimizers, rates, self._index)

    def to_json(self, values: GroupValues) -> list[dict[str, Any]]:
        return groups_to_json(values, self._members)


def assign(
    optimizer: Optimizer,
    groups: Sequence[ParamGroup],
    chosen: Mapping[str, int],
    trained: Iterable[tuple[str, bool]],
) -> ParamGroups:
    """Assign hyper-parameters to every trained parameter.

    `chosen` is the result of `choose`. `trained` yields each parameter's name, and whether the
    optimizer's weight decay applies to it if its group sets none.
    """
    optimizers = [optimizer]
    numbers: dict[tuple[int | None, bool], int] = {(None, False): 0}
    index: dict[str, int] = {}
    for name, decays in trained:
        entry = chosen.get(name)
        group_optimizer = optimizer if entry is None else groups[entry].optimizer(optimizer)
        inherits_decay = entry is None or "weight_decay" not in groups[entry].values
        exempt = inherits_decay and not decays and bool(group_optimizer.weight_decay)
        if (entry, exempt) not in numbers:
            numbers[entry, exempt] = len(optimizers)
            optimizers.append(
                replace(group_optimizer, weight_decay=0.0) if exempt else group_optimizer
            )
        index[name] = numbers[entry, exempt]
    return ParamGroups(optimizers, index)


# -- What a user writes ----------------------------------------------------------------------------


@dataclass(frozen=True)
class ParamGroup:
    """One group: its parameters, by identity or by pattern, and the values that it sets."""

    label: str  # The name in messages, such as param_groups[1].
    patterns: tuple[str, ...]
    parameter_ids: frozenset[int]
    values: Mapping[str, Any]

    @classmethod
    def parse(cls, entry: Any, label: str, kind: type[Optimizer]) -> ParamGroup:
        """Parse one entry of `param_groups` for an optimizer of this kind."""
        allowed = group_fields(kind)
        if not isinstance(entry, Mapping) or PARAMS not in entry:
            raise ConfigError(
                f"{label}: got {entry!r:.80}; a group is a mapping with {PARAMS!r} and any of "
                f"{', '.join(allowed)}"
            )
        for key in entry:
            if key != PARAMS and key not in allowed:
                raise ConfigError(f"{label}: {_unknown(str(key), kind)}")
        patterns, ids = _members(entry[PARAMS], label)
        values = {key: value for key, value in entry.items() if key != PARAMS}
        if isinstance(values.get("betas"), list):
            values["betas"] = tuple(values["betas"])
        return cls(label, patterns, ids, values)

    def optimizer(self, base: Optimizer) -> Optimizer:
        """Return `base` with the values of this group."""
        try:
            return replace(base, **self.values)
        except ConfigError as error:
            raise ConfigError(f"{self.label}: {error}") from None

    def contains(self, names: Iterable[str], parameter: object) -> bool:
        """Return whether a parameter, which may have several names, is in this group."""
        return id(parameter) in self.parameter_ids or any(
            matches(pattern, name) for pattern in self.patterns for name in names
        )


def parse_groups(
    entries: Sequence[Any], optimizer: Optimizer, label: Callable[[int], str]
) -> list[ParamGroup]:
    """Parse all groups and check their values; `label` names a group by its number in messages."""
    if isinstance(entries, Mapping) or not isinstance(entries, Sequence):
        raise ConfigError(
            f"param_groups: got {entries!r:.80}; give a list of mappings, each with {PARAMS!r}"
        )
    groups = [
        ParamGroup.parse(entry, label(number), type(optimizer))
        for number, entry in enumerate(entries)
    ]
    for group in groups:
        group.optimizer(optimizer)
    return groups


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches consecutive pieces of a parameter's dotted name.

    Examples are `embed_tokens`, `bias` and `layers.0`. In each piece between dots, `*`, `?` and
    `[...]` are wildcards.
    """
    wanted, pieces = pattern.split("."), name.split(".")
    return any(
        all(map(fnmatchcase, pieces[start:], wanted))
        for start in range(len(pieces) - len(wanted) + 1)
    )


def choose(groups: Sequence[ParamGroup], model: Any) -> dict[str, int]:
    """Return the group number of every trained parameter that is in a group.

    The keys include all names of a parameter. `model` is a torch module.
    """
    names, parameters = dict[int, list[str]](), dict[int, Any]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    _check_members(groups, names, parameters, type(model).__name__)
    chosen: dict[str, int] = {}
    for key, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        matching = [n for n, group in enumerate(groups) if group.contains(names[key], parameter)]
        if len(matching) > 1:
            first, second = (groups[number].label for number in matching[:2])
            raise ConfigError(
                f"parameter {names[key][0]} is in {first} and in {second}; a parameter can be in "
                "one group: narrow the patterns of one of them"
            )
        if matching:
            chosen |= dict.fromkeys(names[key], matching[0])
    return chosen


def _check_members(
    groups: Sequence[ParamGroup],
    names: Mapping[int, Sequence[str]],
    parameters: Mapping[int, Any],
    model: str,
) -> None:
    """Raise ConfigError if a group has parameters or patterns that do not fit the model.

    Every parameter must be in the model, and every pattern must match a trained parameter.
    """
    for group in groups:
        unknown_ids = group.parameter_ids - parameters.keys()
        if unknown_ids:
            raise ConfigError(
                f"{group.label}: {len(unknown_ids)} of its parameters are not in {model}; take "
                "them from the model that is attached"
            )
        for pattern in group.patterns:
            matched = [p for key, p in parameters.items() if _matches_any(pattern, names[key])]
            if not matched:
                every = [name for aliases in names.values() for name in aliases]
                near = get_close_matches(pattern, _parts(every), n=1)
                hint = f"did you mean {near[0]}?" if near else f"it has {_shown(every)}"
                raise ConfigError(
                    f"{group.label}: {pattern!r} matches no parameter of {model}; {hint}"
                )
            if not any(p.requires_grad for p in matched):
                raise ConfigError(
                    f"{group.label}: {pattern!r} matches {len(matched)} parameters of {model}, all "
                    "of them frozen; leave it out, or set requires_grad"
                )


def _matches_any(pattern: str, names: Iterable[str]) -> bool:
    return any(matches(pattern, name) for name in names)


def _parts(names: Iterable[str]) -> list[str]:
    """Return the parts of dotted `names` with one or two components, to suggest as patterns."""
    parts: dict[str, None] = {}
    for name in names:
        pieces = name.split(".")
        parts |= dict.fromkeys(pieces)
        parts |= dict.fromkeys(map(".".join, pairwise(pieces)))
    return list(parts)


def _members(params: Any, label: str) -> tuple[tuple[str, ...], frozenset[int]]:
    """Return the patterns in `params`, and the identities of the parameters in it."""
    single = isinstance(params, str) or hasattr(params, "requires_grad")
    entries = [params] if single else list(params) if isinstance(params, Iterable) else []
    # torch.optim also accepts the pairs that named_parameters() returns.
    entries = [entry[1] if _is_named(entry) else entry for entry in entries]
    patterns = tuple(entry for entry in entries if isinstance(entry, str))
    parameters = [entry for entry in entries if hasattr(entry, "requires_grad")]
    if not entries or len(patterns) + len(parameters) < len(entries) or not all(patterns):
        raise ConfigError(
            f"{label}: {PARAMS} is {params!r:.80}; give a pattern such as 'layers.0' or '*norm*', "
            "a parameter, or a list of them"
        )
    return patterns, frozenset(map(id, parameters))


def _is_named(entry: Any) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and hasattr(entry[1], "requires_grad")


def _unknown(key: str, kind: type[Optimizer]) -> str:
    allowed = group_fields(kind)
    near = get_close_matches(key, (PARAMS, *allowed), n=1)
    if key in _STATE_FIELDS:
        return f"{key} is the same for all parameters; set it on the optimizer"
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{kind.__name__} has no {key!r}, it takes {PARAMS}, {', '.join(allowed)}{hint}"


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


# -- Groups in a TOML file ------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupSetting:
    """One [[train.param_groups]] table.

    It has patterns for names of parameters, and the values that replace those in [train].
    """

    params: tuple[str, ...]
    values: tuple[tuple[str, Any], ...]

    def table(self) -> dict[str, Any]:
        """Return the group as a mapping, in the form used by the file and by `attach`."""
        return {PARAMS: self.params, **dict(self.values)}


@kind("TABLES", str, type="array", items={"type": "object", "required": [PARAMS]})
def group_settings(value: Any, name: str, base: Path) -> tuple[GroupSetting, ...]:
    """Parse a list of tables; their values are checked once the optimizer is known."""
    if not isinstance(value, (list, tuple)):
        raise wrong(name, value, "a list of tables; write [[train.param_groups]] above each")
    groups = []
    for number, entry in enumerate(value, start=1):
        if not isinstance(entry, Mapping):
            raise wrong(f"{name} {number}", entry, 'a table such as {params = "bias", lr = 1e-4}')
        if PARAMS not in entry:
            raise ConfigError(
                f"{name} {number}: it has no {PARAMS}; name the parameters that it is for, such as "
                f'{PARAMS} = ["embed_tokens", "layers.0"]'
            )
        values = {
            key: tuple(item) if isinstance(item, list) else item for key, item in entry.items()
        }
        params = names(values.pop(PARAMS), f"{name} {number} {PARAMS}", base)
        groups.append(GroupSetting(params, tuple(values.items())))
    return tuple(groups)


# -- What manifests record -------------------------------------------------------------------------


@dataclass(frozen=True)
class Members:
    """The parameters of a group, in the form that a manifest records."""

    count: int
    digest: str  # Hash of their names.

    @classmethod
    def of(cls, names: Iterable[str]) -> Members:
        from hashlib import sha256  # loads OpenSSL, which `lohan --help` does not need

        ordered = sorted(names)
        return cls(len(ordered), sha256("\n".join(ordered).encode()).hexdigest()[:16])


def members_by_group(groups: int, index: Mapping[str, int]) -> tuple[Members, ...]:
    """Return, for each of `groups` groups, its parameters as a manifest records them."""
    names: list[list[str]] = [[] for _ in range(groups)]
    for name, number in index.items():
        names[number].append(name)
    return tuple(map(Members.of, names))


def groups_to_json(values: GroupValues, members: Sequence[Members]) -> list[dict[str, Any]]:
    """Return the non-empty groups of a step in the form that its manifest records."""
    return [
        {"parameters": names_of_group.count, "members": names_of_group.digest, "lr": rate}
        | {key: getattr(optimizer, key) for key in group_fields(optimizer) if key != "lr"}
        for names_of_group, rate, optimizer in zip(
            members, values.rates, values.optimizers, strict=True
        )
        if names_of_group.count
    ]


def changed_members(recorded: Any, now: Sequence[Mapping[str, Any]]) -> str:
    """Describe how the assignment of parameters to groups differs from that in a manifest.

    The result is empty if it does not differ, or if nothing was recorded.
    """
    if not isinstance(recorded, list):
        return ""
    try:
        before = [(int(group["parameters"]), str(group["members"])) for group in recorded]
    except (KeyError, TypeError, ValueError):
        return "the parameter groups of the last step cannot be read"
    after = [(int(group["parameters"]), str(group["members"])) for group in now]
    if sorted(before) == sorted(after):
        return ""

    def sizes(groups: Sequence[tuple[int, str]]) -> str:
        return ", ".join(str(count) for count, _ in groups)

    return (
        f"other parameter groups than in the last step: of {sizes(after)} tensors instead of "
        f"{sizes(before)}"
    )
