"""Which generation is current: the manifest and checksums, in memory and on disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lohan.store.files import MANIFEST, PREPARED, SUMS, rename_durably
from lohan.store.manifest import COMMITS, Manifest, Sums, commit_number, write_manifest, write_sums
from lohan.store.volume import Volume

Meet = Callable[[], None]


class Ledger:
    """`manifest` and `sums` describe the committed generation as this process knows it. `meet`
    returns when the other ranks have prepared a commit too, where there are others."""

    meet: Meet | None = None

    def __init__(self, volume: Volume, manifest: Manifest, sums: Sums) -> None:
        self._volume, self._primary = volume, volume.dirs[0]
        self.manifest, self.sums = manifest, sums

    @property
    def generation(self) -> int:
        return self.manifest.generation

    @property
    def meta(self) -> dict[str, Any]:
        return self.manifest.meta

    def slot_of(self, generation: int) -> int:
        return generation % self._volume.slots

    def commit_durably(self, *, generation: int, meta: dict[str, Any], sums: Sums | None) -> None:
        """Data, then checksums, then the manifest; each durable before the next begins.
        Without `sums` the data and checksums on disk are already right."""
        crc = self.manifest.sums_crc32c
        if sums is not None:
            slot = self.slot_of(generation)
            self._volume.sync(slot)
            crc = write_sums(self._primary / SUMS[slot], sums)
        manifest = replace(
            self.manifest, generation=generation, meta=meta, clean=True, sums_crc32c=crc
        )
        if self.meet is None:
            write_manifest(self._primary, manifest)
        else:
            manifest = self._commit_together(manifest, self.meet)
        self.manifest = manifest

    def _commit_together(self, manifest: Manifest, meet: Meet) -> Manifest:
        """In two phases: see agreement.py."""
        number = commit_number(self.manifest) + 1
        manifest = replace(manifest, meta={**manifest.meta, COMMITS: number})
        write_manifest(self._primary, manifest, name=PREPARED)
        meet()
        rename_durably(self._primary / PREPARED, self._primary / MANIFEST)
        return manifest

    def commit_in_memory(self, *, generation: int, meta: dict[str, Any]) -> None:
        self.manifest = replace(self.manifest, generation=generation, meta=meta)

    def mark_dirty(self) -> None:
        """Durable before the first byte is written in place."""
        manifest = replace(self.manifest, clean=False)
        write_manifest(self._primary, manifest)
        self.manifest = manifest


def first_ledger(
    volume: Volume, *, uuid: str, durability: str, generation: int, meta: dict[str, Any], sums: Sums
) -> Ledger:
    """Of a store that is being created; its manifest is not on disk before the first commit."""
    manifest = Manifest(
        uuid=uuid,
        generation=generation,
        durability=durability,
        clean=False,
        count=len(volume.dirs),
        layout_sha256=volume.layout.digest(),
        sums_crc32c=0,
        meta=meta,
    )
    return Ledger(volume, manifest, sums)
