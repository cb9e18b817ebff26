"""How many tokens a verify step commits, worked out without an engine.

Greedy speculative decoding writes exactly the target's greedy text, so it is enough to have that text and the target's
hidden states: walk along it, draft a block at each step, and commit what agrees plus the one token the target gives for
free. The mean is what SGLang reports as accept length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from server_ext.tiny.draft import Draft
from server_ext.tiny.training import features, greedy, noise_ids


@dataclass(frozen=True)
class Acceptance:
    """Greedy text of one prompt and the tokens each verify step committed, the bonus token included."""

    text_ids: tuple[int, ...]
    committed_tokens: tuple[int, ...]

    @property
    def accept_length(self) -> float:
        """Mean committed tokens per verify step."""
        return sum(self.committed_tokens) / len(self.committed_tokens)


@torch.inference_mode()
def simulate(
    target: PreTrainedModel,
    draft: Draft,
    prompt_ids: Tensor,
    new_tokens: int,
    *,
    layer_ids: list[int],
    mask_token_id: int,
) -> Acceptance:
    """Decode `new_tokens` tokens after prompt_ids [length] speculatively."""
    block = draft.block_size
    ids = greedy(target, prompt_ids[None], new_tokens + block)
    hidden = features(target, ids, layer_ids)
    embed, head = target.get_input_embeddings(), target.get_output_embeddings()
    row, committed = torch.zeros(1, dtype=torch.int64), []
    start, end = len(prompt_ids), len(prompt_ids) + new_tokens
    while start < end:
        starts = torch.tensor([start])
        drafted = draft(hidden, row, starts, embed(noise_ids(ids, starts, block, mask_token_id)))[0, 1:]
        agrees = head(drafted).argmax(-1) == ids[0, start + 1 : start + block]
        committed.append(1 + int(agrees.long().cumprod(0).sum()))
        start += committed[-1]
    return Acceptance(tuple(ids[0, len(prompt_ids) :].tolist()), tuple(committed))
