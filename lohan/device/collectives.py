"""Calls that all ranks of a process group make together, by the names that this torch has for them.

They are done when they return: tensors of an accelerator too.
"""

from __future__ import annotations

from typing import Any

import torch

from lohan.errors import ConfigError


def distributed() -> Any:
    """torch.distributed, which a process that is alone does not import."""
    import torch.distributed

    if not torch.distributed.is_available():
        raise ConfigError("this build of torch has no torch.distributed; several ranks need it")
    return torch.distributed


def gather(whole: torch.Tensor, piece: torch.Tensor, group: Any) -> None:
    """Every rank's piece, one after the other; `piece` may be this rank's part of `whole`."""
    found = getattr(distributed(), "all_gather_single", None)
    found = found or distributed().all_gather_into_tensor
    found(whole, piece, group=group)
    _settle(whole)


def summed(rows: torch.Tensor, group: Any) -> torch.Tensor:
    """Row r of every rank's `rows`, added up, for rank r. In the order of the ranks on the CPU: the
    same bits whoever is early. Accelerators have an order of their own."""
    if rows.device.type == "cpu":
        heard = torch.empty_like(rows)
        distributed().all_to_all_single(heard.view(-1), rows.view(-1), group=group)
        total = heard[0]
        for row in heard[1:]:
            total += row
        return total
    total = torch.empty_like(rows[0])
    found = getattr(distributed(), "reduce_scatter_single", None)
    found = found or distributed().reduce_scatter_tensor
    found(total, rows.view(-1), group=group)
    _settle(total)
    return total


def backend_for(place: torch.device) -> str:
    if place.type == "cpu":
        return "gloo"
    found: str = distributed().get_default_backend_for_device(place)
    return found


def _settle(tensor: torch.Tensor) -> None:
    """What was given to the lane's stream is done."""
    if tensor.device.type != "cpu":
        torch.accelerator.current_stream(tensor.device).synchronize()
