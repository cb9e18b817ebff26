"""The dashboard Speculation: how well the draft guesses, and its pool against ratio and window."""

from grafana_foundation_sdk.builders import dashboard as builders

from monitoring.panels import AnyPanel, Query, dashboard, graph, tile
from monitoring.promql import each, quantile, rate, share, total

_NO_DRAFT = "no draft"
_NO_POOL = "no bounded draft pool"
_DRAFT = 'pool="draft"'
_FULL = 'pool="full"'
_ACCEPTED, _STEPS = rate("sglang_dflash_accepted_tokens_total"), rate("sglang_dflash_verify_steps_total")
ACCEPT_LENGTH = share(total(_ACCEPTED), total(_STEPS))
_LOWER = (
    "If it fell without other traffic, check that target and draft belong together and that "
    "`speculative.draftWindowSize` is the `sliding_window` of the draft's config.json; a smaller window costs accepted "
    "tokens. Text unlike the draft's training, and a high temperature, lower it too."
)


def _draft() -> list[AnyPanel]:
    return [
        tile(
            "Accept length",
            Query(ACCEPT_LENGTH, "tokens a step"),
            unit="short",
            decimals=2,
            means="Tokens that a verify step yields, the target's own one among them: 1 is no help, the block size all "
            "right.",
            do=_LOWER,
            colors={None: "red", 1.5: "yellow", 2: "green"},
        ),
        tile(
            "Accept rate",
            Query(
                f"({ACCEPT_LENGTH} - 1) / (max({each('sglang_dflash_block_size_tokens')}) - 1)",
                "share",
            ),
            unit="percentunit",
            means="Share of the draft's tokens that the target accepts.",
            do=_LOWER,
        ),
        tile(
            "Block",
            Query(f"max({each('sglang_dflash_block_size_tokens')})", "tokens"),
            unit="short",
            means="Tokens that one verify step checks.",
            do="If the accept length is far below it, a smaller `speculative.blockSize` wastes less work.",
            none=_NO_DRAFT,
        ),
        tile(
            "Window",
            Query(f"max({each('sglang_dflash_draft_window_tokens')})", "tokens"),
            unit="short",
            means="Tokens of history that the draft reads.",
            do="Best the `sliding_window` of the draft's config.json: `speculative.draftWindowSize`.",
            none="whole history",
        ),
        tile(
            "Ratio",
            Query(f"min({each('sglang_dflash_draft_kv_ratio')})", "ratio"),
            unit="short",
            means="Draft slots for each slot of the target; at 1 the draft has no pool of its own size.",
            do="`speculative.draftKvRatio`: lower leaves more memory to the target, higher keeps more prefixes.",
            none=_NO_DRAFT,
        ),
        tile(
            "Eviction interval",
            Query(f"max({each('sglang_dflash_eviction_interval_tokens')})", "tokens"),
            unit="short",
            means="Tokens that leave a window before their slots are freed.",
            do="`SGLANG_SWA_EVICTION_INTERVAL` in `extraEnv`. Rather lower `maxRunningRequests` than this.",
            none=_NO_POOL,
        ),
    ]


def _guesses() -> list[AnyPanel]:
    return [
        graph(
            "Accept length over time",
            Query(ACCEPT_LENGTH, "now"),
            Query(f"avg_over_time(({ACCEPT_LENGTH})[$__range:$__rate_interval])", "mean of the time shown"),
            Query(f"avg({each('sglang:spec_accept_length')})", "as SGLang samples it"),
            unit="short",
            lowest=1,
            means="Tokens a verify step, from counters; beside it SGLang's gauge, which is a sample every few dozen "
            "steps.",
            do=_LOWER,
        ),
        graph(
            "Accept length by request",
            *[
                Query(quantile(q, "sglang_dflash_request_accept_length_tokens"), f"p{q * 100:g}")
                for q in (0.1, 0.5, 0.9)
            ],
            unit="short",
            lowest=1,
            means="Tokens a verify step of each finished request.",
            do="A low p10 beside a good median: some requests are unlike the rest, by language or by temperature.",
        ),
        graph(
            "Verify steps",
            Query(total(_STEPS), "steps"),
            Query(total(_ACCEPTED), "tokens yielded"),
            unit="cps",
            means="Verify steps a second, one for each request in each, and the tokens they yielded.",
            do="Fewer steps with the same batch: each takes longer, see the latency between tokens (Overview).",
        ),
    ]


def _pool() -> list[AnyPanel]:
    used, running = each("sglang_dflash_pool_used_slots", _DRAFT), each("sglang:num_running_reqs", 'priority=""')
    return [
        graph(
            "Draft pool",
            Query(each("sglang_dflash_pool_size_slots", _DRAFT), "{{pod}} size"),
            Query(each("sglang_dflash_pool_request_cap_slots", _DRAFT), "{{pod}} request cap"),
            Query(used, "{{pod}} used"),
            unit="short",
            means="Slots of the draft, what the most running requests can hold of them, and what they hold now.",
            do="A size far above the cap that is never used: lower `speculative.draftKvRatio`. Used near the cap: it "
            "is well chosen, and prefixes live in what is left.",
            none=_NO_POOL,
        ),
        graph(
            "Slots a running request",
            Query(
                f"sum({used}) / (sum({running}) > 0)",
                "held",
            ),
            Query(f"max({each('sglang_dflash_pool_window_tokens', _DRAFT)})", "window"),
            Query(f"max({each('sglang_dflash_request_held_bound_slots', _DRAFT)})", "bound"),
            unit="short",
            means="Draft slots for each running request, beside its window and the bound for what it holds of its own.",
            do="Above window and bound together for minutes: eviction does not work.",
            none=_NO_POOL,
        ),
        graph(
            "Slots for each of the target's",
            Query(
                f"sum({each('sglang_dflash_pool_size_slots', _DRAFT)}) / "
                f"sum({each('sglang_dflash_pool_size_slots', _FULL)})",
                "as built",
            ),
            Query(f"max({each('sglang_dflash_draft_kv_ratio')})", "ratio asked for"),
            unit="percentunit",
            highest=1,
            means="Slots of the draft pool for each of the full pool: the ratio, but for whole pages.",
            do="If they differ by more than a page, the pools were not sized by this ratio: the log says what was.",
            none=_NO_POOL,
        ),
    ]


def build() -> builders.Dashboard:
    """Return the dashboard."""
    return dashboard(
        "Speculation",
        "How well the draft guesses, and what it keeps in memory for that.",
        {"Draft": _draft(), "Guesses": _guesses(), "Its pool": _pool()},
    )
