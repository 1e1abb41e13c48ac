"""Predicted against measured step times, drawn: both axes logarithmic, one color per source."""

from __future__ import annotations

from pathlib import Path

from axonn_tune.accuracy.steps import Predicted
from axonn_tune.errors import EnvironmentProblem


def draw(predictions: tuple[Predicted, ...], path: Path) -> None:
    """Write the figure in the format of the path's ending; EnvironmentProblem without matplotlib."""
    try:
        import matplotlib  # type: ignore[import-not-found,unused-ignore]
        from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise EnvironmentProblem("figures need matplotlib: pip install matplotlib") from error
    matplotlib.rcParams["svg.hashsalt"] = "axonn-tune"
    points = [one for one in predictions if one.error is not None]
    figure = Figure(figsize=(7, 7), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="measured, s", ylabel="predicted, s", aspect="equal")
    for source in sorted({one.row.dataset for one in points}):
        mine = [one for one in points if one.row.dataset == source]
        axes.scatter([one.row.step_s for one in mine], [one.predicted_s for one in mine], s=9, alpha=0.6, label=source)
    ends = [0.02, 1000.0]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    for share in (0.8, 1.25):
        axes.plot(ends, [share * end for end in ends], color="grey", linewidth=0.6, linestyle="--")
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
