"""The loss curves, in the terminal and as a picture. Both need the extra `demo`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from ckpt.errors import DestinationExistsError, UsageError
from cli.demo.results import Limits, Run

_MARKERS = ("o", "x", "+", "*", "^", "#")
_INSTALL = "pip install 'hyperopt-ckpt[demo]'"


def check_picture(path: Path) -> None:
    """Refuse, before anything runs, a picture that could not be written in the end."""
    if find_spec("matplotlib") is None:
        raise UsageError(f"--plot needs matplotlib, which is not installed: {_INSTALL}")
    if path.exists():
        raise DestinationExistsError(f"--plot: {path} exists; nothing is overwritten")
    if not path.parent.is_dir():
        raise UsageError(f"--plot: there is no directory {path.parent}")


def terminal_plot(runs: Sequence[Run], killed: Mapping[int, float], width: int) -> str:
    """The curves as text of `width` columns; a hint where plotext is not installed."""
    if find_spec("plotext") is None:
        return f"(a plot of the curves appears here with plotext: {_INSTALL})"
    import plotext

    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, 20)
    figure.title("loss (nats per byte) by step: the curves should lie on top of each other")
    reference = runs[0].losses
    figure.legend(x=max(reference), y=max(reference.values()), ha="right", relative=True)
    curves = [(run.label, run.losses) for run in runs]
    for (label, losses), marker in zip([*curves, ("killed", killed)], _MARKERS, strict=False):
        signal = figure.signal(list(losses), list(losses.values()), marker=marker)
        signal.label(label)
        figure.draw(signal)
    return str(plotext.uncolorize(str(figure.build())))


def save_picture(path: Path, runs: Sequence[Run], killed: Mapping[int, float]) -> None:
    """Two panels: the loss of each run, and its distance from the uninterrupted one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7), layout="constrained")
    loss, distance = figure.subplots(2, 1, sharex=True)
    for number, run in enumerate(runs):
        colour = f"C{number}"
        loss.plot(list(run.losses), list(run.losses.values()), colour, label=run.label)
        gap = {k: abs(value - runs[0].losses[k]) for k, value in run.losses.items()}
        distance.plot(list(gap), list(gap.values()), colour, label=run.label)
    loss.plot(list(killed), list(killed.values()), "k--", label="killed")
    loss.set_ylabel("loss (nats per byte)")
    loss.legend()
    distance.axhline(Limits().loss_difference, color="grey", linestyle=":")
    distance.set_yscale("symlog", linthresh=1e-7)
    distance.set_ylabel("distance from the uninterrupted run (dotted: limit)")
    distance.set_xlabel("step")
    figure.savefig(path, dpi=120)
