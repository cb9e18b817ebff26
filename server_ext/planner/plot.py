"""A plan as a picture: the target's tokens and the bounded pool's headroom over the ratio."""

from __future__ import annotations

from pathlib import Path

from server_ext.errors import UserError
from server_ext.planner.plan import Plan


def check(path: Path) -> None:
    """Raise `UserError` unless a picture can be drawn and written there; costs no import of the engine."""
    try:
        from matplotlib import figure
    except ImportError as error:
        raise UserError("--plot needs matplotlib: pip install matplotlib") from error
    known = figure.Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise UserError(f"--plot {path}: the name must end in one of {', '.join(f'.{kind}' for kind in sorted(known))}")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--plot {path}: there is no folder {path.absolute().parent}")


def draw(plan: Plan, path: Path) -> None:
    """Write the picture; its kind is the suffix of the name. Call `check` first. Raises `UserError` if it cannot."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    started = [point for point in plan.points if point.sizes]
    bounded = [point for point in started if point.headroom_tokens is not None]
    axes.plot(
        [point.ratio for point in started],
        [point.sizes.target_tokens for point in started if point.sizes],
        marker="o",
        label="target tokens",
    )
    axes.plot(
        [point.ratio for point in bounded],
        [point.headroom_tokens or 0 for point in bounded],
        marker="o",
        label="headroom of the bounded pool, tokens",
    )
    if plan.smallest_ratio:
        axes.axvspan(0, plan.smallest_ratio, color="tab:red", alpha=0.15, label="too small for its requests")
    axes.axvline(plan.ratio, color="tab:green", linestyle="--", label=f"recommended: {plan.ratio:g}")
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=min([0, *(point.headroom_tokens or 0 for point in bounded)]))
    axes.set_xlabel(plan.knob.replace("_", " "))
    axes.set_ylabel("tokens")
    axes.set_title(f"{plan.options.max_running_requests} running requests, window {plan.options.draft_window_size}")
    axes.legend()
    try:
        figure.savefig(path)
    except OSError as error:
        raise UserError(f"--plot {path}: {error.strerror}") from error
