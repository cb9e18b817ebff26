"""Selectors of the queries, and what metrics a query names."""

import promql_parser

TARGET = 'namespace=~"$namespace",release=~"$release",pod=~"$pod"'
"""Selects by labels that the chart's monitors set, for metrics that know no model."""

ENGINE = TARGET + ',model_name=~"$model"'
"""Selects by the variables of a dashboard."""

RANKS = "without (tp_rank, pp_rank, moe_ep_rank)"
"""The ranks of an engine repeat a figure if all of them export it, so they are never added up."""


def each(metric: str, *matchers: str) -> str:
    """Return the query for a gauge, once for each engine."""
    return f"max {RANKS} ({metric}{{{','.join((ENGINE, *matchers))}}})"


def rate(metric: str, *matchers: str) -> str:
    """Return the query for a counter's rate a second, once for each engine."""
    return f"max {RANKS} (rate({metric}{{{','.join((ENGINE, *matchers))}}}[$__rate_interval]))"


def total(query: str, *labels: str) -> str:
    """Return the sum of a query over all but the labels."""
    return f"sum by ({', '.join(labels)}) ({query})" if labels else f"sum({query})"


def share(part: str, whole: str) -> str:
    """Return a quotient that is empty instead of not a number while the whole is 0."""
    return f"{part} / ({whole} > 0)"


def quantile(q: float, histogram: str) -> str:
    """Return a quantile of a histogram over all engines; empty instead of not a number without observations."""
    buckets = f"sum by (le) (rate({histogram}_bucket{{{ENGINE}}}[$__rate_interval]))"
    return f"histogram_quantile({q}, {buckets}) and on () {total(rate(f'{histogram}_count'))} > 0"


def selectors(query: str) -> list[promql_parser.VectorSelector]:
    """Return the selectors of a query without Grafana's variables, in its order. Raises ValueError for a bad query."""
    found: list[promql_parser.VectorSelector] = []

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)

    promql_parser.walk(promql_parser.parse(query), visit)
    return found


def metrics(query: str) -> list[str]:
    """Return the names of the metrics of a dashboard's query, each once."""
    plain = filled(query, rate_interval="1m", range_="1h")
    return list(dict.fromkeys(str(selector.name) for selector in selectors(plain)))


def filled(query: str, *, rate_interval: str, range_: str) -> str:
    """Return a dashboard's query with Grafana's own variables replaced by durations."""
    return query.replace("$__rate_interval", rate_interval).replace("$__range", range_)
