"""The pools that SGLang's own sizing code gives for options and a memory."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from server_ext.planner.inputs import EngineOptions, Memory
from server_ext.planner.runner import Refused, configurator, engine_errors

_GIB = 2**30


@dataclass(frozen=True)
class StatePool:
    """The pool of linear-attention states: slots, how many a running request takes, and bytes of all of them."""

    slots: int
    slots_per_request: int
    bytes: int


@dataclass(frozen=True)
class WindowPool:
    """The pool that a window bounds: the draft's, or that of a target's own sliding layers.

    `request_cap_tokens` is the most that running requests hold besides what the prefix cache keeps for them, and
    `retained_tokens` what one cached prefix or one running request keeps of its history.
    """

    tokens: int
    request_cap_tokens: int
    retained_tokens: int


@dataclass(frozen=True)
class Sizes:
    """What the engine would allocate on one GPU; `window` is `None` when every pool follows the target's tokens."""

    kv_bytes: int
    target_tokens: int
    target_bytes_per_token: int
    draft_bytes_per_token: int
    swa_bytes_per_token: int
    draft_tokens: int
    running_requests: int
    block_size: int
    context_length: int
    window: WindowPool | None
    state: StatePool | None

    @property
    def target_pool_bytes(self) -> int:
        """Bytes of the target's pools."""
        swa_tokens = self.window.tokens if self.window and self.swa_bytes_per_token else 0
        return self.target_tokens * self.target_bytes_per_token + swa_tokens * self.swa_bytes_per_token

    @property
    def draft_pool_bytes(self) -> int:
        """Bytes of the draft's pool."""
        return self.draft_tokens * self.draft_bytes_per_token


def size(options: EngineOptions, memory: Memory) -> Sizes:
    """Return the pools of a start with these options. Raises `Refused` with what the engine would say."""
    with engine_errors(options):
        return _sizes(configurator(options), memory)


def smallest_draft_kv_ratio(options: EngineOptions, memory: Memory) -> float | None:
    """Return the smallest ratio that the engine starts with, `None` when no ratio below 1 holds the requests.

    Raises `Refused` when the pair or the options rule out a bounded pool.
    """
    with engine_errors(options):
        kv = configurator(replace(options, draft_kv_ratio=0.001))
        budget_bytes = _kv_budget_bytes(kv, memory)
        try:
            kv.config_from_budget(budget_bytes)
        except ValueError as error:
            # The engine finds it for its message; there is no other way to ask for it.
            found = re.search(r"Use --speculative-draft-kv-ratio (\S+) or more", str(error))
            if not found and "No ratio below 1" not in str(error):
                raise
            return float(found[1]) if found else None
        return 0.001


def _rest_gib(kv: Any, memory: Memory) -> float:
    """Return what is left for pools: the static share without weights and what multimodal inputs reserve.

    Restates the first lines of ``KVCacheConfigurator._profile_available_bytes``, which measures a device.
    """
    from sglang.srt.mem_cache.kv_cache_configurator import mm_runtime_reservation_gb
    from sglang.srt.runtime_context import get_mm, get_schedule

    slack_gib = memory.free_gib * (1 - get_schedule().mem_fraction_static)
    multimodal_gib = mm_runtime_reservation_gb(
        is_multimodal=kv.model_config.is_multimodal, mm_feature_transport=get_mm().mm_feature_transport
    )
    return memory.free_gib - memory.weights_gib - slack_gib - multimodal_gib


def _kv_budget_bytes(kv: Any, memory: Memory) -> int:
    """Return what is left for KV once a linear-attention target has its states."""
    rest_gib = _rest_gib(kv, memory)
    if kv.mambaish_config is not None and rest_gib > 0:
        rest_gib = kv._handle_max_mamba_cache(rest_gib)
    if rest_gib <= 0:
        raise Refused(
            f"{memory.weights_gib:.1f} GiB of weights leave no room for KV in {memory.free_gib:.1f} GiB with "
            f"--mem-fraction-static {kv.server_args.mem_fraction_static:g}; raise it, or take more or larger GPUs "
            "(--tensor-parallel-size, --gpu)"
        )
    return int(rest_gib * _GIB)


def _sizes(kv: Any, memory: Memory) -> Sizes:
    from sglang.srt.runtime_context import get_schedule, get_spec

    budget_bytes = _kv_budget_bytes(kv, memory)
    config = kv.config_from_budget(budget_bytes)
    tokens = config.max_total_num_tokens
    running_requests = kv.resolve_max_num_reqs(tokens)
    state = None
    if kv.mambaish_config is not None:
        state = StatePool(
            slots=get_schedule().max_mamba_cache_size,
            slots_per_request=kv._calculate_mamba_ratio(),
            bytes=int(_rest_gib(kv, memory) * _GIB) - budget_bytes,
        )
    pools = _pools(kv, config)
    return Sizes(
        kv_bytes=budget_bytes,
        target_tokens=tokens,
        target_bytes_per_token=pools.target_bytes,
        draft_bytes_per_token=pools.draft_bytes,
        swa_bytes_per_token=pools.swa_bytes,
        draft_tokens=pools.window.tokens if pools.window and not pools.swa_bytes else tokens,
        running_requests=running_requests,
        block_size=get_spec().speculative_num_draft_tokens,
        context_length=kv.model_config.context_len,
        window=pools.window,
        state=state,
    )


@dataclass(frozen=True)
class _Pools:
    window: WindowPool | None
    target_bytes: int
    draft_bytes: int
    swa_bytes: int


def _pools(kv: Any, config: Any) -> _Pools:
    """Read bytes per token and the bounded pool off the pool configurator, which is of another class for each kind."""
    from sglang.srt.model_executor.pool_configurator import (
        DraftKVRatioPoolConfigurator,
        HybridSWAPoolConfigurator,
        compute_swa_request_cap,
        create_memory_pool_configurator,
    )

    sizer = create_memory_pool_configurator(kv)
    draft_bytes = kv.dflash_draft_cell_size_per_token or 0
    if isinstance(sizer, HybridSWAPoolConfigurator):
        window = kv.sliding_window_size
        pool = WindowPool(
            tokens=config.swa_max_total_num_tokens,
            request_cap_tokens=compute_swa_request_cap(page_size=kv.page_size, window=window, attn_dp_size=1),
            retained_tokens=-(-window // kv.page_size) * kv.page_size,
        )
        return _Pools(pool, sizer._full_cell_bytes(), draft_bytes, sizer._swa_cell_bytes())
    target_bytes = sizer._cell_size - draft_bytes
    if not isinstance(sizer, DraftKVRatioPoolConfigurator):
        return _Pools(None, target_bytes, draft_bytes, 0)
    pool = WindowPool(config.swa_max_total_num_tokens, sizer._request_cap, sizer._retained_tokens)
    return _Pools(pool, target_bytes, draft_bytes, 0)
