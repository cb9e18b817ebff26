"""Attention for every forward mode of the engine, over `scaled_dot_product_attention`.

One request at a time: its keys and values are gathered from the pool by slot, so pages, shared prefixes and
sliding-window pools need no case of their own. Only the rows that a layer's window can reach are gathered, which also
keeps slots that were already evicted out of reach.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


@dataclass(frozen=True)
class Span:
    """One request's rows in a forward: tokens ``q_start`` to ``q_start + q_len`` end a sequence of ``kv_len``."""

    req_pool_index: int
    q_start: int
    q_len: int
    kv_len: int


@dataclass(frozen=True)
class Reach:
    """What the queries of one span may read in one kind of layer.

    ``slots``: int64 ``[keys]`` in the pool of that layer. ``mask``: bool ``[q_len, keys]``, True where a query may read
    a key, or None where every query may read every key.
    """

    slots: torch.Tensor
    mask: torch.Tensor | None


def spans_of(forward_batch: "ForwardBatch") -> list[Span]:
    """Return the spans of a batch in any forward mode (decode, extend, target verify, draft block)."""
    mode = forward_batch.forward_mode
    rows = forward_batch.req_pool_indices.tolist()
    lens = forward_batch.seq_lens.tolist()
    if mode.is_decode():
        q_lens = [1] * len(rows)
    elif mode.is_target_verify():
        # `seq_lens` counts committed tokens; the block comes on top.
        block = forward_batch.spec_info.draft_token_num
        q_lens = [block] * len(rows)
        lens = [n + block for n in lens]
    else:
        q_lens = forward_batch.extend_seq_lens.tolist()
    spans, start = [], 0
    for row, q_len, kv_len in zip(rows, q_lens, lens, strict=True):
        spans.append(Span(row, start, q_len, kv_len))
        start += q_len
    return spans


def reach_of(span: Span, req_to_token_row: torch.Tensor, window_left: int, causal: bool) -> Reach:
    """Return the slots and the mask of a span in a layer.

    Args:
        span: the request's rows.
        req_to_token_row: slots of the whole sequence, ``[>= kv_len]``.
        window_left: how many keys before its own position a query reads; negative: all of them.
        causal: whether a query may read keys behind its own position.
    """
    first_q = span.kv_len - span.q_len
    first_key = 0 if window_left < 0 else max(0, first_q - window_left)
    slots = req_to_token_row[first_key : span.kv_len].to(torch.int64)
    if window_left < 0 and (not causal or span.q_len == 1):
        return Reach(slots, None)
    queries = torch.arange(first_q, span.kv_len)[:, None]
    keys = torch.arange(first_key, span.kv_len)[None, :]
    mask = torch.ones(span.q_len, span.kv_len - first_key, dtype=torch.bool)
    if causal:
        mask &= keys <= queries
    if window_left >= 0:
        mask &= keys >= queries - window_left
    return Reach(slots, mask)


class CpuReferenceAttnBackend(AttentionBackend):
    """SGLang attention backend of the CPU reference platform."""

    def __init__(self, model_runner: "ModelRunner") -> None:
        super().__init__()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self._spans: list[Span] = []
        self._reaches: dict[tuple[bool, int, bool], list[Reach]] = {}
        self._swa_out_cache_loc: torch.Tensor | None = None

    def init_forward_metadata(self, forward_batch: "ForwardBatch") -> None:
        """Plan one forward: which rows each request has, and where sliding-window layers write."""
        self._spans = spans_of(forward_batch)
        self._reaches = {}
        self._swa_out_cache_loc = None
        if isinstance(self.token_to_kv_pool, BaseSWAKVPool) and forward_batch.out_cache_loc is not None:
            self._swa_out_cache_loc = self.token_to_kv_pool.translate_loc_from_full_to_swa(forward_batch.out_cache_loc)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: "RadixAttention",
        forward_batch: "ForwardBatch",
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Write the new keys and values, then attend; every forward mode comes here.

        ``q`` is ``[tokens, heads * head_dim]``; returns ``[tokens, heads * v_head_dim]``.
        """
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, self._swa_out_cache_loc), k, v)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = queries.new_zeros(queries.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        for span, reach in zip(self._spans, self._reach(layer), strict=True):
            rows = slice(span.q_start, span.q_start + span.q_len)
            attended = scaled_dot_product_attention(
                queries[rows].transpose(0, 1).unsqueeze(0),
                keys[reach.slots].to(q.dtype).transpose(0, 1).unsqueeze(0),
                values[reach.slots].to(q.dtype).transpose(0, 1).unsqueeze(0),
                attn_mask=reach.mask,
                scale=layer.scaling,
                enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
            )
            out[rows] = attended.squeeze(0).transpose(0, 1)
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    forward_decode = forward_extend

    def _reach(self, layer: "RadixAttention") -> list[Reach]:
        window_left = layer.sliding_window_size if layer.sliding_window_size is not None else -1
        causal = layer.attn_type != AttentionType.ENCODER_ONLY
        in_swa_pool = (
            isinstance(self.token_to_kv_pool, BaseSWAKVPool) and self.token_to_kv_pool.layers_mapping[layer.layer_id][1]
        )
        key = (in_swa_pool, window_left, causal)
        if key not in self._reaches:
            table = self.req_to_token_pool.req_to_token
            reaches = [reach_of(span, table[span.req_pool_index], window_left, causal) for span in self._spans]
            if in_swa_pool:
                translate = self.token_to_kv_pool.translate_loc_from_full_to_swa
                reaches = [Reach(translate(reach.slots), reach.mask) for reach in reaches]
            self._reaches[key] = reaches
        return self._reaches[key]

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the padding length of a graph batch; asked for even where graphs are off."""
        return 1

    def support_triton(self) -> bool:
        """No."""
        return False
