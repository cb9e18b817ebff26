"""A recommendation with its reason, and what speaks against it."""

from __future__ import annotations

from dataclasses import dataclass

from server_ext.planner.engine import Sizes
from server_ext.planner.inputs import EngineOptions, Knob, Memory, Workload
from server_ext.planner.search import Point, Search

_TABLE_RATIOS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Plan:
    """A recommendation: `options` has its ratio and number of requests, `points` are the ratios for that number.

    `smallest_ratio` is the smallest that holds the requests, `None` when no ratio below 1 does.
    """

    options: EngineOptions
    memory: Memory
    workload: Workload
    knob: Knob
    ratio: float
    sizes: Sizes
    headroom_tokens: int | None
    cached_prefixes: int
    reason: str
    smallest_ratio: float | None
    points: tuple[Point, ...]
    warnings: tuple[str, ...]


def make_plan(options: EngineOptions, memory: Memory, workload: Workload, draft_window: int | None) -> Plan:
    """Choose what the options leave open; `draft_window` is the draft's own sliding window in tokens.

    Raises `Refused` when nothing starts, `UserError` when not one request fits.
    """
    search = Search(options, memory, workload)
    running, point = search.most_requests()
    assert point.sizes is not None
    smallest = search.smallest_ratio(running)
    ratios = {point.ratio}
    if search.bounded_refusal is None or search.knob == "swa_full_tokens_ratio":
        ratios |= {*_TABLE_RATIOS, *([smallest] if smallest else [])}
    return Plan(
        options=running.with_ratio(search.knob, point.ratio),
        memory=memory,
        workload=workload,
        knob=search.knob,
        ratio=point.ratio,
        sizes=point.sizes,
        headroom_tokens=point.headroom_tokens,
        cached_prefixes=point.cached_prefixes,
        reason=_reason(search, point, point.sizes, workload, smallest),
        smallest_ratio=smallest,
        points=tuple(search.point(running, ratio) for ratio in sorted(ratios)),
        warnings=(
            *_about_the_window(options.draft_window_size, draft_window),
            *_about_the_pair(search),
            *_about_the_pools(search, running, point, point.sizes, workload),
        ),
    )


def _reason(search: Search, point: Point, sizes: Sizes, workload: Workload, smallest: float | None) -> str:
    cached = f"{point.cached_prefixes} more of {workload.request_tokens} tokens stay cached beside them"
    running = f"{sizes.running_requests} running requests"
    if search.fixed_ratio is not None:
        return f"The ratio is the one given. It holds {running}, and {cached}."
    if point.ratio == 1:
        if search.knob == "draft_kv_ratio" and search.bounded_refusal:
            return f"The draft's pool cannot be bounded for this pair. All pools hold {running}, and {cached}."
        if smallest is None:
            return f"No ratio below 1 holds {running}. At 1 {cached}."
        return f"A bounded pool saves nothing with requests of {workload.request_tokens} tokens: {cached}."
    first = "state" if point.limited_by == "state" else "target's"
    return f"The smallest ratio that holds {running} and lets the {first} pool end the prefix cache first: {cached}."


def _about_the_window(window: int | None, draft_window: int | None) -> list[str]:
    if draft_window is None or window is None:
        return ["The draft has no sliding window and none is given: it reads and keeps all of a request."]
    if window > draft_window:
        return [
            f"Window {window} is larger than the draft's own {draft_window}: it buys nothing, and each request holds "
            "more of the draft's pool."
        ]
    if window < draft_window:
        return [
            f"Window {window} is smaller than the draft's own {draft_window}: fewer drafted tokens are accepted, and "
            "how many fewer only a measurement tells."
        ]
    return []


def _about_the_pair(search: Search) -> list[str]:
    if search.knob == "swa_full_tokens_ratio":
        return [
            "The target has sliding-window layers of its own, beside which the draft's pool cannot be bounded: the "
            "ratio here is the target's swaFullTokensRatio."
        ]
    return [f"The draft's pool cannot be bounded: {search.bounded_refusal}"] if search.bounded_refusal else []


def _about_the_pools(
    search: Search, running: EngineOptions, point: Point, sizes: Sizes, workload: Workload
) -> list[str]:
    found = []
    if running.max_running_requests < workload.concurrency:
        wanted = workload.concurrency
        shortage = search.shortage(search.best(search.at(wanted)), wanted) or "the pools are too small"
        found.append(f"{running.max_running_requests} requests fit, {wanted} do not: {shortage.rstrip('.')}.")
    if point.limited_by == "window":
        found.append(
            "The bounded pool empties the target's prefix cache: what is evicted there is computed again, although the "
            f"target's pool has room. It keeps {point.cached_prefixes} requests; a larger ratio keeps more."
        )
    if sizes.state and point.limited_by == "state":
        found.append(
            f"The state pool ends the prefix cache first ({sizes.state.slots} slots, {sizes.state.slots_per_request} a "
            "running request, 1 a cached one); --max-mamba-cache-size and --mamba-full-memory-ratio move memory to it."
        )
    if sizes.target_tokens < sizes.context_length:
        found.append(
            f"A request as long as the context, {sizes.context_length} tokens, does not fit in {sizes.target_tokens}; "
            "set the context to what clients need."
        )
    return found
