"""Draws a dashboard's panels from recorded data, about as Grafana would."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator
from PIL import Image

from boards import BOARDS, PanelQuery
from monitoring.panels import WIDTH
from prometheus import Prometheus

INK, PAPER, PANEL, MUTED = "#d8d9da", "#111217", "#181b1f", "#8e8e8e"
COLORS = ("#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#b877d9", "#5794f2", "#fade2a")
INCHES_A_COLUMN, INCHES_A_ROW = 0.62, 0.27
DOTS_AN_INCH, COLORS_OF_A_FILE = 110, 64


def amount(value: float, unit: str) -> str:
    """Return a value in a unit of Grafana's, in short."""
    if unit == "percentunit":
        return f"{100 * value:.3g}%"
    if unit in ("bool_on_off", "bool_yes_no"):
        return dict(bool_on_off=("Off", "On"), bool_yes_no=("No", "Yes"))[unit][value > 0]
    if unit == "bytes":
        return next(
            f"{value / 2**p:.3g} {name}B"
            for p, name in ((30, "Gi"), (20, "Mi"), (10, "Ki"), (0, ""))
            if value >= 2**p or not p
        )
    if unit == "s" and 0 < abs(value) < 1:
        return f"{1000 * value:.3g} ms"
    suffix = {"s": " s", "reqps": " req/s", "cps": "/s"}.get(unit, "")
    return (f"{value / 1000:.3g}k" if abs(value) >= 10_000 else f"{value:.4g}") + suffix


def draw(board: str, prometheus: Prometheus, selected: Mapping[str, str], start: float, end: float, file: Path) -> None:
    """Draw all panels of a dashboard for a stretch of time; a repeated panel once for each value of its variable."""
    shown = _placed(board, prometheus, selected, end)
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in shown)
    figure = pyplot.figure(figsize=(WIDTH * INCHES_A_COLUMN, height * INCHES_A_ROW), facecolor=PAPER)
    for panel in shown:
        place = panel["gridPos"]
        x, y, w, h = place["x"] / WIDTH, 1 - (place["y"] + place["h"]) / height, place["w"] / WIDTH, place["h"] / height
        if panel["type"] == "row":
            figure.text(x + 0.004, y + h / 2, panel["title"], color=INK, fontsize=10, weight="bold", va="center")
            continue
        frame = figure.add_axes((x + 0.002, y + 0.02 / height, w - 0.004, h - 0.15 / height), facecolor=PANEL)
        frame.set(xticks=[], yticks=[])
        frame.spines[:].set_visible(False)
        figure.text(x + 0.007, y + h - 0.7 / height, panel["title"], color=INK, fontsize=8, va="center")
        series = _series(panel, prometheus, selected | panel["selected"], start, end)
        if not series:
            none = panel["fieldConfig"]["defaults"]["noValue"]
            frame.text(0.5, 0.42, none, color=MUTED, fontsize=9, ha="center", va="center")
        elif panel["type"] == "stat":
            _tile(frame, panel, series)
        else:
            inside = figure.add_axes((x + 0.034, y + 2.3 / height, w - 0.042, h - 3.8 / height), facecolor=PANEL)
            _graph(inside, panel, series, start, end)
            inside.legend(
                loc="upper left",
                bbox_to_anchor=(-0.03 / (w - 0.042), -0.13),
                ncol=max(1, min(4, place["w"] // 3)),
                fontsize=6.5,
                frameon=False,
                labelcolor=INK,
            )
    figure.savefig(file, dpi=DOTS_AN_INCH, facecolor=PAPER)
    pyplot.close(figure)
    with Image.open(file) as image:
        image.convert("RGB").quantize(COLORS_OF_A_FILE).save(file, optimize=True)


def _placed(board: str, prometheus: Prometheus, selected: Mapping[str, str], at: float) -> list[dict[str, Any]]:
    found = []
    for panel in BOARDS[board]["panels"]:
        if "repeat" not in panel or not panel["repeat"]:
            found.append({**panel, "selected": {}})
            continue
        size = f'sglang_dflash_pool_size_slots{{pod=~"{selected["pod"]}"}}'
        names = sorted({series["metric"]["pool"] for series in prometheus.instant(size, at)})
        width = WIDTH // len(names)
        for i, name in enumerate(names):
            place = {**panel["gridPos"], "x": i * width, "w": width}
            title = panel["title"].replace("$pool", name)
            found.append({**panel, "title": title, "gridPos": place, "selected": {"pool": name}})
    return found


def _series(
    panel: Mapping[str, Any], prometheus: Prometheus, selected: Mapping[str, str], start: float, end: float
) -> list[tuple[str, str, list[float], list[float]]]:
    """Return query, legend, times and values of each series."""
    found = []
    for target in panel["targets"]:
        query = PanelQuery("", "", target["refId"], target["expr"], target["legendFormat"])
        asked = query.asked(selected, rate_interval="8s", range_=f"{int(end - start)}s")
        for series in prometheus.over(asked, start, end):
            legend = query.legend
            for label, value in series["metric"].items():
                legend = legend.replace(f"{{{{{label}}}}}", value)
            times, values = zip(*((time, float(value)) for time, value in series["values"]), strict=True)
            found.append((target["refId"], legend[:60], list(times), list(values)))
    return found


def _tile(frame: Axes, panel: Mapping[str, Any], series: list[tuple[str, str, list[float], list[float]]]) -> None:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    names_only = panel["options"]["textMode"] == "name"
    for i, (_, legend, _, values) in enumerate(series):
        steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        color = [step["color"] for step in steps if step.get("value") is None or step["value"] <= values[-1]][-1]
        coloured = panel["options"]["colorMode"] == "value"
        text = legend if names_only else amount(values[-1], unit)
        x = (i + 0.5) / len(series)
        size = 9 if names_only else 15
        frame.text(
            x,
            0.4,
            text,
            color=color if coloured else INK,
            fontsize=size,
            ha="center",
            va="center",
            transform=frame.transAxes,
        )
        if len(series) > 1 and not names_only:
            frame.text(x, 0.1, legend, color=MUTED, fontsize=7, ha="center", va="center", transform=frame.transAxes)


def _graph(
    axes: Axes,
    panel: Mapping[str, Any],
    series: list[tuple[str, str, list[float], list[float]]],
    start: float,
    end: float,
) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    stacked = {
        override["matcher"]["options"]
        for override in panel["fieldConfig"]["overrides"]
        if any(value["id"] == "custom.stacking" for value in override["properties"])
    }
    base: dict[float, float] = {}
    for i, (ref_id, legend, times, values) in enumerate(series):
        color = COLORS[i % len(COLORS)]
        if ref_id in stacked:
            below = [base.get(time, 0.0) for time in times]
            values = [value + under for value, under in zip(values, below, strict=True)]
            base.update(zip(times, values, strict=True))
            axes.fill_between(times, below, values, color=color, alpha=0.4, linewidth=0)
        axes.plot(times, values, color=color, linewidth=1, label=legend)
    axes.set_xlim(start, end)
    low, high = axes.get_ylim()
    axes.set_ylim(defaults.get("min", low), defaults.get("max", high if high > defaults.get("min", low) else low + 1))
    axes.spines[:].set_visible(False)
    axes.grid(color="#2c3235", linewidth=0.5)
    axes.tick_params(colors=MUTED, labelsize=6.5, length=0)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: amount(value, defaults["unit"])))
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda time, _: datetime.fromtimestamp(time, UTC).strftime("%H:%M:%S"))
    )
