"""The dashboard Overview: is it serving, and how well."""

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.models import common

from monitoring.panels import AnyPanel, Query, dashboard, graph, slo_variable, tile
from monitoring.promql import ENGINE, TARGET, each, quantile, rate, share, total

_TTFT, _LATENCY = "sglang:time_to_first_token_seconds", "sglang:inter_token_latency_seconds"
_RESPONSES = "sglang:http_responses_total"
_API = 'endpoint=~"/v1/.*|/generate"'
_FAILED = 'status_code=~"5.."'
_UP = f'up{{{TARGET},release!=""}}'


def _responses(*matchers: str) -> str:
    return f"rate({_RESPONSES}{{{','.join((TARGET, _API, *matchers))}}}[$__rate_interval])"


def _within(histogram: str, variable: str) -> str:
    """Return the share of observations up to the bound that a variable holds."""
    within = f'sum(rate({histogram}_bucket{{{ENGINE},le="${variable}"}}[$__rate_interval]))'
    return share(within, total(rate(f"{histogram}_count")))


def _quantiles(histogram: str) -> list[Query]:
    return [Query(quantile(q, histogram), f"p{q * 100:g}") for q in (0.5, 0.95, 0.99)]


def _serving() -> list[AnyPanel]:
    return [
        tile(
            "Servers up",
            Query(f"sum({_UP})", "up"),
            Query(f"count({_UP})", "expected"),
            unit="short",
            means="Servers that answer Prometheus, and those it knows of.",
            do="If one is missing, look at its pod: it loads for up to `startupTimeoutSeconds`, or it has ended; "
            "`kubectl describe pod` shows the engine's last words.",
            none="no servers",
        ),
        tile(
            "Alerts firing",
            Query(
                'count(ALERTS{alertstate="firing",alertname=~"SGLang.+",namespace=~"$namespace"}) or vector(0)',
                "alerts",
            ),
            unit="short",
            means="Alerts of the chart's rules that fire in these namespaces now.",
            do="Each has a section in the runbook, which its annotation `runbook_url` names.",
            colors={None: "green", 1: "red"},
        ),
        tile(
            "Failed responses",
            Query(
                share(f"(sum({_responses(_FAILED)}) or vector(0))", f"sum({_responses()})"),
                "5xx",
            ),
            unit="percentunit",
            means="Share of API responses with a status of 500 or more.",
            do="503 while a pod stops is its drain. Other failures are in the engine's log; requests that ended for "
            "lack of memory are on the dashboard Pools.",
            colors={None: "green", 0.001: "yellow", 0.01: "red"},
        ),
        tile(
            "First token in time",
            Query(_within(_TTFT, "slo_first_token"), "share"),
            unit="percentunit",
            means="Share of requests whose first token came within $slo_first_token s (variable of this dashboard).",
            do="If it falls while requests wait, add replicas or raise `maxRunningRequests`; if nothing waits, prompts "
            "are long: look at the prefix hits below.",
            colors={None: "red", 0.95: "yellow", 0.99: "green"},
        ),
        tile(
            "Tokens in time",
            Query(_within(_LATENCY, "slo_token"), "share"),
            unit="percentunit",
            means="Share of tokens that came within $slo_token s of the one before (variable of this dashboard).",
            do="If it falls, look at the accept length (Speculation) and at the running requests: each step takes "
            "longer for a larger batch, so lower `maxRunningRequests` or add replicas.",
            colors={None: "red", 0.95: "yellow", 0.99: "green"},
        ),
        tile(
            "Plugin",
            Query(f"min(sglang_dflash_up{{{TARGET}}})", "hooks"),
            unit="bool_on_off",
            means="On while the pool metrics are written in every selected server.",
            do="If it is off, the pool panels are empty: the log says which hook does not fit the installed SGLang.",
            none="no metrics",
            colors={None: "red", 1: "green"},
        ),
    ]


def _traffic() -> list[AnyPanel]:
    return [
        graph(
            "Requests",
            Query(total(rate("sglang:num_requests_total")), "finished"),
            Query(total(rate("sglang:num_aborted_requests_total")), "aborted"),
            unit="reqps",
            means="Requests that finished, and those that clients broke off or the engine ended.",
            do="Many aborted: clients give up (compare the latency with their timeouts), or memory ran out (Pools).",
        ),
        graph(
            "Responses",
            Query(f"sum by (status_code) ({_responses()})", "{{status_code}}"),
            unit="reqps",
            means="API responses by status.",
            do="4xx are mistakes of clients, 503 a stopping server, 500 is in the engine's log.",
        ),
        graph(
            "Running and waiting",
            Query(total(each("sglang:num_running_reqs", 'priority=""')), "running"),
            Query(total(each("sglang:num_queue_reqs", 'priority=""')), "waiting"),
            Query(total(each("sglang_dflash_max_running_requests")), "most at once"),
            unit="short",
            means="Requests in the batch and in the queue, and the most that may run at once.",
            do="Waiting while fewer run than may: memory is the limit (Pools). Waiting at the limit: raise "
            "`maxRunningRequests` if the pools have headroom, or add replicas.",
        ),
        graph(
            "Tokens",
            Query(total(rate("sglang:realtime_tokens_total"), "mode"), "{{mode}}"),
            unit="cps",
            means="Tokens a second: prompt tokens computed, prompt tokens from the prefix cache, tokens generated.",
            do="Compute grows and hits fall while traffic is the same: prefixes are evicted (Pools).",
        ),
        graph(
            "Prefix hits",
            Query(
                share(
                    total(rate("sglang:prefill_effective_tokens_total", 'mode=~".+_hit"')),
                    total(rate("sglang:prefill_effective_tokens_total")),
                ),
                "share of prompt tokens",
            ),
            unit="percentunit",
            highest=1,
            means="Share of prompt tokens that the prefix cache had.",
            do="If it fell with the same traffic, look at evictions and lost prefixes (Pools): a window pool with more "
            "headroom keeps more prefixes, so raise `speculative.draftKvRatio` or lower `maxRunningRequests`.",
        ),
        graph(
            "Fullest pool",
            Query(f"max by (pool) ({each('sglang_dflash_pool_usage_ratio')})", "{{pool}}"),
            unit="percentunit",
            highest=1,
            means="Share of each pool's slots that requests hold; cached prefixes do not count.",
            do="Near 1 requests wait or are retracted: the dashboard Pools says which and why.",
            none="no metrics",
        ),
    ]


def _latency() -> list[AnyPanel]:
    return [
        graph(
            "Time to first token",
            *_quantiles(_TTFT),
            unit="s",
            means="From a request's arrival to its first token.",
            do="Compare with the time in the queue: what is left is the prefill.",
        ),
        graph(
            "Between tokens",
            *_quantiles(_LATENCY),
            unit="s",
            means="From one token to the next; the tokens of one verify step share its time.",
            do="If it grows, the batch is larger or the accept length lower (Speculation).",
        ),
        graph(
            "In the queue",
            *_quantiles("sglang:queue_time_seconds"),
            unit="s",
            means="From a request's arrival to its first prefill.",
            do="Long with pools full: memory (Pools). Long at the most running requests: add replicas.",
        ),
    ]


def _engines() -> list[AnyPanel]:
    info = f"max by (pod, sglang_version, patch_series, speculative_algorithm) (sglang_dflash_engine_info{{{ENGINE}}})"
    return [
        tile(
            "Engines",
            Query(info, "{{pod}}: SGLang {{sglang_version}}, {{speculative_algorithm}}, patches {{patch_series}}"),
            unit="short",
            means="What runs: release, speculative algorithm, and the hash of the patches applied to it.",
            do="Pods that differ are in the middle of an update.",
            width=24,
            none="no metrics",
            text=common.BigValueTextMode.NAME,
        ),
    ]


def build() -> builders.Dashboard:
    """Return the dashboard."""
    return dashboard(
        "Overview",
        "Is it serving: traffic, latency, errors and queue.",
        {"Serving": _serving(), "Traffic": _traffic(), "Latency": _latency(), "Engines": _engines()},
        slo_variable("slo_first_token", ("0.4", "1.0", "2.0", "4.0", "10.0"), "2.0"),
        slo_variable("slo_token", ("0.02", "0.04", "0.06", "0.1", "0.2"), "0.1"),
    )
