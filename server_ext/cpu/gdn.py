"""The gated delta rule and its causal convolution in plain torch.

Notation, for one value head of key dimension K and value dimension V: the state ``S`` is ``[V, K]`` (the layout of
SGLang's Mamba pool), and a token with log decay ``g``, write strength ``b``, query ``q``, key ``k``, value ``v`` does

    S <- exp(g) S;   S <- S + b (v - S k) k^T;   o = S q

(Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv:2412.06464). Queries and keys are l2-normalised and queries
scaled by ``K ** -0.5`` first. Within a block of tokens the rule is linear in the state ``S0`` before it: the rows
``b (v - S k)`` that the tokens write, stacked to ``W``, solve the unit lower-triangular system

    (I + tril(D * (b K) K^T, -1)) W = b V - exp(G) (b K) S0^T

with ``G`` the running sum of log decays and ``D[i, j] = exp(G[i] - G[j])``. So a block needs no loop over its tokens.

States and arithmetic are float32; values are rounded to the model's dtype exactly where Hugging Face's Qwen3.5 rounds
them, so that greedy text agrees.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

CHUNK_TOKENS = 64
"""Tokens that `chunked_delta_rule` solves together; SGLang takes prefix-cache snapshots on this grid."""

_L2_EPS = 1e-6
_ACTIVATIONS = {"silu": F.silu, "swish": F.silu, "sigmoid": torch.sigmoid}


def gates(
    a_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log decay (float32) and the write strength (``b``'s dtype) of each token and value head.

    ``a`` and ``b`` are ``[tokens, heads]``, ``a_log`` and ``dt_bias`` ``[heads]``.
    """
    return -a_log.float().exp() * F.softplus(a.float() + dt_bias.float()), b.sigmoid()


class _Block(NamedTuple):
    """What a block of T tokens is before its initial state is known; float32, ``[..., heads, T, ...]``."""

    written: torch.Tensor
    """``W`` for a zero initial state, ``[T, V]``."""
    read_back: torch.Tensor
    """``W`` loses this times ``S0^T``, ``[T, K]``."""
    queries: torch.Tensor
    """Decayed from the start of the block, ``[T, K]``."""
    attention: torch.Tensor
    """From each query to the keys up to its own, decayed, ``[T, T]``."""
    keys: torch.Tensor
    between: torch.Tensor
    """``D`` with zeros above the diagonal, ``[T, T]``."""
    from_start: torch.Tensor
    """``exp(G)``, ``[T, 1]``."""


def _solve(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor
) -> _Block:
    """Solve each block's system. Inputs are float32, ``[..., heads, T, dim]`` and ``[..., heads, T]``."""
    total = log_decay.cumsum(-1)
    future = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(future, float("-inf")).exp()
    from_start = total.exp()[..., None]
    strong_key = key * beta[..., None]
    right = torch.cat([value * beta[..., None], strong_key * from_start], dim=-1)
    system = (strong_key @ key.transpose(-1, -2)) * between
    written, read_back = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        [value.shape[-1], key.shape[-1]], dim=-1
    )
    attention = (query @ key.transpose(-1, -2)) * between
    return _Block(written, read_back, query * from_start, attention, key, between, from_start)


def _heads_first(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return all five in float32 with value heads before tokens; queries and keys normalised, scaled and repeated.

    Inputs are ``[..., tokens, heads, dim]`` and ``[..., tokens, value heads]``; each query/key head serves a contiguous
    group of value heads.
    """
    q, k, v = (x.transpose(-3, -2).float() for x in (query, key, value))
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + _L2_EPS) * q.shape[-1] ** -0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + _L2_EPS)
    group = v.shape[-3] // k.shape[-3]
    q, k = (x.repeat_interleave(group, dim=-3) for x in (q, k))
    return q, k, v, log_decay.transpose(-1, -2).float(), beta.transpose(-1, -2).float()


def block_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the rule over a batch of equally long short blocks (decode: one token; verify: one draft block).

    ``query``, ``key`` are ``[batch, T, key heads, K]``, ``value`` ``[batch, T, value heads, V]``, ``log_decay`` and
    ``beta`` ``[batch, T, value heads]``, ``state`` ``[batch, value heads, V, K]``. Returns the output, shaped and typed
    like ``value``, and the float32 state after every token, ``[batch, T, value heads, V, K]``.
    """
    block = _solve(*_heads_first(query, key, value, log_decay, beta))
    state = state.float()
    transposed = state.transpose(-1, -2)
    written = block.written - block.read_back @ transposed
    output = block.queries @ transposed + block.attention @ written
    # After token t: the decayed initial state and every write up to t, each decayed since.
    since = written.unsqueeze(-3) * block.between[..., None]
    states = since.transpose(-1, -2) @ block.keys.unsqueeze(-3)
    states += block.from_start[..., None] * state.unsqueeze(-3)
    return output.transpose(1, 2).to(value.dtype), states.transpose(1, 2)


def chunked_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    snapshot_chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Run the rule over one sequence of any length, `CHUNK_TOKENS` at a time.

    Shapes are those of `block_delta_rule` without the batch dimension. Returns the output, the float32 state after the
    last token, and the state before chunk ``snapshot_chunk`` if that is given and not negative.
    """
    tokens = value.shape[0]
    chunks = -(-tokens // CHUNK_TOKENS)
    # A padding token neither decays (g = 0) nor writes (beta = 0).
    padded = (
        F.pad(x, (0,) * (2 * x.dim() - 2) + (0, chunks * CHUNK_TOKENS - tokens)).unflatten(0, (chunks, CHUNK_TOKENS))
        for x in (query, key, value, log_decay, beta)
    )
    block = _solve(*_heads_first(*padded))
    kept_keys = block.keys * block.between[..., -1, :, None]
    decay = block.from_start[..., -1:, :]

    state, snapshot, outputs = state.float(), None, []
    for chunk in range(chunks):
        if chunk == snapshot_chunk:
            snapshot = state.clone()
        transposed = state.transpose(-1, -2)
        written = block.written[chunk] - block.read_back[chunk] @ transposed
        outputs.append(block.queries[chunk] @ transposed + block.attention[chunk] @ written)
        state = state * decay[chunk] + written.transpose(-1, -2) @ kept_keys[chunk]
    output = torch.stack(outputs).transpose(1, 2).flatten(0, 1)[:tokens]
    return output.to(value.dtype), state, snapshot


def causal_conv(
    x: torch.Tensor, history: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve each channel over time, continuing from ``history``.

    ``x`` is ``[batch, channels, tokens]``, ``history`` the ``width - 1`` inputs before it, ``weight`` ``[channels,
    width]``. Returns the output, shaped like ``x``, and history and input joined, ``[batch, channels, width - 1 +
    tokens]``: its columns ``t`` to ``t + width - 2`` are the history after ``t`` tokens.
    """
    joined = torch.cat([history.to(x.dtype), x], dim=-1)
    output = F.conv1d(joined, weight.unsqueeze(1), bias, groups=weight.shape[0])
    return output if activation is None else _ACTIVATIONS[activation](output), joined


def gated_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float, activation: str
) -> torch.Tensor:
    """Normalise the last dimension of ``x`` and multiply by ``activation(gate)``; ``gate`` is shaped like ``x``."""
    normed = x.float()
    normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps)
    return (weight * normed.to(x.dtype) * _ACTIVATIONS[activation](gate.float())).to(x.dtype)
