"""Native versions of the Triton launches on the path of a linear-attention hybrid (Qwen3.5 to 3.8).

Everything else on that path, such as pools, copy-on-write of cached states and the choice of what to snapshot, is
SGLang's own code, which takes its torch branch here. Arguments that only place a GPU launch are accepted and unused.
"""

from itertools import pairwise
from typing import Any

import torch
from sglang.srt.layers.attention.linear.kernels.kernel_backend import LinearAttnKernelBase

from server_ext.cpu import gdn
from server_ext.cpu.substitutes import substitutes

_KERNELS = "sglang.kernels.ops"


def _spans(query_start_loc: torch.Tensor) -> list[slice]:
    """Return each request's tokens in a packed batch."""
    return [slice(start, stop) for start, stop in pairwise(query_start_loc.tolist())]


@substitutes("sglang.srt.layers.attention.linear.kernels.gdn_triton.TritonGDNKernel")
class NativeGDNKernel(LinearAttnKernelBase):
    """The gated delta rule for SGLang's three forward modes, over its state pool.

    ``ssm_states`` is one layer's pool, ``[slots, value heads, V, K]``, and ``cache_indices`` the slot of each request.
    Queries, keys and values come packed, ``[1, tokens, heads, dim]``.
    """

    supports_track_state_snapshot = True

    def decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        ssm_states: torch.Tensor,
        cache_indices: torch.Tensor,
        **_: object,
    ) -> torch.Tensor:
        """Advance each request by one token and keep its new state. Returns ``[1, requests, value heads, V]``."""
        log_decay, beta = gdn.gates(A_log, a, b, dt_bias)
        q, k, v, log_decay, beta = (x.unsqueeze(1) for x in (q[0], k[0], v[0], log_decay, beta))
        output, states = gdn.block_delta_rule(q, k, v, log_decay, beta, ssm_states[cache_indices])
        ssm_states[cache_indices] = states[:, 0].to(ssm_states.dtype)
        return output.transpose(0, 1)

    def extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        *,
        ssm_states: torch.Tensor,
        cache_indices: torch.Tensor,
        query_start_loc: torch.Tensor,
        track_state: torch.Tensor | None = None,
        track_chunk_idx: torch.Tensor | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None, None]:
        """Run each request's new tokens from its slot's state and keep the state after them.

        ``query_start_loc`` is ``[requests + 1]``. Where ``track_chunk_idx`` of a request is not negative, its row of
        ``track_state`` (float32) takes the state before that chunk. Returns the output, ``[1, tokens, value heads,
        V]``; the other two places of SGLang's interface are for kernels without such snapshots.
        """
        spans = _spans(query_start_loc)
        chunks = [-1] * len(spans) if track_chunk_idx is None else track_chunk_idx.tolist()
        output = torch.empty_like(v)
        for request, (span, slot, chunk) in enumerate(zip(spans, cache_indices.tolist(), chunks, strict=True)):
            output[0, span], state, snapshot = gdn.chunked_delta_rule(
                q[0, span], k[0, span], v[0, span], g[0, span], beta[0, span], ssm_states[slot], snapshot_chunk=chunk
            )
            ssm_states[slot] = state.to(ssm_states.dtype)
            if track_state is not None and snapshot is not None:
                track_state[request] = snapshot
        return output, None, None

    def target_verify(
        self,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        ssm_states: torch.Tensor,
        cache_indices: torch.Tensor,
        query_start_loc: torch.Tensor,
        intermediate_states_buffer: torch.Tensor,
        intermediate_state_indices: torch.Tensor,
        retrieve_parent_token: torch.Tensor | None = None,
        **_: object,
    ) -> torch.Tensor:
        """Run each request's draft block, saving the state after every token; the slots' states stay.

        ``intermediate_states_buffer`` is ``[rows, steps, value heads, V, K]``; request ``i`` writes row
        ``intermediate_state_indices[i]``. Only chains, as DFLASH drafts them, not trees.
        """
        assert retrieve_parent_token is None, "the CPU reference platform verifies draft chains, not trees"
        requests = query_start_loc.shape[0] - 1
        log_decay, beta = gdn.gates(A_log, a, b, dt_bias)
        q, k, v, log_decay, beta = (x.unflatten(0, (requests, -1)) for x in (q[0], k[0], v[0], log_decay, beta))
        output, states = gdn.block_delta_rule(q, k, v, log_decay, beta, ssm_states[cache_indices[:requests]])
        rows = intermediate_state_indices[:requests]
        intermediate_states_buffer[rows, : states.shape[1]] = states.to(intermediate_states_buffer.dtype)
        return output.flatten(0, 1).unsqueeze(0)


@substitutes("torch.Tensor.pin_memory")
def pin_memory(self: torch.Tensor, device: object = None) -> torch.Tensor:
    """Return the tensor: nothing is copied to a device.

    The scheduler pins the mask of due snapshots for every decode batch; torch raises where there is no accelerator.
    """
    return self


@substitutes(f"{_KERNELS}.attention.linear.fused_gdn_gating.fused_gdn_gating")
def fused_gdn_gating(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `gdn.gates` of a packed batch, each ``[1, tokens, heads]``."""
    log_decay, beta = gdn.gates(A_log, a, b, dt_bias)
    return log_decay.unsqueeze(0), beta.unsqueeze(0)


@substitutes(f"{_KERNELS}.mamba.causal_conv1d_triton.causal_conv1d_fn")
def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    activation: str | None = "silu",
    **_: object,
) -> torch.Tensor:
    """Convolve packed sequences, each from the history in its slot, and keep the new histories.

    ``x`` is ``[channels, tokens]``, ``conv_states`` ``[slots, channels, width - 1]``; a request without initial state
    starts from zeros. Returns the output, shaped like ``x``.
    """
    history_len = weight.shape[1] - 1
    output = torch.empty_like(x)
    requests = zip(_spans(query_start_loc), cache_indices.tolist(), has_initial_state.tolist(), strict=True)
    for span, slot, continues in requests:
        history = conv_states[slot, None] if continues else torch.zeros_like(conv_states[slot, None])
        result, joined = gdn.causal_conv(x[None, :, span], history, weight, bias, activation)
        output[:, span] = result[0]
        conv_states[slot] = joined[0, :, -history_len:]
    return output


@substitutes(f"{_KERNELS}.mamba.causal_conv1d_triton.causal_conv1d_update")
def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: torch.Tensor,
    intermediate_conv_window: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    retrieve_next_token: torch.Tensor | None = None,
    **_: object,
) -> torch.Tensor:
    """Convolve equally long blocks from the histories in their slots.

    ``x`` is ``[requests, channels]`` (decode: the slot keeps the new history) or ``[requests, channels, tokens]``
    (target verify). With ``intermediate_conv_window``, ``[rows, steps, channels, width - 1]``, the history after every
    token goes there, to row ``intermediate_state_indices[i]``, and the slots stay. Returns the output, shaped like
    ``x``.
    """
    assert retrieve_next_token is None, "the CPU reference platform verifies draft chains, not trees"
    history_len = weight.shape[1] - 1
    block = x.unsqueeze(-1) if x.dim() == 2 else x
    output, joined = gdn.causal_conv(block, conv_state[conv_state_indices], weight, bias, activation)
    if intermediate_conv_window is None:
        conv_state[conv_state_indices] = joined[..., -history_len:].to(conv_state.dtype)
    else:
        # One step at a time: windows of neighbouring steps may share memory.
        for step in range(block.shape[-1]):
            window = joined[..., step + 1 : step + 1 + history_len].to(intermediate_conv_window.dtype)
            intermediate_conv_window[:, step][intermediate_state_indices] = window
    # The caller views the result with tokens before channels, which is how ``x`` lies in memory.
    return torch.empty_like(x).copy_(output.view(x.shape))


@substitutes(f"{_KERNELS}.mamba.mamba_state_scatter_triton.scatter_mamba_states_after_mtp_verify")
def scatter_mamba_states_after_mtp_verify(
    mamba_caches: Any,
    state_indices_tensor: torch.Tensor,
    last_correct_step_indices: torch.Tensor,
    mamba_track_indices: torch.Tensor | None,
    mamba_steps_to_track: torch.Tensor | None,
    src_indices_raw: torch.Tensor | None = None,
) -> None:
    """Commit each request's state after its last accepted draft token, and its snapshot if one is due.

    ``mamba_caches`` holds all layers: ``temporal`` ``[layers, slots, ...]``, ``intermediate_ssm`` ``[layers, rows,
    steps, ...]`` and lists of the same for the convolutions. Step ``-1`` means nothing to write. Requests own rows in
    batch order unless ``src_indices_raw`` names them.
    """
    states = [(mamba_caches.temporal, mamba_caches.intermediate_ssm)]
    states += zip(mamba_caches.conv, mamba_caches.intermediate_conv_window, strict=True)
    commits = [(state_indices_tensor, last_correct_step_indices)]
    if mamba_track_indices is not None:
        commits.append((mamba_track_indices, mamba_steps_to_track))
    for slots, steps in commits:
        rows = torch.arange(steps.shape[0]) if src_indices_raw is None else src_indices_raw
        due = (steps >= 0) & (slots >= 0)
        slots, steps, rows = slots[due], steps[due], rows[due]
        for pool, saved in states:
            pool[:, slots] = saved[:, rows, steps].to(pool.dtype)


@substitutes(f"{_KERNELS}.mamba.mamba_state_scatter_triton.track_mamba_states_all_layers")
def track_mamba_states_all_layers(
    conv_states_pool: torch.Tensor,
    ssm_states_pool: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Copy the states of the requests in ``mamba_track_mask`` to their snapshot slots, in all layers.

    Both pools are ``[layers, slots, ...]``; mask and indices are ``[requests]``.
    """
    due = mamba_track_mask[:batch_size].bool()
    source, target = cache_indices[:batch_size][due], mamba_track_indices[:batch_size][due]
    for pool in (conv_states_pool, ssm_states_pool):
        pool[:, target] = pool[:, source]


@substitutes(f"{_KERNELS}.attention.fla.layernorm_gated.rms_norm_gated")
def rms_norm_gated(
    *,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor,
    eps: float,
    group_size: int | None,
    norm_before_gate: bool,
    is_rms_norm: bool,
    activation: str,
) -> torch.Tensor:
    """Return `gdn.gated_rms_norm`, the one form that the Qwen3.5 family uses."""
    assert bias is None and group_size is None and norm_before_gate and is_rms_norm
    return gdn.gated_rms_norm(x, weight, z.reshape(x.shape), eps, activation)


@substitutes(f"{_KERNELS}.attention.triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat_contiguous")
def fused_qkvzba_split_reshape_cat_contiguous(
    mixed_qkvz: torch.Tensor,
    mixed_ba: torch.Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the projections ``[q | k | v | z]`` and ``[b | a]``, each ``[tokens, width]``.

    Returns ``q | k | v`` packed, ``z`` as ``[tokens, heads, dim]``, ``b`` and ``a`` as ``[tokens, heads]``.
    """
    value_width = num_heads_v * head_v
    mixed_qkv, z = mixed_qkvz.split([2 * num_heads_qk * head_qk + value_width, value_width], dim=-1)
    b, a = mixed_ba.split(num_heads_v, dim=-1)
    return mixed_qkv, z.unflatten(-1, (num_heads_v, head_v)), b, a


@substitutes(f"{_KERNELS}.elementwise.elementwise.fused_sigmoid_mul")
def fused_sigmoid_mul(attn_output: torch.Tensor, gate: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    """Gate the full-attention output, ``[tokens, width]``, with ``sigmoid(gate)``; ``gate`` may be split in heads."""
    opened = gate.reshape(attn_output.shape).sigmoid()
    return attn_output.mul_(opened) if inplace else attn_output * opened
