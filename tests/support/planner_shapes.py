"""Small models and a plain machine for tests of policies."""

from __future__ import annotations

from lohan.model.machine import Drive, Profile
from lohan.model.shapes import Activation, BlockShape, ModelShape

HIDDEN = 100
DRIVE = Drive(name="drive", read=4e9, write=2e9, bytes=10**12)


def machine(**changes) -> Profile:
    given = {
        "name": "plain",
        "device": "gpu",
        "device_bytes": 10**10,
        "compute": ((1024.0, 1e13),),
        "h2d": 1e10,
        "d2h": 1e10,
        "host_bytes": 10**12,
        "adam": 1e9,
        "drives": (DRIVE,),
    }
    return Profile(**{**given, **changes})


def model(
    layers: int = 3, classes: tuple[tuple[float, float], ...] = ((400.0, 8e6), (100.0, 1e5))
) -> ModelShape:
    """`classes`: elements and FLOPs per token of each class of activations."""
    parts = tuple(Activation(f"a{n}", size, flops) for n, (size, flops) in enumerate(classes))
    flops = sum(part.flops for part in parts) + 2e6
    blocks = tuple(
        BlockShape(f"layers.{n}", 10**7, HIDDEN, flops, 0.0, parts) for n in range(layers)
    )
    return ModelShape(
        name="small",
        hidden=HIDDEN,
        vocabulary=1000,
        blocks=blocks,
        embedding_parameters=HIDDEN * 1000,
        head_parameters=0,
        tied=True,
    )
