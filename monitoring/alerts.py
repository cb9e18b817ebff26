"""Alerts and the recording rules they need.

The files in the chart's ``rules/`` are whole: Prometheus can load them as they are. The chart makes them the release's
own with two exact replacements in each expression: `ANY_TARGET` becomes the release's namespace and service, and the
last word, which is the threshold, its value in ``values.yaml``. What the values say by default is what the files have.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from monitoring.promql import RANKS

ANY_TARGET = 'release!=""'
"""Selects all that the chart's monitors scrape."""

RUNBOOK = "docs/runbook.md"


@dataclass(frozen=True)
class Windows:
    """How far back the expressions look; tests look back less far.

    Attributes:
        rate: For rates and trends.
        events: For counting rare events.
        horizon_seconds: How far ahead a trend is followed.
        past: How much of its own past a figure is compared with.
        past_ends: How long ago that past ends.
    """

    rate: str = "5m"
    events: str = "10m"
    horizon_seconds: int = 600
    past: str = "1d"
    past_ends: str = "1h"


@dataclass(frozen=True)
class Alert:
    """One alert but for what the chart's values say of it.

    Attributes:
        name: Its name, also that of its section in the runbook and of its values.
        expr: The expression up to its threshold, which follows as the last word if there is one.
        summary: What is wrong, in one line with labels.
        description: What to look at first.
    """

    name: str
    expr: str
    summary: str
    description: str


def _gauge(metric: str, *matchers: str) -> str:
    return f"max {RANKS} ({metric}{{{','.join((ANY_TARGET, *matchers))}}})"


def _of_counter(function: str, metric: str, window: str, *matchers: str) -> str:
    return f"max {RANKS} ({function}({metric}{{{','.join((ANY_TARGET, *matchers))}}}[{window}]))"


def _accept_length_name(windows: Windows) -> str:
    return f"pod:sglang_dflash_accept_length_tokens:rate{windows.rate}"


def recording_rules(windows: Windows) -> dict[str, str]:
    """Return expressions by the name under which they are recorded."""
    accepted = _of_counter("rate", "sglang_dflash_accepted_tokens_total", windows.rate)
    steps = _of_counter("rate", "sglang_dflash_verify_steps_total", windows.rate)
    return {_accept_length_name(windows): f"{accepted} / ({steps} > 0)"}


def alerts(windows: Windows) -> tuple[Alert, ...]:
    """Return the alerts, in the order of the runbook."""
    used = f"sglang_dflash_pool_used_slots{{{ANY_TARGET}}}[{windows.rate}]"
    running = _gauge("sglang:num_running_reqs", 'priority=""')
    waiting = _gauge("sglang:num_queue_reqs", 'priority=""')
    tokens = _of_counter("rate", "sglang:realtime_tokens_total", windows.rate)
    prompt_tokens = _of_counter("rate", "sglang:realtime_tokens_total", windows.events, 'mode=~"prefill_.+"')
    lost = _of_counter("rate", "sglang_dflash_prefix_lost_tokens_total", windows.events)
    accept_length = _accept_length_name(windows) + f"{{{ANY_TARGET}}}"
    past = f"{_accept_length_name(windows)}{{{ANY_TARGET}}}[{windows.past}] offset {windows.past_ends}"
    pod = "{{ $labels.pod }}"
    return (
        Alert(
            "SGLangPoolFilling",
            f"max {RANKS} (predict_linear({used}, {windows.horizon_seconds}))\n"
            f"> {_gauge('sglang_dflash_pool_size_slots')}\n"
            f"and {_gauge('sglang_dflash_pool_usage_ratio')} >",
            f"Pool {{{{ $labels.pool }}}} of {pod} fills faster than it drains",
            "At this pace its slots are used up within minutes; then requests are retracted.",
        ),
        Alert(
            "SGLangRequestsRetracted",
            f"{_of_counter('increase', 'sglang_dflash_retracted_requests_total', windows.events)} >",
            f"{pod} retracts requests for lack of room in pool {{{{ $labels.cause }}}}",
            "{{ $value | humanize }} requests lately were taken out of the batch and have to be computed again.",
        ),
        Alert(
            "SGLangRequestsAborted",
            f"{_of_counter('increase', 'sglang_dflash_retraction_aborted_requests_total', windows.events)} >",
            f"{pod} ends requests with an error for lack of room in pool {{{{ $labels.cause }}}}",
            "A request had the pool to itself and still did not fit. SGLang does not count it as retracted.",
        ),
        Alert(
            "SGLangEvictionNotWorking",
            f"{_gauge('sglang_dflash_request_held_max_slots')} / {_gauge('sglang_dflash_request_held_bound_slots')} >",
            f"A request of {pod} holds more of pool {{{{ $labels.pool }}}} than its window allows",
            "It holds {{ $value | humanize }} times its bound: slots behind the window are not freed.",
        ),
        Alert(
            "SGLangWindowPoolTight",
            f"{_gauge('sglang_dflash_pool_cacheable_prefixes')} <",
            f"Pool {{{{ $labels.pool }}}} of {pod} has no room beyond its running requests",
            "At full load no prefix is kept; below the request cap, requests are retracted.",
        ),
        Alert(
            "SGLangPrefixReuseLost",
            f"sum without (pool) ({lost})\n/ (sum without (mode) ({prompt_tokens}) > 0) >",
            f"{pod} computes prompts again whose window was evicted",
            "That is {{ $value | humanizePercentage }} of the prompt tokens, while their full KV was still there.",
        ),
        Alert(
            "SGLangAcceptLengthCollapsed",
            f"{accept_length}\n/ avg_over_time({past}) <",
            f"The draft of {pod} guesses worse than it used to",
            "The accept length is {{ $value | humanizePercentage }} of its own past.",
        ),
        Alert(
            "SGLangQueueStuck",
            f"{waiting} > 0\nand {running} < {_gauge('sglang_dflash_max_running_requests')}\n"
            f"and max without (pool) ({_gauge('sglang_dflash_pool_usage_ratio')}) <",
            f"Requests of {pod} wait though its pools are idle",
            "{{ $value }} wait, fewer run than may, and no pool is near full.",
        ),
        Alert(
            "SGLangNotServing",
            f"({running} + {waiting} > 0)\nunless sum without (mode) ({tokens}) >=",
            f"{pod} is up, has requests, and yields no tokens",
            "It answers scrapes, but its scheduler stands still or is paused.",
        ),
        Alert(
            "SGLangScrapeMissing",
            f"(sum by (namespace, service) (up{{{ANY_TARGET}}}) or absent(up{{{ANY_TARGET}}}) - 1) <",
            "Too few servers of {{ $labels.service }} answer Prometheus",
            "{{ $value }} of them do. All other alerts are blind for the rest.",
        ),
        Alert(
            "SGLangPluginInactive",
            f"up{{{ANY_TARGET}}} == 1\nunless on (namespace, pod) sglang_dflash_up{{{ANY_TARGET}}} == 1",
            f"{pod} serves without pool metrics",
            "The plugin's hooks are not in place, so all alerts about pools are blind.",
        ),
    )


def rule_groups(settings: Mapping[str, Mapping[str, Any]], windows: Windows | None = None) -> dict[str, Any]:
    """Return the content of a rule file.

    Args:
        settings: By name of alert what the chart's values say: ``severity``, ``for`` and, where it has one,
            ``threshold``.
        windows: How far back to look. None: as the chart does.
    """
    windows = windows or Windows()
    rules: list[dict[str, Any]] = [{"record": name, "expr": expr} for name, expr in recording_rules(windows).items()]
    for alert in alerts(windows):
        setting = settings[alert.name]
        threshold = f" {setting['threshold']}" if "threshold" in setting else ""
        rules.append(
            {
                "alert": alert.name,
                "expr": alert.expr + threshold,
                "for": setting["for"],
                "labels": {"severity": setting["severity"]},
                "annotations": {
                    "summary": alert.summary,
                    "description": alert.description,
                    "runbook_url": f"{RUNBOOK}#{alert.name.lower()}",
                },
            }
        )
    return {"groups": [{"name": "sglang-dflash", "rules": rules}]}
