"""Native versions of the Triton launches on the engine's path that have none in SGLang."""

from collections.abc import Callable

import torch

from server_ext.cpu.substitutes import HOOKS, substitutes
from server_ext.hooks import Hook


def _record_stream(original: Callable[..., None], tensor: torch.Tensor, stream: object) -> None:
    # The DFLASH worker calls it on every step; torch raises for a CPU tensor, where there is nothing to record.
    if tensor.device.type != "cpu":
        original(tensor, stream)


HOOKS.append(Hook("torch.Tensor.record_stream", _record_stream, "around"))


def assign_extend_cache_locs(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: torch.device | str,
) -> torch.Tensor:
    """Gather the cache locations of each request's verify block.

    ``req_to_token`` is ``[rows, context]``; request ``i`` gives columns ``start_offset[i]`` to
    ``start_offset[i] + draft_token_num``. Returns int64 ``[batch_size * draft_token_num]``.
    """
    columns = start_offset.to(torch.int64)[:, None] + torch.arange(draft_token_num)
    return req_to_token[req_pool_indices.to(torch.int64)[:, None], columns].to(torch.int64).reshape(-1)


@substitutes("sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func")
def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write packed cache locations into the requests' rows of ``req_to_token``.

    Request ``i`` takes the next ``end_offset[i] - start_offset[i]`` entries of ``out_cache_loc`` for the columns from
    ``start_offset[i]`` on.
    """
    taken = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in rows:
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


@substitutes("sglang.srt.mem_cache.allocation.get_last_loc")
def get_last_loc(
    req_to_token: torch.Tensor, req_pool_indices_tensor: torch.Tensor, prefix_lens_tensor: torch.Tensor
) -> torch.Tensor:
    """Return each request's last written location, -1 for an empty prefix: SGLang's torch version.

    SGLang chooses between its versions by the attention backend's name, and knows only its own names.
    """
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)


@substitutes("sglang.kernels.ops.attention.table_qk_norm_rope.table_qk_norm_rope_")
def table_qk_norm_rope_(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    num_q_heads: int,
    num_k_heads: int,
    head_dim: int,
    eps: float,
) -> None:
    """Normalise and rotate the query and key columns of ``qkv`` in place; value columns stay.

    ``qkv`` is ``[tokens, (q + k + v heads) * head_dim]``, ``cos_sin_cache`` ``[positions, head_dim]`` with cosines
    first. Arithmetic is float32, rounded to the tensor's dtype after the norm and after the rotation.
    """
    cos, sin = cos_sin_cache[positions].float().unsqueeze(1).chunk(2, dim=-1)
    heads = qkv[:, : (num_q_heads + num_k_heads) * head_dim].view(-1, num_q_heads + num_k_heads, head_dim)
    weight = torch.cat([q_weight.expand(num_q_heads, -1), k_weight.expand(num_k_heads, -1)]).float()
    x = heads.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    first, second = x.to(qkv.dtype).float().chunk(2, dim=-1)
    heads.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))
