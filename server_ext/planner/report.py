"""A plan as text, as JSON, and as values for the chart."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import yaml

from server_ext.planner.plan import Plan
from server_ext.planner.search import Point

_GIB = 2**30
_POOL = {"draft_kv_ratio": "draft", "swa_full_tokens_ratio": "SWA"}


def values(plan: Plan) -> dict[str, Any]:
    """Return the values with which the chart serves this plan."""
    options = plan.options
    engine_config = {
        "page-size": options.page_size,
        "chunked-prefill-size": options.chunked_prefill_size,
        "kv-cache-dtype": None if options.kv_cache_dtype == "auto" else options.kv_cache_dtype,
        "max-mamba-cache-size": options.max_mamba_cache_size,
        "mamba-full-memory-ratio": options.mamba_full_memory_ratio,
        "max-total-tokens": options.max_total_tokens,
    }
    found = {
        "model": {"target": options.target, "draft": options.draft},
        "speculative": {
            "draftKvRatio": options.draft_kv_ratio or 1,
            "draftWindowSize": options.draft_window_size,
            "blockSize": plan.sizes.block_size,
        },
        "swaFullTokensRatio": options.swa_full_tokens_ratio,
        "maxRunningRequests": options.max_running_requests,
        "memFractionStatic": options.mem_fraction_static,
        "tensorParallelSize": options.tensor_parallel_size,
        "contextLength": options.context_length,
        "gpu": {"count": options.tensor_parallel_size},
        "engineConfig": {name: value for name, value in engine_config.items() if value is not None},
    }
    return {name: value for name, value in found.items() if value is not None}


def as_json(plan: Plan) -> dict[str, Any]:
    """Return everything in a plan; bytes and tokens are of one GPU."""
    return dataclasses.asdict(plan) | {"values": values(plan), "not_known": list(_not_known(plan))}


def as_text(plan: Plan) -> str:
    """Return a plan to read: memory, the table over ratios, the recommendation, the values."""
    parts = [_memory(plan), _table(plan), _recommendation(plan)]
    block = yaml.safe_dump(values(plan), sort_keys=False)
    parts += [_list("Mind", plan.warnings)] if plan.warnings else []
    parts += [
        _list("Not known", _not_known(plan)),
        f"Values for the chart:\n\n# target and draft as this machine has them: write what a pod finds\n{block}",
    ]
    return "\n\n".join(parts)


def _memory(plan: Plan) -> str:
    sizes, memory, options = plan.sizes, plan.memory, plan.options
    rows = [
        ("free before the weights", memory.free_gib, ""),
        (
            "kept free",
            memory.free_gib * (1 - options.mem_fraction_static),
            f"activations, CUDA graphs: 1 - mem-fraction-static {options.mem_fraction_static:g}",
        ),
        ("weights", memory.weights_gib, "target and draft"),
    ]
    if sizes.state:
        state = (
            f"{sizes.state.slots} slots, {sizes.state.slots_per_request} a running request, and what verifying needs"
        )
        rows.append(("states", sizes.state.bytes / _GIB, state))
    kept = f"{sizes.target_bytes_per_token / 1024:g} KiB a token"
    if sizes.window and sizes.swa_bytes_per_token:
        kept += f", {sizes.swa_bytes_per_token / 1024:g} KiB a token of its {sizes.window.tokens} SWA slots"
    rows.append(("target KV", sizes.target_pool_bytes / _GIB, f"{sizes.target_tokens} tokens, {kept}"))
    draft = f"{sizes.draft_tokens} slots, {sizes.draft_bytes_per_token / 1024:g} KiB each"
    rows.append(("draft KV", sizes.draft_pool_bytes / _GIB, draft))
    lines = [f"  {name:<24}{gib:7.1f}  {note}".rstrip() for name, gib, note in rows]
    gpus = "the GPU" if options.tensor_parallel_size == 1 else f"each of {options.tensor_parallel_size} GPUs"
    return "\n".join([f"GiB on {gpus}", *lines])


def _table(plan: Plan) -> str:
    requests = plan.options.max_running_requests
    window = f"{_POOL[plan.knob]} slots"
    lines = [f"Ratios with {requests} running requests of {plan.workload.request_tokens} tokens"]
    lines.append(f"  {'ratio':>6}{'target tokens':>15}{window:>13}{'headroom':>10}{'cached requests':>17}")
    for point in plan.points:
        lines.append(_row(plan, point))
    return "\n".join(lines)


def _row(plan: Plan, point: Point) -> str:
    marks = "  recommended" if point.ratio == plan.ratio else ""
    marks += "  smallest" if point.ratio == plan.smallest_ratio else ""
    if point.sizes is None:
        return f"  {point.ratio:>6g}  the engine refuses to start{marks}"
    sizes = point.sizes
    slots = sizes.window.tokens if sizes.window else sizes.draft_tokens
    headroom = "-" if point.headroom_tokens is None else point.headroom_tokens
    limit = f"  limited by {point.limited_by}" if point.limited_by == "window" else ""
    cells = f"{point.ratio:>6g}{sizes.target_tokens:>15}{slots:>13}{headroom:>10}{point.cached_prefixes:>17}"
    return f"  {cells}{limit}{marks}"


def _recommendation(plan: Plan) -> str:
    name = {"draft_kv_ratio": "draft KV ratio", "swa_full_tokens_ratio": "SWA to full tokens ratio"}[plan.knob]
    chosen = f"{name} {plan.ratio:g}, window {plan.options.draft_window_size or 'none'}, "
    chosen += f"{plan.options.max_running_requests} running requests"
    lines = [f"Recommended: {chosen}.", plan.reason]
    if window := plan.sizes.window:
        lines.append(
            f"Request cap {window.request_cap_tokens}; a cached request keeps {window.retained_tokens} slots. So does "
            "a running one, beside the cap: its prompt's end stays locked in the prefix cache. Headroom is the rest."
        )
    return "\n".join(lines)


def _list(title: str, lines: Any) -> str:
    return "\n".join([title, *(f"  - {line}" for line in lines)])


def _not_known(plan: Plan) -> Iterator[str]:
    yield (
        "Memory before the weights is an estimate unless given: compare it with `avail mem` in the engine's log at "
        "`Load weight begin`, and the weights with `mem usage` at `Load weight end`."
    )
    yield "Whether what is kept free is enough for activations and CUDA graphs: a start under load tells."
    yield (
        f"Whether the GPU's attention backend takes pages of {plan.options.page_size}; a larger page rounds the pools "
        "down and the request cap up."
    )
    if plan.sizes.state:
        yield "How many states the prefix cache keeps of a request: one is counted, branches of it take more."
    yield "How many drafted tokens are accepted, and so the speed."
