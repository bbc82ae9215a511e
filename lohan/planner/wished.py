"""What blocks keep where the user has decided how that is chosen: the simulator's own policies,
asked of the blocks at hand and of the host memory that the plan leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lohan.config_parse import ACTIVATIONS
from lohan.errors import ConfigError
from lohan.model.demand import Load
from lohan.model.machine import Profile
from lohan.model.plan import Kept, Plan
from lohan.model.shapes import ModelShape
from lohan.planner.activations import site_works
from lohan.planner.memory import Books
from lohan.planner.moments import INPUTS
from lohan.planner.policies_activations_part import INPUT_COPIES, Step, choose, input_bytes

ALIASES = {"recompute": "static", "inputs": "static", "all": "g10"}
# A machine that is not known: of one speed and without a link, where the choices do not depend on
# how fast it is.
_ANY = Profile(name="any", device="cpu", compute=((1.0, 1e9),), host_bytes=0, adam=1e9)


def kept_by(
    wish: str | Kept, books: Books, load: Load | None, plan: Plan, *, limit: int,
    profile: Profile | None,
) -> Kept | None:  # fmt: skip
    """Classes and the blocks that keep them; None: whatever is best. `plan` has no activations yet,
    and `limit` is all of host memory."""
    if isinstance(wish, tuple):
        _check_known(wish, load)
        return wish
    if wish not in ACTIVATIONS:
        raise ConfigError(f"activations: {wish!r}; choose {', '.join(ACTIVATIONS)}")
    if wish == "holistic" or load is None or not books.block_sites:
        return None
    policy = ALIASES.get(wish, wish)
    blocks = tuple(load.shapes[name] for name in books.block_sites)
    model = ModelShape(
        name="traced", hidden=load.hidden, vocabulary=load.vocabulary, blocks=blocks,
        embedding_parameters=0, head_parameters=0,
    )  # fmt: skip
    step = _step(policy, model, books, load, plan, limit, profile or _ANY)
    chosen = choose(policy, step, model, tokens=load.tokens, seq=load.seq)
    return by_class(chosen.classes, [part.name for part in blocks[0].by_benefit(load.seq)])


def _check_known(wish: Kept, load: Load | None) -> None:
    shapes = load.shapes.values() if load is not None else ()
    known = {part.name for shape in shapes for part in shape.activations}
    if unknown := [name for name, _ in wish if name not in known]:
        raise ConfigError(
            f"activations: no block of this model keeps {unknown[0]!r}; `lohan plan "
            "--activations` lists the classes of a model folder"
        )


def by_class(classes: Sequence[frozenset[str]], first: Sequence[str] = ()) -> Kept:
    """Blocks of each class, from the classes of each block; those of `first` in its order."""
    names = dict.fromkeys([*first, *(name for kept in classes for name in sorted(kept))])
    found = {name: tuple(n for n, kept in enumerate(classes) if name in kept) for name in names}
    return tuple(
        (name, len(blocks) if len(blocks) == len(classes) else blocks)
        for name, blocks in found.items()
        if blocks
    )


def _step(
    policy: str, model: ModelShape, books: Books, load: Load, plan: Plan, limit: int,
    profile: Profile,
) -> Step:  # fmt: skip
    """The terms of the paper's T_iter, for this run: all weights and state from SSD."""
    mode, width = books.mode, books.mode.weight_bytes
    count = float(sum(group.numel for group in books.moving))
    bare = replace(plan, kept=(), moved_out=())
    everything = by_class([frozenset(a.name for a in block.activations) for block in model.blocks])
    works = site_works(books, load, replace(bare, kept=everything)).values()
    inputs = input_bytes(model, load.tokens, width)
    room = limit - books.rest_bytes(bare) - books.activations(bare)[INPUTS] + inputs
    return Step(
        profile=profile, forward_s=sum(work.forward_s(profile) for work in works),
        backward_s=sum(work.backward_s(profile) for work in works), weights=count * width,
        gradients=count * books.gradient_width, weights_read=count * width,
        state_read=count * mode.state_bytes, state_written=count * (mode.state_bytes + width),
        room=max(0.0, room - (INPUT_COPIES.get(policy, 1) - 1) * inputs), width=width,
        slices=books.slices,
    )  # fmt: skip
