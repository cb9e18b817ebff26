"""Pool sizes that SGLang works out for a model pair and its options, without weights.

As a program: read cases as JSON on standard input, print the pool configuration of each, so that two installations of
SGLang can be held against each other.
"""

import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from server_ext.planner.runner import configurator_with

DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 16384,
    "vocab_size": 768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
TARGETS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "llama": DENSE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 4},
    "linear attention": DENSE
    | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "full_attention_interval": 2,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 16,
    },
    "sliding windows": DENSE
    | {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 64,
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 32,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 32,
        "swa_v_head_dim": 32,
    },
}
DRAFT = DENSE | {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 2,
    "use_sliding_window": True,
    "sliding_window": 64,
    "layer_types": ["sliding_attention"] * 2,
    "is_causal": False,
    "block_size": 8,
    "num_target_layers": 4,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 1, 2]},
}
DFLASH = {"speculative_algorithm": "DFLASH", "speculative_draft_window_size": 64}
OPTIONS = {"max_running_requests": 8, "chunked_prefill_size": 256, "mem_fraction_static": 0.5}


def write_model(folder: Path, config: dict[str, Any]) -> str:
    """Write a model folder that holds a configuration and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def configurator(target: str, **options: Any) -> Any:
    """Return SGLang's `KVCacheConfigurator` of a target runner on the CPU, for a model folder and server options."""
    return configurator_with(model_path=target, **OPTIONS | options)


def draft_configurator(target: Any) -> Any:
    """Return the `KVCacheConfigurator` of the draft runner beside a target's."""
    from sglang.srt.model_executor.model_runner_components.layer_setup import resolve_layer_indices

    model_config = target.spec_aux_config.draft_model_config
    return dataclasses.replace(
        target,
        is_draft_worker=True,
        model_config=model_config,
        layer_info=resolve_layer_indices(model=SimpleNamespace(), model_config=model_config, is_draft_worker=True),
    )


def pool_config(target: str, budget_bytes: int, **options: Any) -> dict[str, Any]:
    """Return the fields of the `MemoryPoolConfig` for a KV budget."""
    from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator

    kv = configurator(target, **options)
    config = kv.config_from_budget(budget_bytes)
    config.max_running_requests = OPTIONS["max_running_requests"]
    return dataclasses.asdict(create_memory_pool_configurator(kv).finalize_with_max_running_requests(config))


def main() -> None:
    """Print the pool configuration of each case ``[target, with draft, budget in bytes, options]``."""
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        draft = write_model(Path(scratch) / "draft", DRAFT)
        for name, with_draft, budget_bytes, options in json.load(sys.stdin):
            target = write_model(Path(scratch) / name, TARGETS[name])
            spec = DFLASH | {"speculative_draft_model_path": draft} if with_draft else {}
            results.append(pool_config(target, budget_bytes, **spec | options))
    print("\n" + json.dumps(results))


if __name__ == "__main__":
    main()
