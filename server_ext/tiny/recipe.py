"""What makes a tiny pair: the two configurations and how long each model is trained.

Configuration keys are those of the Hugging Face config.json that SGLang reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from server_ext.errors import UserError
from server_ext.tiny import chat

BLOCK_SIZE = 8
WINDOW_TOKENS = 64
CONTEXT_TOKENS = 16384


@dataclass(frozen=True)
class Stage:
    """A stretch of training: `steps` steps over `sequences` sequences of `tokens` tokens."""

    steps: int
    sequences: int
    tokens: int


@dataclass(frozen=True)
class Recipe:
    """One pair. `target` and `draft` are the content of the two config.json files.

    `query_key_norm` is the first value of the weights that scale normed queries and keys; `None` leaves the library's.
    """

    name: str
    summary: str
    target: dict[str, Any]
    draft: dict[str, Any]
    target_stages: tuple[Stage, ...]
    draft_stage: Stage
    query_key_norm: float | None = None
    blocks_per_sequence: int = 16

    @property
    def vocab_size(self) -> int:
        """Number of tokens, the same for both models and the tokenizer."""
        return int(self.target["vocab_size"])


def draft_config(target: dict[str, Any], *, layers: int, target_layer_ids: tuple[int, ...]) -> dict[str, Any]:
    """config.json of an all-sliding draft for a target.

    `is_causal` is explicit because SGLang takes a sliding draft layer without it for a causal one
    (`models/dflash.py`, `_get_dflash_layer_attention_params`).
    """
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": target["vocab_size"],
        "hidden_size": target["hidden_size"],
        "intermediate_size": 2 * target["hidden_size"],
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": CONTEXT_TOKENS,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_sliding_window": True,
        "sliding_window": WINDOW_TOKENS,
        "layer_types": ["sliding_attention"] * layers,
        "is_causal": False,
        "block_size": BLOCK_SIZE,
        "num_target_layers": target["num_hidden_layers"],
        "dflash_config": {
            "mask_token": chat.MASK,
            "mask_token_id": chat.SPECIAL_TOKENS.index(chat.MASK),
            "target_layer_ids": list(target_layer_ids),
        },
    }


def _common(**own: Any) -> dict[str, Any]:
    """Keys that every target has, then its own."""
    return {
        "dtype": "bfloat16",
        "vocab_size": 768,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": CONTEXT_TOKENS,
        "tie_word_embeddings": False,
        "pad_token_id": chat.SPECIAL_TOKENS.index(chat.END_OF_TEXT),
        "eos_token_id": chat.SPECIAL_TOKENS.index(chat.IM_END),
        "bos_token_id": None,
        **own,
    }


_TARGET_STAGES = (Stage(steps=240, sequences=16, tokens=96), Stage(steps=140, sequences=6, tokens=256))
_DRAFT_STAGE = Stage(steps=180, sequences=8, tokens=256)


def _qwen3() -> Recipe:
    target = _common(
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        hidden_act="silu",
        attention_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return Recipe(
        name="qwen3",
        summary="full-attention target (Qwen3), all-sliding draft",
        target=target,
        draft=draft_config(target, layers=2, target_layer_ids=(0, 1, 2)),
        target_stages=_TARGET_STAGES,
        draft_stage=_DRAFT_STAGE,
        query_key_norm=2.0,
    )


def _swa() -> Recipe:
    layer_types = ["sliding_attention"] * 3 + ["full_attention"]
    target = _common(
        architectures=["Gemma4ForCausalLM"],
        model_type="gemma4_text",
        hidden_activation="gelu_pytorch_tanh",
        layer_types=layer_types,
        sliding_window=WINDOW_TOKENS,
        hidden_size_per_layer_input=0,
        # Hugging Face sizes the sliding layers by the plain keys and the full ones by `global_head_dim`, SGLang the
        # full ones by the plain keys and the sliding ones by `swa_*`.
        global_head_dim=32,
        swa_num_key_value_heads=2,
        swa_head_dim=32,
        swa_v_head_dim=32,
    )
    return Recipe(
        name="swa",
        summary="hybrid sliding-window target (Gemma 4 text), all-sliding draft",
        target=target,
        draft=draft_config(target, layers=2, target_layer_ids=(0, 1, 2)),
        target_stages=_TARGET_STAGES,
        draft_stage=_DRAFT_STAGE,
    )


def _gdn() -> Recipe:
    interval = 2
    target = _common(
        architectures=["Qwen3_5ForCausalLM"],
        model_type="qwen3_5_text",
        hidden_act="silu",
        attention_bias=False,
        layer_types=["linear_attention", "full_attention"] * 2,
        # Hugging Face reads `layer_types`, SGLang the interval.
        full_attention_interval=interval,
        linear_conv_kernel_dim=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        # Hugging Face reads it above; here it would put this model's default, which SGLang reads.
        partial_rotary_factor=1.0,
    )
    return Recipe(
        name="gdn",
        summary="linear-attention hybrid target (Qwen3.5 text), all-sliding draft",
        target=target,
        draft=draft_config(target, layers=2, target_layer_ids=(0, 1, 2)),
        target_stages=_TARGET_STAGES,
        draft_stage=_DRAFT_STAGE,
        query_key_norm=1.0,  # this model adds one to the weight
    )


RECIPES = {recipe.name: recipe for recipe in (_qwen3(), _swa(), _gdn())}
"""Every pair the maker knows, by name."""


def recipe_named(name: str) -> Recipe:
    """The recipe of a pair, or `UserError` with the names there are."""
    if name not in RECIPES:
        raise UserError(f"unknown pair {name!r}; the pairs are: {', '.join(RECIPES)}")
    return RECIPES[name]
