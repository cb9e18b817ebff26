"""SGLang's own sizing code, called without a GPU, weights or a process. No other module here imports SGLang.

What ``ModelRunner`` does before it allocates, it does from the same objects: options resolved, both configurations
read, a ``KVCacheConfigurator`` over them. It runs on the CPU reference platform; beside a CUDA device that takes
``SGLANG_PLATFORM=cpu_reference`` before the first call.
"""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from server_ext.errors import UserError
from server_ext.planner.inputs import EngineOptions, Memory

_GIB = 2**30


class Refused(UserError):
    """The engine would not start with these options; the message is the engine's own."""


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
    with _engine_errors(options):
        return _sizes(_configurator(options), memory)


def smallest_draft_kv_ratio(options: EngineOptions, memory: Memory) -> float | None:
    """Return the smallest ratio that the engine starts with, `None` when no ratio below 1 holds the requests.

    Raises `Refused` when the pair or the options rule out a bounded pool.
    """
    with _engine_errors(options):
        kv = _configurator(replace(options, draft_kv_ratio=0.001))
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


def weights_gib(options: EngineOptions, *, target: bool) -> float:
    """Return what a rank's weights of the target or the draft take: SGLang's own model class, built without data."""
    with _engine_errors(options):
        import torch
        from sglang.srt.model_loader.utils import get_model_architecture
        from sglang.srt.runtime_context import get_parallel

        kv = _configurator(options)
        model_config = kv.model_config if target else kv.spec_aux_config.draft_model_config
        model_class, _ = get_model_architecture(model_config)
        torch.set_default_dtype(model_config.dtype)
        try:
            with torch.device("meta"), get_parallel().override(**_stand_in_groups(options.tensor_parallel_size)):
                model = model_class(config=model_config.hf_config)
        finally:
            torch.set_default_dtype(torch.float32)
        return sum(weight.numel() * weight.element_size() for weight in model.parameters()) / _GIB


def _stand_in_groups(tensor_parallel_size: int) -> dict[str, Any]:
    """Return what model classes ask of their process groups: a size and a place in it."""
    from sglang.srt.runtime_context import get_parallel

    wide = {"world_group", "tp_group", "attn_tp_group", "moe_tp_group"}
    return {
        name: SimpleNamespace(
            world_size=tensor_parallel_size if name in wide else 1,
            rank=0,
            rank_in_group=0,
            local_rank=0,
            is_first_rank=True,
            is_last_rank=True,
            cpu_group=None,
            device_group=None,
        )
        for name in dir(type(get_parallel()))
        if name.endswith("_group")
    }


@contextlib.contextmanager
def _engine_errors(options: EngineOptions) -> Iterator[None]:
    """Keep the engine's log quiet, and turn its errors into one line."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except UserError:
        raise
    except (ValueError, RuntimeError) as error:
        raise Refused(" ".join(str(error).split())) from error
    except Exception as error:  # of as many kinds as there are ways to write a wrong config.json
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"SGLang cannot size {options.target} with {options.draft}: {reason}") from error
    finally:
        logging.disable(disabled)


def _server_options(options: EngineOptions) -> dict[str, Any]:
    named = {
        "model_path": options.target,
        "speculative_algorithm": "DFLASH",
        "speculative_draft_model_path": options.draft,
        "speculative_draft_kv_ratio": options.draft_kv_ratio,
        "speculative_draft_window_size": options.draft_window_size,
        "max_running_requests": options.max_running_requests,
        "page_size": options.page_size,
        "chunked_prefill_size": options.chunked_prefill_size,
        "mem_fraction_static": options.mem_fraction_static,
        "tp_size": options.tensor_parallel_size,
        "context_length": options.context_length,
        "kv_cache_dtype": options.kv_cache_dtype,
        "swa_full_tokens_ratio": options.swa_full_tokens_ratio,
        "max_mamba_cache_size": options.max_mamba_cache_size,
        "mamba_full_memory_ratio": options.mamba_full_memory_ratio,
        "max_total_tokens": options.max_total_tokens,
    }
    return {name: value for name, value in named.items() if value is not None}


def _configurator(options: EngineOptions) -> Any:
    """Return the target runner's `KVCacheConfigurator`, with the options published as a scheduler publishes them."""
    from sglang.srt.configs.model_config import AttentionArch, ModelConfig
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype
    from sglang.srt.model_executor.model_runner_components.layer_setup import resolve_layer_indices
    from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import (
        resolve_spec_aux_hidden_state_config,
    )
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, get_model, get_schedule, get_spec, publish
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    load_plugins()
    server_args = ServerArgs(skip_tokenizer_init=True, **_server_options(options))
    server_args.resolve_once()
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    model_config = ModelConfig.from_server_args(server_args)
    algorithm = SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm)
    kv_cache_dtype_name, kv_cache_dtype = configure_kv_cache_dtype(
        server_args_kv_cache_dtype=get_model().kv_cache_dtype,
        model=None,
        model_dtype=model_config.dtype,
        is_draft_worker=False,
        is_dflash=True,
        speculative_draft_attention_backend=get_spec().speculative_draft_attention_backend,
    )
    return KVCacheConfigurator(
        device="cpu",
        gpu_id=0,
        attn_dp_size=1,
        pp_size=1,
        pp_group=None,
        model=None,
        model_config=model_config,
        server_args=server_args,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_dtype_str=kv_cache_dtype_name,
        model_dtype=model_config.dtype,
        page_size=get_schedule().page_size,
        sliding_window_size=model_config.sliding_window_size if model_config.is_hybrid_swa else None,
        spec_algorithm=algorithm,
        is_draft_worker=False,
        post_capture_kv_active=False,
        spec_aux_config=resolve_spec_aux_hidden_state_config(
            server_args=server_args, model_config=model_config, spec_algorithm=algorithm, is_draft_worker=False
        ),
        is_hybrid_swa=model_config.is_hybrid_swa,
        is_hybrid_swa_compress=model_config.is_hybrid_swa_compress,
        use_mla_backend=model_config.attention_arch == AttentionArch.MLA,
        layer_info=resolve_layer_indices(model=SimpleNamespace(), model_config=model_config, is_draft_worker=False),
        forward_stream=None,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=None,
        memory_pool_config=None,
    )


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
