"""A model shape as the planner sees a real model: groups, sites, and the footprint of a batch."""

from __future__ import annotations

from lohan.model.demand import Footprint, Load, SiteFootprint
from lohan.model.layout import GROUP_ALIGN, RESIDENT, Blocks, Group, Site
from lohan.model.shapes import ModelShape
from lohan.model.state import MODES
from lohan.util.units import align_up

EMBEDDING, HEAD = "embedding", "head"


def layout_of(model: ModelShape) -> Blocks:
    """Embedding, blocks and head as groups and sites; a tied head is a second site of the
    embedding."""
    groups = [_group(EMBEDDING, model.embedding_parameters)]
    sites = [Site(EMBEDDING, (), (EMBEDDING,))]
    for number, block in enumerate(model.blocks):
        groups.append(_group(_block(number), block.parameters))
        sites.append(Site(_block(number), (), (_block(number),)))
    if model.head_parameters:
        groups.append(_group(HEAD, model.head_parameters))
    if model.vocabulary:
        sites.append(Site(HEAD, (), (HEAD if model.head_parameters else EMBEDDING,)))
    if model.resident_parameters:
        groups.append(_group(RESIDENT, model.resident_parameters))
    return Blocks(tuple(g for g in groups if g.numel), tuple(_real(sites, groups)), ())


def load_of_shape(model: ModelShape, *, batch: int, seq: int, mode: str) -> Load:
    """What a batch asks for, from the shape alone."""
    width = MODES[mode].weight_bytes
    seq = model.sample_tokens or seq

    def footprint(micro_batch: int) -> Footprint:
        found = {EMBEDDING: SiteFootprint(8 * batch * seq, 0)} if model.embedding_parameters else {}
        for number, block in enumerate(model.blocks):
            each = micro_batch * seq * width
            # The first gradients come while most activations are still there.
            first = block.parameters * width / 3 if micro_batch >= batch else 0
            inputs = int(block.input_elements * batch * seq * width)
            found[_block(number)] = SiteFootprint(
                inputs,
                int(block.work(model.temporaries) * each + first),
                int(block.widest * each),
                inputs,
            )
        return Footprint(found)

    return Load(
        batch=batch, seq=seq, measure=footprint, hidden=model.hidden, vocabulary=model.vocabulary,
        head_group=(HEAD if model.head_parameters else EMBEDDING) if model.vocabulary else None,
        text=not model.sample_tokens,
        shapes={_block(number): block for number, block in enumerate(model.blocks)},
    )  # fmt: skip


def _block(number: int) -> str:
    return f"block.{number}"


def _group(key: str, parameters: int) -> Group:
    return Group(key, (), align_up(parameters, GROUP_ALIGN))


def _real(sites: list[Site], groups: list[Group]) -> list[Site]:
    there = {group.key for group in groups if group.numel}
    return [site for site in sites if site.groups[0] in there]
