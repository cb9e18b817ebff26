"""Greedy text of a served model against Hugging Face `generate`, token for token.

Two implementations in bfloat16 round differently, so where the reference's two best logits are closer than bfloat16 can
tell apart, either token is right: the comparison follows the served one and counts the place as a near tie.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

# More near ties than this among the compared tokens is a fault of the model pair or of the engine.
MAX_NEAR_TIE_SHARE = 1 / 200


@dataclass(frozen=True)
class Agreement:
    """How many tokens were compared and how many of them were near ties."""

    tokens: int
    near_ties: int

    def __add__(self, other: "Agreement") -> "Agreement":
        return Agreement(self.tokens + other.tokens, self.near_ties + other.near_ties)


class Reference:
    """Hugging Face's own implementation of one checkpoint, in bfloat16 on the CPU."""

    def __init__(self, target: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()
        self._generated: dict[tuple[int, ...], tuple[list[int], torch.Tensor]] = {}

    def compare(self, prompt: list[int], served: list[int]) -> Agreement:
        """Follow ``served`` from ``prompt``; raise AssertionError at the first token that is neither best nor a tie."""
        near_ties = 0
        done = 0
        while done < len(served):
            best, logits = self._generate(tuple(prompt + served[:done]), len(served) - done)
            differing = [i for i, token in enumerate(best) if token != served[done + i]]
            if not differing:
                break
            place = differing[0]
            ahead = logits[place].max() - logits[place][served[done + place]]
            assert ahead <= spacing(logits[place].max()), (
                f"token {done + place} after a prompt of {len(prompt)}: served {served[done + place]}, "
                f"Hugging Face {best[place]}, ahead by {ahead:.4f}\n"
                f"served      {served[max(0, done + place - 4) : done + place + 8]}\n"
                f"Hugging Face {best[max(0, place - 4) : place + 8]}"
            )
            near_ties += 1
            done += place + 1
        return Agreement(len(served), near_ties)

    @torch.inference_mode()
    def follow(self, prompt: list[int], served: list[int]) -> Agreement:
        """As `compare`, in one forward over the whole text: for thousands of tokens, which `generate` is slow for."""
        logits = self.model(torch.tensor([prompt + served[:-1]])).logits[0, len(prompt) - 1 :].float()
        best = logits.max(dim=-1).values
        ahead = best - logits.gather(1, torch.tensor(served)[:, None])[:, 0]
        wrong = (ahead > spacing(best)).nonzero()[:, 0].tolist()
        assert not wrong, (
            f"token {wrong[0]} after a prompt of {len(prompt)}: served {served[wrong[0]]}, Hugging Face "
            f"{int(logits[wrong[0]].argmax())}, ahead by {ahead[wrong[0]]:.4f}; {len(wrong)} of {len(served)} differ"
        )
        return Agreement(len(served), int((ahead > 0).sum()))

    def _generate(self, prompt: tuple[int, ...], length: int) -> tuple[list[int], torch.Tensor]:
        known = self._generated.get(prompt)
        if known is None or len(known[0]) < length:
            out = self.model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                min_new_tokens=0,
                max_new_tokens=length,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
            known = (out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits).float())
            self._generated[prompt] = known
        return known[0][:length], known[1][:length]


def spacing(logit: torch.Tensor) -> torch.Tensor:
    """Return the distance between neighbouring bfloat16 values at this magnitude (8 significant bits)."""
    return torch.exp2(torch.floor(torch.log2(logit.abs())) - 7)
