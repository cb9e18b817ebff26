"""The dashboard Pools: full, swa, draft and mamba side by side, what fills them and what that costs."""

from grafana_foundation_sdk.builders import dashboard as builders

from monitoring.panels import AnyPanel, Query, dashboard, graph, pool_variable, tile
from monitoring.promql import ENGINE, RANKS, TARGET, each, rate, share, total

_POOL = 'pool=~"$pool"'
_LEGEND = "{{pod}} {{pool}}"
_EVICTED = "sglang:evicted_tokens_total"  # knows no model
_PREFILL = 'mode=~"prefill_.+"'
_NO_POOL = "no such pool"
_NO_WINDOW = "no window pool"
_NO_LOSS = "no window pool, or no traffic"
_MORE_ROOM = (
    "For more room in a window pool raise `speculative.draftKvRatio` (`swaFullTokensRatio` for a target's own window "
    "pool), or lower `maxRunningRequests`."
)


def _slots(what: str) -> str:
    return each(f"sglang_dflash_pool_{what}_slots", _POOL)


def _now() -> list[AnyPanel]:
    return [
        graph(
            "Slots of $pool",
            Query(total(_slots("used"), "pool"), "used", stacked=True),
            Query(total(_slots("evictable"), "pool"), "evictable", stacked=True),
            Query(total(_slots("free"), "pool"), "free", stacked=True),
            Query(total(_slots("high_water"), "pool"), "most used since start"),
            unit="short",
            means="Slots that requests hold, that only the prefix cache holds and would give up, and that are free.",
            do="Used near the size: requests wait or are retracted. Evictable near 0: no prefix is kept for reuse. "
            f"{_MORE_ROOM} For `full`, lower `maxRunningRequests` or give more memory (`memFractionStatic`).",
            none=_NO_POOL,
            width=6,
        )
        .repeat("pool")
        .repeat_direction("h")
        .max_per_row(4),
    ]


def _fullness() -> list[AnyPanel]:
    used = "sglang_dflash_pool_used_slots"
    growth = f"deriv({used}{{{ENGINE},{_POOL}}}[$__rate_interval])"
    return [
        graph(
            "Usage",
            Query(each("sglang_dflash_pool_usage_ratio", _POOL), _LEGEND),
            unit="percentunit",
            highest=1,
            means="Share of the slots that requests hold.",
            do="Which pool is the limit: the one nearest 1. SGLang's `sglang:token_usage` is the highest of all pools "
            "and does not say which.",
            none="no metrics",
        ),
        graph(
            "Time until full",
            Query(f"{_slots('free')} / (max {RANKS} ({growth}) > 0)", _LEGEND),
            unit="s",
            means="How long the free slots last if requests go on taking them as fast as now.",
            do="Seconds are normal in small pools while a batch starts; falling for minutes is a pool that fills "
            "faster than it drains.",
            none="none is filling",
        ),
        graph(
            "Headroom over the request cap",
            Query(each("sglang_dflash_pool_headroom_slots", _POOL), _LEGEND),
            Query(each("sglang_dflash_pool_request_cap_slots", _POOL), f"{_LEGEND} cap"),
            unit="short",
            lowest=None,
            means="Slots of a window pool beyond what the most running requests can hold at once (the cap).",
            do=f"Below 0 requests can be retracted at full load; near 0 no prefix is kept. {_MORE_ROOM}",
            none=_NO_WINDOW,
        ),
        tile(
            "Cached prefixes that fit",
            Query(f"min by (pool) ({each('sglang_dflash_pool_cacheable_prefixes', _POOL)})", "{{pool}}"),
            unit="short",
            means="Cached prefixes that fit into the window pool beside the most running requests.",
            do=_MORE_ROOM,
            none=_NO_WINDOW,
            colors={None: "red", 1: "yellow", 4: "green"},
            width=8,
        ),
        tile(
            "Memory",
            Query(f"sum by (pool) ({each('sglang_dflash_pool_size_bytes', _POOL)})", "{{pool}}"),
            unit="bytes",
            means="Memory of each pool on each device, summed over the selected servers.",
            do="A draft pool larger than it needs takes memory from `full`: lower `speculative.draftKvRatio`.",
            none="no metrics",
            width=16,
        ),
    ]


def _costs() -> list[AnyPanel]:
    lost = total(rate("sglang_dflash_prefix_lost_tokens_total", _POOL))
    return [
        graph(
            "Retracted requests",
            Query(total(rate("sglang_dflash_retracted_requests_total"), "cause"), "{{cause}}"),
            Query(total(rate("sglang:num_retracted_requests_total")), "all, as SGLang counts"),
            unit="reqps",
            means="Requests taken out of the batch and computed again later, by the pool that was short.",
            do="Cause `full`: lower `maxRunningRequests`, or raise `schedule-conservativeness` in `engineConfig`. "
            f"Cause `draft` or `swa`: first see that requests stay within their bound. {_MORE_ROOM}",
            none="none",
        ),
        graph(
            "Requests ended for lack of memory",
            Query(total(rate("sglang_dflash_retraction_aborted_requests_total"), "cause"), "{{cause}}"),
            unit="reqps",
            means="Requests that ended with an error, as retracting all others made no room. SGLang does not count "
            "them as retracted.",
            do="One request alone fills the pool: lower `contextLength`, or give that pool more room. In a window pool "
            "it means that eviction does not work.",
            none="none",
        ),
        graph(
            "Tokens computed again",
            Query(total(rate("sglang_dflash_retracted_input_tokens_total"), "cause"), "{{cause}} prompt"),
            Query(total(rate("sglang_dflash_retracted_output_tokens_total"), "cause"), "{{cause}} generated"),
            unit="cps",
            means="Tokens of retracted requests: what the next prefill has to do again, less what is still cached.",
            do="As for retracted requests.",
            none="none",
        ),
        graph(
            "Delayed admissions",
            Query(total(rate("sglang_dflash_delayed_admissions_total"), "cause"), "{{cause}}"),
            unit="reqps",
            means="Requests that began to wait because a pool had no room for them.",
            do="Normal at full load. With pools far from full, requests reserve more than they use: lower "
            "`schedule-conservativeness` in `engineConfig`, or the clients' `max_tokens`.",
            none="none",
        ),
        graph(
            "Taken from the prefix cache",
            Query(total(rate("sglang_dflash_evicted_slots_total", _POOL), "pool"), "{{pool}}"),
            Query(f"sum(max {RANKS} (rate({_EVICTED}{{{TARGET}}}[$__rate_interval])))", "full, as SGLang counts"),
            unit="cps",
            means="Slots of cached prefixes given to requests that needed room.",
            do="Normal in a full cache; the cost is in the next panel and in the prefix hits of the Overview.",
            none="none",
        ),
        graph(
            "Prefix lost with its window",
            Query(share(lost, total(rate("sglang:realtime_tokens_total", _PREFILL))), "share of prompt tokens"),
            unit="percentunit",
            means="Share of prompt tokens, those of retracted requests included, that `full` still had and that were "
            "computed again, since the window pool had dropped their window.",
            do=_MORE_ROOM,
            none=_NO_LOSS,
        ),
    ]


def _requests() -> list[AnyPanel]:
    held, bound = each("sglang_dflash_request_held_max_slots", _POOL), "sglang_dflash_request_held_bound_slots"
    return [
        graph(
            "Slots of the largest request",
            Query(held, f"{_LEGEND} held"),
            Query(each(bound, _POOL), f"{_LEGEND} bound"),
            unit="short",
            means="The most window-pool slots that one decoding request holds of its own, and what it should stay "
            "within however long it generates.",
            do="Above the bound, slots behind the window are not freed and the pool fills up: the runbook's section "
            "SGLangEvictionNotWorking.",
            none=_NO_WINDOW,
        ),
        graph(
            "Freed behind the window",
            Query(total(rate("sglang_dflash_window_freed_slots_total", _POOL), "pool"), "{{pool}}"),
            unit="cps",
            means="Slots freed because they left a running request's window.",
            do="Far below the tokens generated (Overview) while answers are longer than the window: eviction does not "
            "work.",
            none=_NO_WINDOW,
        ),
        tile(
            "Requests within the bound",
            Query(f"min by (pool) ({each('sglang_dflash_request_held_within_bound', _POOL)})", "{{pool}}"),
            unit="bool_yes_no",
            means="Whether every decoding request holds no more than its bound.",
            do="If not, the runbook's section SGLangEvictionNotWorking.",
            none=_NO_WINDOW,
            colors={None: "red", 1: "green"},
            width=8,
        ),
    ]


def build() -> builders.Dashboard:
    """Return the dashboard."""
    return dashboard(
        "Pools",
        "The KV pools: what fills them, and what that costs.",
        {
            "Slots": _now(),
            "Fullness": _fullness(),
            "One request against its bound": _requests(),
            "Costs": _costs(),
        },
        pool_variable(),
    )
