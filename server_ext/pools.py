"""One plain, frozen snapshot of the scheduler's memory pools.

A slot is what a pool lends: room for one token's keys and values, or in the pool ``mamba`` for one state. Of a pool's
slots some are used (requests hold them), some evictable (only the prefix cache holds them and would give them up for a
request) and the rest free; the three add up to the size. The pools:

- ``full``: the target's full-attention layers, one slot a token.
- ``swa``: the target's own sliding-window layers.
- ``draft``: the DFLASH draft with ``--speculative-draft-kv-ratio`` below 1. SGLang keeps it as the sliding-window side
  of the target's allocator and calls it "swa", too; a target has one or the other.
- ``mamba``: states of linear-attention layers.

Where the numbers come from, and why reading them is free on a GPU: sizes and limits are fixed integers of the engine's
configuration. Free slots are the lengths of the allocators' free lists, which are tensor shapes and so known to the
host. Evictable slots are integers that the prefix cache keeps as it locks and unlocks nodes. What a request holds is
arithmetic on the lengths in its `ReqKvInfo`, which the scheduler itself allocates by. Nothing reads a tensor's values,
so nothing waits for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

PoolName = Literal["full", "swa", "draft", "mamba"]
Cause = Literal["full", "swa", "draft", "mamba", "none"]

GIB = 2**30


@dataclass(frozen=True)
class PoolConfig:
    """What a pool was built with; the fields from `window_tokens` on are of ``swa`` and ``draft`` alone.

    Attributes:
        name: Which pool.
        size_slots: Slots that can be lent.
        size_bytes: Memory of the pool on each device, padding included; None where SGLang does not count it by pool.
        window_tokens: The sliding window.
        request_cap_slots: What ``--max-running-requests`` requests and their prefill chunks can hold at once; None
            without chunked prefill, where no such limit exists.
        headroom_slots: Size beyond the cap, for cached prefixes; negative if the pool cannot hold all requests at once.
        cacheable_prefixes: Cached prefixes that fit into the headroom.
        held_bound_slots: The most that one decoding request holds of its own while eviction works; see `held_bound`.
    """

    name: PoolName
    size_slots: int
    size_bytes: int | None
    window_tokens: int | None = None
    request_cap_slots: int | None = None
    headroom_slots: int | None = None
    cacheable_prefixes: int | None = None
    held_bound_slots: int | None = None


@dataclass(frozen=True)
class Config:
    """What the engine was started with; None where it does not apply.

    Attributes:
        dp_rank: The scheduler's data-parallel rank.
        sglang_version: The installed release.
        patch_series: The hash of the patch series applied to it.
        speculative_algorithm: ``DFLASH`` or another.
        draft_kv_ratio: ``--speculative-draft-kv-ratio``: the draft's slots for each of the target's.
        draft_window_tokens: ``--speculative-draft-window-size``.
        block_size_tokens: Tokens that one verify step checks.
        page_size_tokens: Slots are lent in pages of so many.
        eviction_interval_tokens: How many tokens leave the window before their slots are freed.
        max_running_requests: The most that run at once.
        pools: In the order of the module's docstring.
    """

    dp_rank: int
    sglang_version: str
    patch_series: str | None
    speculative_algorithm: str | None
    draft_kv_ratio: float | None
    draft_window_tokens: int | None
    block_size_tokens: int | None
    page_size_tokens: int
    eviction_interval_tokens: int | None
    max_running_requests: int
    pools: tuple[PoolConfig, ...]


@dataclass(frozen=True)
class Pool:
    """One pool now; totals count since start. None where a figure does not apply to the pool.

    Attributes:
        name: Which pool.
        size_slots: Slots that can be lent.
        used_slots: Held by requests.
        evictable_slots: Held by the prefix cache alone.
        free_slots: Held by nobody.
        high_water_slots: The most that were used at once.
        evicted_slots_total: Taken from the prefix cache because a request needed room.
        delayed_admissions_total: Requests that had to wait because this pool had no room for them; see `Tally`.
        window_freed_slots_total: Freed because they left a running request's window.
        prefix_lost_tokens_total: Tokens that ``full`` had cached and that were computed again, because no window of
            this pool's slots was left with them. A prefix that was evicted from ``full`` with its window is not seen.
        held_max_slots: The most that one decoding request holds of its own, outside the prefix cache.
        held_bound_slots: What that should stay within.
    """

    name: PoolName
    size_slots: int
    used_slots: int
    evictable_slots: int
    free_slots: int
    high_water_slots: int
    evicted_slots_total: int
    delayed_admissions_total: int | None
    window_freed_slots_total: int | None
    prefix_lost_tokens_total: int | None
    held_max_slots: int | None
    held_bound_slots: int | None


@dataclass(frozen=True)
class Retractions:
    """Requests taken out of the running batch since start because the next step had no room in one pool.

    Attributes:
        cause: The pool that was short, the one short of most slots if several were; ``none`` if none was, as when
            SGLang retracts for its own tests.
        requests_total: Retracted; they wait and are computed again.
        input_tokens_total: Tokens of their prompts.
        output_tokens_total: Tokens they had generated.
        aborted_requests_total: Ended with an error, as retracting all others did not make room either. SGLang does not
            count these as retracted.
    """

    cause: Cause
    requests_total: int
    input_tokens_total: int
    output_tokens_total: int
    aborted_requests_total: int


@dataclass(frozen=True)
class Speculation:
    """The draft's work since start.

    Attributes:
        verify_steps_total: Verify steps, one for each request in each.
        accepted_tokens_total: Tokens they yielded: the draft's that were right, and the target's own one.
    """

    verify_steps_total: int
    accepted_tokens_total: int


@dataclass(frozen=True)
class Snapshot:
    """The pools of one scheduler at one moment.

    Attributes:
        dp_rank: The scheduler's data-parallel rank.
        unix_time_seconds: When.
        running_requests: Decoding.
        waiting_requests: Not admitted yet, or retracted.
        pools: In the order of the module's docstring.
        retractions: By cause; for each pool that can be one.
        speculation: None without a draft.
    """

    dp_rank: int
    unix_time_seconds: float
    running_requests: int
    waiting_requests: int
    pools: tuple[Pool, ...]
    retractions: tuple[Retractions, ...]
    speculation: Speculation | None


def held_bound(
    *, retained_slots: int, page_size_tokens: int, eviction_interval_tokens: int, reserve_tokens: int
) -> int:
    """Return the most slots of a sliding-window pool that a decoding request holds outside the prefix cache.

    However long it generates. A step first evicts, if as many tokens as the interval have left the window: whole pages,
    and what stays is `retained_slots`. Then it allocates up to `reserve_tokens` past the committed ones, in whole
    pages. So either fewer tokens than the interval behind the window or less than a page behind the retained slots is
    held too, and less than a page beyond the reserve (`free_swa_out_of_window_slots` in SGLang's `mem_cache/common.py`,
    `page_aligned_decode_alloc_lens` in `mem_cache/allocation_sizing.py`).

    Args:
        retained_slots: The window in whole pages; on a target with states, also back to the last checkpoint.
        page_size_tokens: Slots are lent and freed in pages of so many.
        eviction_interval_tokens: ``SGLANG_SWA_EVICTION_INTERVAL``.
        reserve_tokens: What a step allocates past the committed tokens.
    """
    slack = max(eviction_interval_tokens, page_size_tokens) - 1 + reserve_tokens + page_size_tokens - 1
    return (retained_slots + slack) // page_size_tokens * page_size_tokens


def window_pool_name(scheduler: Any) -> Literal["swa", "draft"] | None:
    """Return what the sliding-window side of the scheduler's allocator is, if it has one."""
    if not scheduler.is_hybrid_swa:
        return None
    return "swa" if getattr(scheduler.token_to_kv_pool_allocator, "draft_kv_pool", None) is None else "draft"


def _pool_bytes(pool: Any) -> int | None:
    gib = getattr(pool, "mem_usage", None)
    return None if gib is None else round(gib * GIB)  # SGLang divides by a power of two, so nothing is lost


def _request_cap(retained_slots: int, scheduler: Any) -> int | None:
    from sglang.srt.model_executor.pool_configurator import compute_swa_request_cap
    from sglang.srt.runtime_context import get_parallel, get_schedule

    schedule, dp_size = get_schedule(), get_parallel().attn_dp_size
    if schedule.chunked_prefill_size is None or schedule.chunked_prefill_size <= 0:
        return None
    requests = schedule.max_running_requests or scheduler.max_running_requests * dp_size
    return compute_swa_request_cap(
        page_size=scheduler.page_size, window=retained_slots, attn_dp_size=dp_size, max_running_requests=requests
    )


def _window_pool_config(name: Literal["swa", "draft"], size_slots: int, scheduler: Any) -> PoolConfig:
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
    from sglang.srt.mem_cache.allocator.swa import is_swa_req_ring
    from sglang.srt.runtime_context import mamba_track_grid

    allocator, tree_cache, page_size = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache, scheduler.page_size
    kv_pool = allocator.draft_kv_pool if name == "draft" else allocator.get_kvcache()
    size_bytes, window = _pool_bytes(getattr(kv_pool, "swa_kv_pool", None)), tree_cache.swa_retain_window
    if window is None or is_swa_req_ring(allocator):  # nothing is lent by the token there
        return PoolConfig(name, size_slots, size_bytes)
    retained = -(-window // page_size) * page_size
    if tree_cache.supports_mamba():
        retained += mamba_track_grid(page_size)
    cap = _request_cap(retained, scheduler)
    return PoolConfig(
        name=name,
        size_slots=size_slots,
        size_bytes=size_bytes,
        window_tokens=window,
        request_cap_slots=cap,
        headroom_slots=None if cap is None else size_slots - cap,
        cacheable_prefixes=None if cap is None else max(0, size_slots - cap) // retained,
        held_bound_slots=held_bound(
            retained_slots=retained,
            page_size_tokens=page_size,
            eviction_interval_tokens=_eviction_interval(),
            reserve_tokens=get_alloc_reserve_per_decode(),
        ),
    )


def _eviction_interval() -> int:
    from sglang.srt.environ import envs

    return max(1, envs.SGLANG_SWA_EVICTION_INTERVAL.get())


def read_config(scheduler: Any) -> Config:
    """Return what the engine of this scheduler was started with; called once, when it is complete."""
    from sglang.srt.runtime_context import get_parallel, get_spec
    from sglang.version import __version__

    from server_ext.image.installation import Installation

    spec, dp_rank = get_spec(), get_parallel().dp_rank
    algorithm = spec.speculative_algorithm
    dflash = algorithm == "DFLASH"
    window_pool = window_pool_name(scheduler)
    stats = scheduler.pool_stats_observer.get_pool_stats()
    kv_pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    pools = []
    if stats.full_capacity:  # a target with sliding layers alone has no such pool
        full_kv_pool = getattr(kv_pool, "full_kv_pool", None if window_pool == "swa" else kv_pool)
        pools.append(PoolConfig("full", stats.full_capacity, _pool_bytes(full_kv_pool)))
    if window_pool is not None:
        pools.append(_window_pool_config(window_pool, stats.swa_capacity, scheduler))
    if stats.is_hybrid_ssm:
        mamba_pool = scheduler.req_to_token_pool.mamba_pool
        pools.append(PoolConfig("mamba", mamba_pool.size, _pool_bytes(mamba_pool)))
    state = Installation.find().state()
    return Config(
        dp_rank=dp_rank or 0,
        sglang_version=__version__,
        patch_series=None if state is None else state.series_hash,
        speculative_algorithm=algorithm,
        # An engine without the patch has no such option.
        draft_kv_ratio=getattr(spec, "speculative_draft_kv_ratio", None) if dflash else None,
        draft_window_tokens=spec.speculative_draft_window_size if dflash else None,
        block_size_tokens=None if algorithm is None else spec.speculative_num_draft_tokens,
        page_size_tokens=scheduler.page_size,
        eviction_interval_tokens=None if window_pool is None else _eviction_interval(),
        max_running_requests=scheduler.max_running_requests,
        pools=tuple(pools),
    )


def used_slots(stats: Any, name: PoolName) -> int:
    """Return the slots that requests hold in one pool, from SGLang's ``PoolStats``."""
    return int(getattr(stats, f"{_STATS_PREFIX[name]}_num_used"))


def evictable_slots(stats: Any, name: PoolName) -> int:
    """Return the slots that the prefix cache alone holds in one pool, from SGLang's ``PoolStats``."""
    return int(getattr(stats, f"{_STATS_PREFIX[name]}_evictable_size"))


def free_slots(stats: Any, name: PoolName) -> int:
    """Return the slots that nothing holds in one pool, from SGLang's ``PoolStats``."""
    return int(getattr(stats, f"{_STATS_PREFIX[name]}_available_size"))


_STATS_PREFIX = {"full": "full", "swa": "swa", "draft": "swa", "mamba": "mamba"}


def held_max(requests: Sequence[Any], page_size_tokens: int, block_size_tokens: int) -> int:
    """Return the most sliding-window slots that one of the requests holds outside the prefix cache.

    A request counts once it has decoded more than a block since its last prefill, so for two steps or more: the first
    step cannot evict yet, as the prefill may still run.
    """
    from sglang.srt.managers.scheduler_components.pool_stats_observer import kv_private_swa_tokens

    decoding = (
        request.kv
        for request in requests
        if request.kv.holds_kv and request.kv.kv_committed_len - (request.extend_end or 0) > block_size_tokens
    )
    return max((kv_private_swa_tokens(kv, page_size_tokens) for kv in decoding), default=0)
