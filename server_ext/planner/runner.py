"""The target runner's sizing object of SGLang, for options, without a GPU, weights or a process.

What ``ModelRunner`` does before it allocates is done here from the same objects: options resolved, both configurations
read, a ``KVCacheConfigurator`` over them. It runs on the CPU reference platform; beside a CUDA device that takes
``SGLANG_PLATFORM=cpu_reference`` before the first call.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from server_ext.errors import UserError
from server_ext.planner.inputs import EngineOptions


class Refused(UserError):
    """The engine would not start with these options; the message is the engine's own."""


@contextlib.contextmanager
def engine_errors(options: EngineOptions) -> Iterator[None]:
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


def configurator(options: EngineOptions) -> Any:
    """Return the target runner's `KVCacheConfigurator` for what a plan asks of the engine."""
    return configurator_with(**_server_options(options))


def configurator_with(**options: Any) -> Any:
    """Return the target runner's `KVCacheConfigurator`, with `options` published as a scheduler publishes them.

    Args:
        options: fields of SGLang's ``ServerArgs``; ``model_path`` is a folder with a config.json.
    """
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
    server_args = ServerArgs(skip_tokenizer_init=True, **options)
    server_args.resolve_once()
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    model_config = ModelConfig.from_server_args(server_args)
    algorithm = SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm)
    kv_cache_dtype_name, kv_cache_dtype = configure_kv_cache_dtype(
        server_args_kv_cache_dtype=get_model().kv_cache_dtype,
        model=None,
        model_dtype=model_config.dtype,
        is_draft_worker=False,
        is_dflash=algorithm.is_dflash(),
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
