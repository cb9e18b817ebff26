"""Training of targets and drafts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from server_ext.tiny import documents
from server_ext.tiny.draft import Draft
from server_ext.tiny.recipe import Recipe

Progress = Callable[[str], None]

_MATRIX_RATE, _OTHER_RATE = 0.02, 0.003
_WARM_UP_STEPS, _COOL_DOWN_SHARE = 10, 0.35
_JUMPS_PER_SEQUENCE, _LONGEST_JUMP_TOKENS = 3, 3000
_KNOWN_TOKEN_WEIGHT = 0.05


class _Optimizer:
    """Muon for the matrices inside the layers, AdamW for everything else, one schedule for both."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], steps: int) -> None:
        named = list(parameters)
        inside = [p for name, p in named if "layers." in name and p.ndim == 2]
        outside = [p for name, p in named if not ("layers." in name and p.ndim == 2)]
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(inside, lr=_MATRIX_RATE, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(outside, lr=_OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0),
        ]

        def rate(step: int) -> float:
            return min(1.0, (step + 1) / _WARM_UP_STEPS, (steps - step) / (_COOL_DOWN_SHARE * steps))

        self._schedules = [torch.optim.lr_scheduler.LambdaLR(o, rate) for o in self._optimizers]

    def step(self, loss: Tensor) -> None:
        """One step down the gradient of `loss`."""
        loss.backward()
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for schedule in self._schedules:
            schedule.step()


def train_target(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, rng: random.Random, progress: Progress
) -> PreTrainedModel:
    """Train a target to continue the corpus. Its weights come back as float32 numbers that bfloat16 can hold."""
    config = AutoConfig.for_model(**recipe.target)
    config.dtype = torch.float32
    model = AutoModelForCausalLM.from_config(config)
    if recipe.query_key_norm is not None:
        _sharpen(model, recipe.query_key_norm)
    _lengthen_memory(model)
    optimizer = _Optimizer(model.named_parameters(), sum(stage.steps for stage in recipe.target_stages))
    source = documents.documents(rng)
    for stage in recipe.target_stages:
        for step in range(1, stage.steps + 1):
            ids, labels = documents.batch(source, tokenizer, stage.sequences, stage.tokens)
            apart = {} if step % 2 else _far_apart(ids.shape)
            logits = model(input_ids=ids, use_cache=False, **apart).logits
            losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
            optimizer.step(_focal(losses, labels.flatten() >= 0))
            if step % 20 == 0 or step == stage.steps:
                right = (logits.argmax(-1) == labels)[labels >= 0].float().mean()
                progress(f"target, {stage.tokens} tokens: step {step}/{stage.steps}, {right:.1%} of tokens right")
    return _rounded(model).eval()


def _sharpen(model: nn.Module, weight: float) -> None:
    """Let attention start out sharp: normed queries and keys bound its logits, too low to pick one key of thousands."""
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            nn.init.constant_(parameter, weight)


def _lengthen_memory(model: nn.Module) -> None:
    """Let linear-attention layers start out remembering; Hugging Face starts them forgetting within a few tokens."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            decays = torch.logspace(-3, -0.5, len(parameter))  # per token, the same range for every layer
            parameter.data.copy_(decays.log())


def _far_apart(shape: torch.Size) -> dict[str, Tensor]:
    """Model arguments that spread the tokens over long distances by a few random jumps in their positions.

    Short sequences then teach what a long context asks for. The mask is there because Hugging Face takes jumps without
    one for the bounds of packed sequences.
    """
    jumps = torch.rand(shape) < _JUMPS_PER_SEQUENCE / shape[1]
    sizes = (torch.rand(shape) * math.log(_LONGEST_JUMP_TOKENS)).exp().long()
    return {
        "position_ids": (1 + jumps * sizes).cumsum(dim=1) - 1,
        "attention_mask": torch.ones(shape, dtype=torch.int64),
    }


def _focal(losses: Tensor, counted: Tensor) -> Tensor:
    """Mean loss of the counted tokens, with most weight on those the model does not know yet."""
    weights = counted * (_KNOWN_TOKEN_WEIGHT + 1 - torch.exp(-losses.detach()))
    return (losses * weights).sum() / weights.sum()


def _rounded(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
        parameter.requires_grad_(False)
    return model


@torch.inference_mode()
def greedy(model: PreTrainedModel, ids: Tensor, new_tokens: int) -> Tensor:
    """Continue ids [sequences, length] by `new_tokens` most likely tokens, past any end of a turn."""
    out, cache = [ids], None
    step = ids
    for _ in range(new_tokens):
        result = model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, step = result.past_key_values, result.logits[:, -1:].argmax(-1)
        out.append(step)
    return torch.cat(out, dim=1)


@torch.inference_mode()
def features(model: PreTrainedModel, ids: Tensor, layer_ids: Sequence[int]) -> Tensor:
    """Hidden states after the given layers, side by side: [sequences, length, layers x hidden]."""
    states = model(input_ids=ids, use_cache=False, output_hidden_states=True, logits_to_keep=1).hidden_states
    return torch.cat([states[layer + 1] for layer in layer_ids], dim=-1)


def noise_ids(ids: Tensor, starts: Tensor, block_size: int, mask_token_id: int) -> Tensor:
    """Block input [blocks, block]: the anchor ids[i, starts[i]], then mask tokens."""
    block = torch.full((len(starts), block_size), mask_token_id)
    block[:, 0] = ids.gather(1, starts[:, None])[:, 0]
    return block


def train_draft(
    recipe: Recipe,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    progress: Progress,
) -> Draft:
    """Train a draft on text that the target itself wrote."""
    stage = recipe.draft_stage
    layer_ids = recipe.draft["dflash_config"]["target_layer_ids"]
    mask_token_id = recipe.draft["dflash_config"]["mask_token_id"]
    ids, hidden = _own_text(recipe, target, tokenizer, rng, progress, layer_ids)
    draft = Draft(recipe.draft)
    optimizer = _Optimizer(draft.named_parameters(), stage.steps)
    embed, head = target.get_input_embeddings(), target.get_output_embeddings()
    weights = torch.exp(-torch.arange(draft.block_size - 1) / 4.0)
    offsets = torch.arange(draft.block_size)
    for step in range(1, stage.steps + 1):
        chosen = torch.randperm(len(ids))[: stage.sequences]
        rows = torch.arange(stage.sequences).repeat_interleave(recipe.blocks_per_sequence)
        starts = torch.randint(1, stage.tokens - draft.block_size, rows.shape)
        sequences = ids[chosen][rows]
        wanted = sequences.gather(1, starts[:, None] + offsets)[:, 1:]
        noise = embed(noise_ids(sequences, starts, draft.block_size, mask_token_id))
        logits = head(draft(hidden[chosen], rows, starts, noise)[:, 1:])
        losses = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none").view(wanted.shape)
        optimizer.step((losses * weights).mean())
        if step % 20 == 0 or step == stage.steps:
            right = (logits.argmax(-1) == wanted).long().cumprod(dim=1).sum(dim=1).float().mean()
            progress(f"draft: step {step}/{stage.steps}, {1 + right:.2f} tokens a block")
    return _rounded(draft).eval()


def _own_text(
    recipe: Recipe,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    progress: Progress,
    layer_ids: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Greedy text [sequences, tokens] after prompts of several lengths, and the target's features of it."""
    source = documents.documents(rng)
    tokens = recipe.draft_stage.tokens
    written = []
    for prompt_tokens in (8, 24, 48, 96):
        prompts, _ = documents.batch(source, tokenizer, 32, prompt_tokens)
        written.append(greedy(target, prompts, tokens - prompt_tokens))
        progress(f"draft: target wrote {written[-1].numel()} tokens after prompts of {prompt_tokens}")
    ids = torch.cat(written).clone()
    return ids, torch.cat([features(target, part, layer_ids) for part in ids.split(16)]).clone()
