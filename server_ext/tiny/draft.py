"""The DFLASH draft in plain torch: the maths of SGLang's `DFlashDraftModel` without its engine.

A draft has no embedding and no head of its own. For a sequence with committed tokens 0..n-1 and the next token already
known (the anchor, at position n), it reads target hidden states of the committed tokens as keys and values, and a block
of embeddings (the anchor, then mask tokens) as queries; row i of its output, through the target's head, is the draft of
the token at position n + i. Rows see their whole block in both directions and the committed tokens less than
`sliding_window` positions behind them. Parameter names are those of the checkpoint that SGLang loads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding in the half-split layout.

    Args:
        x: [..., length, heads, head_dim].
        positions: [..., length].
        theta: the rotary base.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = positions[..., None].float() * frequencies
    cos, sin = angles.cos()[..., None, :].to(x.dtype), angles.sin()[..., None, :].to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class DraftAttention(nn.Module):
    """Attention of a block over the committed window and itself."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, self.head_dim = config["hidden_size"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.window, self.theta = config["sliding_window"], config["rope_parameters"]["rope_theta"]
        self.q_proj = nn.Linear(hidden, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config["rms_norm_eps"])
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config["rms_norm_eps"])

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [..., length, kv_heads, head_dim] of rows x [..., length, hidden]."""
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        return rotate(k, positions, self.theta), self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def forward(
        self, x: Tensor, positions: Tensor, context: tuple[Tensor, Tensor], context_positions: Tensor
    ) -> Tensor:
        """Args: x [blocks, block, hidden], positions [blocks, block], context keys and values
        [blocks, window, kv_heads, head_dim], context_positions [blocks, window], negative where there is none."""
        q = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), positions, self.theta)
        k, v = self.keys_values(x, positions)
        k, v = torch.cat((context[0], k), dim=1), torch.cat((context[1], v), dim=1)
        distance = positions[:, :, None] - torch.cat((context_positions, positions), dim=1)[:, None, :]
        visible = distance < self.window
        visible[..., : context_positions.shape[1]] &= context_positions[:, None, :] >= 0
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), visible[:, None], enable_gqa=True
        )
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class DraftMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to [..., hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"])
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"])
        self.mlp = DraftMlp(config)

    def forward(
        self, x: Tensor, positions: Tensor, context: tuple[Tensor, Tensor], context_positions: Tensor
    ) -> Tensor:
        """Arguments as in `DraftAttention.forward`."""
        x = x + self.self_attn(self.input_layernorm(x), positions, context, context_positions)
        return x + self.mlp(self.post_attention_layernorm(x))


class Draft(nn.Module):
    """A DFLASH draft; `config` is the content of its config.json."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.block_size, self.window = config["block_size"], config["sliding_window"]
        self.fc = nn.Linear(len(config["dflash_config"]["target_layer_ids"]) * hidden, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps=config["rms_norm_eps"])
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(hidden, eps=config["rms_norm_eps"])

    def forward(self, features: Tensor, rows: Tensor, starts: Tensor, noise: Tensor) -> Tensor:
        """Draft one block for each start.

        Args:
            features: [sequences, length, layers x hidden], target hidden states of the layers the config names.
            rows: [blocks], which sequence a block belongs to.
            starts: [blocks], the anchor's position, which is the number of committed tokens.
            noise: [blocks, block, hidden], target embeddings of the anchor and the mask tokens.

        Returns:
            [blocks, block, hidden], for the target's head; row 0 stands for the anchor and is not used.
        """
        committed = self.hidden_norm(self.fc(features))
        everywhere = torch.arange(features.shape[1]).expand(features.shape[:2])
        positions = starts[:, None] + torch.arange(self.block_size)
        window_positions = starts[:, None] + torch.arange(1 - self.window, 0)
        window_index = window_positions.clamp(min=0)
        x = noise
        for layer in self.layers:
            keys, values = layer.self_attn.keys_values(committed, everywhere)
            context = keys[rows[:, None], window_index], values[rows[:, None], window_index]
            x = layer(x, positions, context, window_positions)
        return self.norm(x)
