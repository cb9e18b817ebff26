"""What all dashboards share: panels, variables and links."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import prometheus, stat, timeseries
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models

from monitoring import promql

TAG = "sglang-dflash"
WIDTH = 24
NO_TRAFFIC = "no traffic"

_DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
_EVERY_ENGINE = "sglang:max_total_num_tokens"  # a constant of each running engine

AnyPanel: TypeAlias = "timeseries.Panel | stat.Panel"
_Panel = TypeVar("_Panel", timeseries.Panel, stat.Panel)


@dataclass(frozen=True)
class Query:
    """One query of a panel and the name of its series (`legend`, with labels in double braces)."""

    expr: str
    legend: str = ""
    stacked: bool = False


def graph(
    title: str,
    *queries: Query,
    unit: str,
    means: str,
    do: str,
    width: int = 8,
    none: str = NO_TRAFFIC,
    lowest: float | None = 0,
    highest: float | None = None,
) -> timeseries.Panel:
    """Return a panel of lines over time.

    Args:
        title: Its title.
        queries: What it shows.
        unit: Grafana's name of the unit.
        means: What the lines say; part of the description.
        do: What to do about it; part of the description.
        width: In columns of `WIDTH`.
        none: What to show where nothing applies.
        lowest: Where the axis begins.
        highest: Where the axis ends.
    """
    panel = (
        timeseries.Panel()
        .fill_opacity(0)
        .show_points(common.VisibilityMode.NEVER)
        .legend(
            common_builders.VizLegendOptions()
            .show_legend(True)
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .calcs([])
        )
        .tooltip(common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    )
    stacking = common_builders.StackingConfig().mode(common.StackingMode.NORMAL).group("A").build()
    for i, query in enumerate(queries):
        if query.stacked:
            panel.override_by_query(
                _ref_id(i),
                [
                    models.DynamicConfigValue("custom.stacking", stacking),
                    models.DynamicConfigValue("custom.fillOpacity", 40),
                ],
            )
    if lowest is not None:
        panel.min(lowest)
    if highest is not None:
        panel.max(highest)
    return _described(panel, title, queries, unit, means, do, none).span(width).height(8)


def tile(
    title: str,
    *queries: Query,
    unit: str,
    means: str,
    do: str,
    width: int = 4,
    none: str = NO_TRAFFIC,
    colors: Mapping[float | None, str] | None = None,
    text: common.BigValueTextMode = common.BigValueTextMode.AUTO,
    decimals: int | None = None,
) -> stat.Panel:
    """Return a panel with the latest value in large.

    With `colors` it has the color of the highest bound that it reaches; the first bound is None, for all below. `text`
    chooses between value and legend. The other arguments are those of `graph`.
    """
    steps = [models.Threshold(value=bound, color=color) for bound, color in (colors or {None: "text"}).items()]
    panel = (
        stat.Panel()
        .graph_mode(common.BigValueGraphMode.NONE)
        .color_mode(common.BigValueColorMode.VALUE if colors else common.BigValueColorMode.NONE)
        .text_mode(text)
        .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]).values(False).fields(""))
        .thresholds(builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
    )
    if decimals is not None:
        panel.decimals(decimals)
    return _described(panel, title, queries, unit, means, do, none).span(width).height(4)


def _described(
    panel: _Panel, title: str, queries: Sequence[Query], unit: str, means: str, do: str, none: str
) -> _Panel:
    names = dict.fromkeys(name for query in queries for name in promql.metrics(query.expr))
    description = f"{means}\n\n{do}\n\nMetrics: {', '.join(f'`{name}`' for name in names)}."
    panel.title(title).description(description).datasource(_DATASOURCE).unit(unit).no_value(none)
    for i, query in enumerate(queries):
        target = prometheus.Dataquery().expr(query.expr).range().ref_id(_ref_id(i)).datasource(_DATASOURCE)
        panel.with_target(target.legend_format(query.legend or "__auto"))
    return panel


def _ref_id(number: int) -> str:
    return "ABCDEFGH"[number]


def _variable(name: str, label: str, metric: str, matchers: Sequence[str]) -> builders.QueryVariable:
    query = f"label_values({metric}{{{','.join(matchers)}}}, {label})"
    return (
        builders.QueryVariable(name)
        .label(name)
        .datasource(_DATASOURCE)
        .query({"query": query, "refId": "variable"})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
    )


def _variables() -> list[builders.QueryVariable | builders.DatasourceVariable]:
    """Return the variables of every dashboard: data source, namespace, release, model and pod."""
    namespace, release, model = 'namespace=~"$namespace"', 'release=~"$release"', 'model_name=~"$model"'
    datasource = builders.DatasourceVariable("datasource").label("data source").type("prometheus")
    return [
        datasource.current(models.VariableOption(selected=True, text="default", value="default")),
        _variable("namespace", "namespace", _EVERY_ENGINE, ()),
        _variable("release", "release", _EVERY_ENGINE, (namespace,)),
        _variable("model", "model_name", _EVERY_ENGINE, (namespace, release)),
        _variable("pod", "pod", _EVERY_ENGINE, (namespace, release, model)),
    ]


def pool_variable() -> builders.QueryVariable:
    """Return a variable of the pools that the selected engines have, to repeat panels by."""
    matchers = promql.ENGINE.split(",")
    return _variable("pool", "pool", "sglang_dflash_pool_size_slots", matchers)


def slo_variable(name: str, bounds_seconds: Sequence[str], chosen: str) -> builders.CustomVariable:
    """Return a variable for the bound of a latency objective; only bounds of the histogram's buckets can be counted."""
    options = [models.VariableOption(selected=bound == chosen, text=bound, value=bound) for bound in bounds_seconds]
    variable = builders.CustomVariable(name).label(f"{name.removeprefix('slo_').replace('_', ' ')} within, s")
    return variable.values(",".join(bounds_seconds)).options(options).current(next(o for o in options if o.selected))


def dashboard(
    name: str,
    description: str,
    rows: Mapping[str, Sequence[AnyPanel]],
    *more_variables: builders.QueryVariable | builders.CustomVariable,
) -> builders.Dashboard:
    """Return a dashboard with the shared variables and more, and with links to the others.

    Its uid is made of its name and its panels are numbered, so that links and bookmarks last.
    """
    links = (
        builders.DashboardLink("Dashboards")
        .type(models.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .include_vars(True)
        .keep_time(True)
        .as_dropdown(False)
    )
    board = (
        builders.Dashboard(f"SGLang DFLASH / {name}")
        .uid(f"sglang-dflash-{name.lower()}")
        .description(description)
        .tags([TAG])
        .editable()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .variables([*_variables(), *more_variables])
        .link(links)
    )
    ids = itertools.count(1)
    for title, panels in rows.items():
        board.with_row(builders.Row(title).id(next(ids)))
        for panel in panels:
            board.with_panel(panel.id(next(ids)))
    return board
