"""What the acceptance suite asks of a server, over HTTP alone."""

import itertools
import math
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import requests
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_SECONDS = 3600
# Two steps of bfloat16 at a logit between 16 and 32: what rounding moves when work is cut in another way.
NEAR_TIE_NATS = 0.25

_WHO = ("Ada", "Bruno", "Chidi", "Dana", "Emil", "Farah", "Goran", "Hana", "Ivo", "Jun", "Karla", "Lars", "Mona")
_DOES = ("counts", "paints", "repairs", "borrows", "hides", "weighs", "carries", "sells", "sketches", "polishes")
_WHAT = ("lantern", "compass", "ladder", "kettle", "violin", "map", "anchor", "basket", "clock", "mirror", "sail")
_WHERE = ("harbour", "orchard", "attic", "market", "bridge", "library", "station", "garden", "cellar", "tower")


@dataclass(frozen=True)
class Answer:
    """One greedy answer of SGLang's own endpoint ``/generate``."""

    token_ids: list[int]
    cached_tokens: int
    retractions: int
    finish: str


class AnyServer:
    """A running server that the suite looks at from outside; other traffic would spoil what it reads.

    `url` has no path. `key` is the API key, if the server has one.
    """

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.rstrip("/")
        self._session = requests.Session()
        if key:
            self._session.headers["Authorization"] = f"Bearer {key}"
        self.client = OpenAI(base_url=f"{self.url}/v1", api_key=key or "none")
        self.info = self._call("get", "/server_info")
        self._random = random.Random(os.urandom(8))

    def _call(self, method: str, path: str, **options: Any) -> Any:
        answer = self._session.request(method, self.url + path, timeout=TIMEOUT_SECONDS, **options)
        assert answer.status_code == 200, f"{path}: HTTP {answer.status_code}: {answer.text[:500]}"
        return answer.json()

    # -- configuration

    @property
    def ratio(self) -> float:
        """The draft KV ratio; 1 where the engine does not know the option."""
        return float(self.info.get("speculative_draft_kv_ratio") or 1)

    @property
    def window_tokens(self) -> int:
        """The draft window."""
        return int(self.info["speculative_draft_window_size"])

    @property
    def page_size(self) -> int:
        """Slots a page."""
        return int(self.info["page_size"])

    @property
    def has_states(self) -> bool:
        """Whether the target has linear attention, whose states the prefix cache keeps at the ends of chunks only."""
        return bool(self.info.get("uses_mamba_radix_cache"))

    @property
    def context_tokens(self) -> int:
        """The longest prompt and answer together."""
        return int(self._call("get", "/v1/models")["data"][0]["max_model_len"])

    @property
    def pools_tokens(self) -> tuple[int, int]:
        """Slots of the target's pool, and of the sliding-window one: the draft's, or the target's own; 0 for none."""
        text = self._session.get(f"{self.url}/metrics", timeout=60).text
        figures = {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}
        assert "sglang:max_total_num_tokens" in figures, (
            "no pool sizes in /metrics: start the server with --enable-metrics"
        )
        names = ("sglang:max_total_num_tokens", "sglang:max_total_num_tokens_swa")
        full, window = (int(figures.get(name, 0)) for name in names)
        return full, window

    # -- requests

    def prompt(self, tokens: int) -> list[int]:
        """Return the token ids of a text that this server has not seen; any two differ within their first words."""
        words = [f"Log {self._random.getrandbits(48):x}."]
        ids: list[int] = []
        while len(ids) < tokens:
            words += [self._sentence() for _ in range(tokens // 8 + 8)]
            ids = self._call("post", "/tokenize", json={"prompt": " ".join(words)})["tokens"]
        return ids[:tokens]

    def _sentence(self) -> str:
        draw = self._random.choice
        return f"{draw(_WHO)} {draw(_DOES)} the {draw(_WHAT)} in the {draw(_WHERE)}."

    def generate(self, prompt: list[int], tokens: int) -> Answer:
        """Continue a prompt greedily by exactly `tokens` tokens."""
        answer = self._call("post", "/generate", json=_greedy(prompt, tokens))
        meta = answer["meta_info"]
        return Answer(
            answer["output_ids"], meta["cached_tokens"], meta["num_retractions"], meta["finish_reason"]["type"]
        )

    def gap_nats(self, prompt: list[int], a: int, b: int) -> float:
        """Return how far apart the log-probabilities of two next tokens are; infinite if one is not among the best."""
        body = _greedy(prompt, 1) | {"return_logprob": True, "top_logprobs_num": 5}
        ((*best,),) = self._call("post", "/generate", json=body)["meta_info"]["output_top_logprobs"]
        known = {token: value for value, token, _ in best}
        return abs(known[a] - known[b]) if a in known and b in known else math.inf

    def accept_length(self, question: str, tokens: int) -> tuple[int, int]:
        """Return the tokens of a greedy chat answer and the verify steps it took; no step, no speculation."""
        answer = self.client.chat.completions.create(
            model=self.client.models.list().data[0].id,
            messages=[{"role": "user", "content": question}],
            max_tokens=tokens,
            temperature=0,
            extra_body={"return_meta_info": True},
        )
        meta = answer.choices[0].model_dump()["meta_info"]
        return int(meta["completion_tokens"]), int(meta.get("spec_verify_ct") or 0)


def _greedy(prompt: list[int], tokens: int) -> dict[str, Any]:
    return {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
    }


def first_difference(left: list[int], right: list[int]) -> int | None:
    """Return the place where two texts part, None if they do not."""
    pairs: Iterator[tuple[int, int | None]] = itertools.zip_longest(left, right)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), None)
