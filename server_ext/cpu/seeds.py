"""A request's ``seed``, honoured on every request.

SGLang passes seeds to its sampler only with ``--enable-deterministic-inference``, which asks for attention backends of
its own, and hashes them in a kernel.
"""

import secrets
from collections.abc import Callable
from typing import Any

import torch

from server_ext.cpu.substitutes import HOOKS, substitutes
from server_ext.hooks import Hook

_SAMPLER = "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch"


def _with_seeds(info: Any, _cls: type, batch: Any, *_: object, **__: object) -> Any:
    """Give each row of a new batch its request's seed, or one drawn for the request."""
    if info.sampling_seed is None:
        for request in batch.reqs:
            if request.sampling_params.sampling_seed is None:
                request.sampling_params.sampling_seed = secrets.randbits(62)
        seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64)
    return info


def _min_p_first(
    sample: Callable[..., Any],
    probs: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    need_min_p_sampling: bool,
    *rest: Any,
    **options: Any,
) -> Any:
    """Cut what min-p excludes before the seeded sampler, which refuses min-p; the cut tail takes no part in top-p."""
    if need_min_p_sampling:
        floor = probs.max(dim=-1, keepdim=True).values * min_ps.view(-1, 1)
        probs = probs.masked_fill(probs < floor, 0.0)
    return sample(probs, top_ks, top_ps, min_ps, False, *rest, **options)


@substitutes("sglang.srt.layers.sampler.multinomial_with_seed")
def multinomial_with_seed(logprobs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Draw one column of each row by its seed and its token's position.

    ``logprobs`` is ``[rows, columns]``, need not be normalised, and the others are ``[rows]``; returns ``[rows, 1]``.
    """
    drawn = []
    for row, row_seed, position in zip(logprobs, seed.tolist(), positions.tolist(), strict=True):
        generator = torch.Generator().manual_seed(hash((row_seed, position)) % 2**63)
        gumbel = -torch.empty_like(row, dtype=torch.float64).exponential_(generator=generator).log()
        drawn.append((row + gumbel).argmax())
    return torch.stack(drawn)[:, None]


HOOKS += (
    Hook("sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch", _with_seeds, "after"),
    Hook(_SAMPLER, _min_p_first, "around"),
)
