"""Line charts as PNG or SVG, through matplotlib where it is installed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lohan.errors import ConfigError

SUFFIXES = (".png", ".svg", ".pdf")
COLOURS = ("#0b6e99", "#d1495b", "#e09f3e", "#5b8e7d", "#7d5ba6", "#6c757d", "#3d405b", "#bc4b51")
INK, GRID = "#22262b", "#d9dde1"
OUR_OWN = {"auto": "#111111", "lohan": COLOURS[0]}


@dataclass(frozen=True)
class Line:
    """Values by position; None: it does not run there. `published`: dashed, hollow, behind the
    line of the same label."""

    label: str
    values: Sequence[float | None]
    published: bool = False


def draw(path: Path, title: str, at: Sequence[str], lines: Sequence[Line], *, unit: str) -> None:
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--plot {path}: the file must end in {', '.join(SUFFIXES)}")
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(7.2, 4.4), constrained_layout=True)
    chart(axes, title, at, lines, unit=unit)
    save(figure, path)
    plt.close(figure)


def chart(axes: Any, title: str, at: Sequence[str], lines: Sequence[Line], *, unit: str) -> None:
    """Into axes of a figure that may hold several."""
    colours = _colours([line.label for line in lines])
    for line in lines:
        points = [(x, y) for x, y in enumerate(line.values) if y is not None]
        style: dict[str, Any] = {"color": colours[line.label], "marker": "o"}
        if line.published:
            style |= {"linestyle": (0, (4, 2)), "linewidth": 1.2, "markerfacecolor": "white"}
            style |= {"markersize": 5, "zorder": 2, "alpha": 0.9}
        else:
            style |= {"linewidth": 2.0, "markersize": 5.5, "zorder": 3}
        if points:
            xs, ys = zip(*points, strict=True)
            axes.plot(xs, ys, label=None if line.published else line.label, **style)
    if any(line.published for line in lines):
        axes.plot([], [], color=INK, linestyle=(0, (4, 2)), linewidth=1.2, marker="o",
                  markerfacecolor="white", markersize=5, label="published")  # fmt: skip
    axes.set_title(title, loc="left", fontsize=11, color=INK, fontweight="bold")
    axes.set_ylabel(unit, color=INK)
    axes.set_xticks(range(len(at)), at)
    axes.set_xlim(-0.3, len(at) - 0.7)
    highest = max((y for line in lines for y in line.values if y is not None), default=1.0)
    axes.set_ylim(0, 1.08 * highest)
    _plain(axes)


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=160, facecolor="white")


def new_figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """A figure and its axes, as matplotlib gives them."""
    figure, axes = _pyplot().subplots(
        rows, columns, figsize=size, constrained_layout=True, squeeze=False
    )
    return figure, axes


def _plain(axes: Any) -> None:
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.tick_params(colors=INK, length=0, labelsize=9)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK)


def _colours(labels: Sequence[str]) -> dict[str, str]:
    rest = iter([c for c in COLOURS if c not in OUR_OWN.values()] * len(labels))
    names = dict.fromkeys(labels)
    return {name: OUR_OWN.get(name) or next(rest) for name in names}


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed; `pip install 'lohan[plot]'`"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
