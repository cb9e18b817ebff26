"""The dashboards as Grafana gets them, and their queries as Prometheus gets them."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from monitoring.__main__ import CHART, DASHBOARDS
from monitoring.promql import filled

BOARDS: dict[str, dict[str, Any]] = {
    name: json.loads((CHART / "dashboards" / f"{name}.json").read_text()) for name in DASHBOARDS
}
ALL = {"namespace": ".*", "release": ".*", "model": ".*", "pod": ".*", "pool": ".*"}
# Queries of panels that are rightly empty under normal load, and in which stage they are not.
ELSEWHERE = {
    "overview: Requests: B": "stalled",
    "pools: Time until full: A": "eviction",
    "pools: Retracted requests: B": "full",
    "pools: Taken from the prefix cache: B": "tight",
}
OBJECTIVES = {"slo_first_token": "2.0", "slo_token": "0.1"}


@dataclass(frozen=True)
class PanelQuery:
    """One query of a panel as it stands in a dashboard."""

    board: str
    panel: str
    ref_id: str
    expr: str
    legend: str

    @property
    def name(self) -> str:
        return f"{self.board}: {self.panel}: {self.ref_id}"

    def asked(self, selected: Mapping[str, str], *, rate_interval: str, range_: str) -> str:
        """Return what Grafana asks Prometheus with these variables, everything else selected."""
        expr = filled(self.expr, rate_interval=rate_interval, range_=range_)
        for variable, value in (ALL | OBJECTIVES | dict(selected)).items():
            expr = expr.replace(f"${variable}", value)
        return expr


def panels(board: str) -> Iterator[dict[str, Any]]:
    """Yield the panels of a dashboard but for its rows."""
    yield from (panel for panel in BOARDS[board]["panels"] if panel["type"] != "row")


def queries() -> list[PanelQuery]:
    """Return every query of every panel."""
    return [
        PanelQuery(board, panel["title"], target["refId"], target["expr"], target["legendFormat"])
        for board in BOARDS
        for panel in panels(board)
        for target in panel["targets"]
    ]
