"""Which sites could keep activations, which classes of them a plan keeps, and their bytes."""

from __future__ import annotations

from dataclasses import replace

from lohan.model.demand import Footprint, Load, SiteFootprint
from lohan.model.plan import Kept
from lohan.model.shapes import BlockShape

PADDING = 2**16  # of the tensors of one site, when they are packed


class KeptSizes:
    """Of one model, batch and micro-batch. `width`: bytes of an element. What is asked of one
    choice is asked many times, so all answers are remembered by choice."""

    def __init__(self, load: Load | None, found: Footprint | None, *, width: int) -> None:
        self._load, self._width = load, width
        self._found = found or Footprint()
        shapes = load.shapes if load is not None else {}
        names = [name for name in self._found.sites if name in shapes]
        # Sites whose activations may be kept, in order of forward, and those without a backward.
        self.names = [name for name in names if name not in self._found.still]
        self.still = [name for name in names if name in self._found.still]
        kinds: dict[BlockShape, int] = {}
        self.kind = {  # sites of one kind differ in their names only
            name: kinds.setdefault(replace(shapes[name], name=""), len(kinds))
            for name in self.names
        }
        self._number = {name: i for i, name in enumerate(self.names)}
        self._classes: dict[Kept, list[frozenset[str]]] = {}
        self._bytes: dict[Kept, list[int]] = {}

    def classes(self, kept: Kept) -> list[frozenset[str]]:
        """Classes that each site keeps. Where the plan says how many sites keep a class, those that
        do are spread evenly: the lanes are loaded evenly then."""
        if kept not in self._classes:
            self._classes[kept] = self._spread(kept)
        return self._classes[kept]

    def _spread(self, kept: Kept) -> list[frozenset[str]]:
        total = len(self.names)
        everywhere = frozenset(kind for kind, which in kept if which == total)
        rest = [(kind, which) for kind, which in kept if which != total]
        if not rest:
            return [everywhere] * total
        made: dict[tuple[str, ...], frozenset[str]] = {}  # equal sets are one object
        found = []
        for n in range(total):
            own = tuple(
                kind
                for kind, which in rest
                if (n in which if isinstance(which, tuple) else n * which % total < which)
            )
            found.append(made.setdefault(own, everywhere.union(own)))
        return found

    def classes_of(self, kept: Kept, name: str) -> frozenset[str]:
        return self.classes(kept)[self._number[name]]

    def by_site(self, kept: Kept) -> list[int]:
        """That each site keeps, for the whole batch, beside its inputs."""
        if kept not in self._bytes:
            self._bytes[kept] = self._sums(self.classes(kept))
        return self._bytes[kept]

    def _sums(self, classes: list[frozenset[str]]) -> list[int]:
        load = self._load
        if load is None:
            return []
        if load.stored is not None:
            return [load.stored(name, own) for name, own in zip(self.names, classes, strict=True)]
        pairs = list(zip(self.kind.values(), classes, strict=True))
        known: dict[tuple[int, frozenset[str]], int] = {}
        for name, pair in zip(self.names, pairs, strict=True):
            if pair not in known:
                known[pair] = self.bytes_with(name, pair[1]) - self.footprint(name).input_bytes
        return [known[pair] for pair in pairs]

    def bytes_of(self, kept: Kept, name: str) -> int:
        number = self._number.get(name)
        return 0 if number is None else self.by_site(kept)[number]

    def bytes_with(self, name: str, classes: frozenset[str]) -> int:
        """Input of one site, and these classes of its activations."""
        load = self._load
        assert load is not None
        inputs = self.footprint(name).input_bytes
        if load.stored is not None:
            return inputs + load.stored(name, classes)
        parts = load.shapes[name].activations
        elements = sum(part.elements for part in parts if part.name in classes)
        return inputs + int(elements * load.tokens * self._width)

    def site_bytes(self, kept: Kept, name: str) -> int:
        """Input and kept activations of one site, for the whole batch."""
        return self.footprint(name).input_bytes + self.bytes_of(kept, name) + PADDING

    def footprint(self, name: str) -> SiteFootprint:
        return self._found.sites[name]
