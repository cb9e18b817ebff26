"""Greedy text of every pair equals Hugging Face's, however the engine gets there."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from reference import MAX_NEAR_TIE_SHARE, Agreement, Reference
from server import Server, Servers
from server_ext.tiny.build import TinyPair, ensure
from server_ext.tiny.prompts import SAMPLE_PROMPTS

TOKENS = 128
PAIRS = ("qwen3", "swa", "gdn")
# Of a linear-attention target the prefix cache keeps states, one at each multiple of this.
STATE_GRID_TOKENS = 64


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest) -> TinyPair:
    return ensure(request.param)


@pytest.fixture(scope="module")
def reference(pair: TinyPair) -> Reference:
    return Reference(pair.target)


@pytest.fixture(scope="module")
def prompts(pair: TinyPair) -> list[list[int]]:
    """Token ids of the sample prompts and of one that spans many windows, a different last one for each."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(pair.target)
    ids = [tokenizer(prompt)["input_ids"] for prompt in SAMPLE_PROMPTS]
    longest = max(ids, key=len)
    # Not whole pages and chunks: a state that stands at the last token of a prompt is never reused.
    length = 20 * pair.window_tokens + 17
    many_windows = (longest * (length // len(longest) + 1))[:length]
    return [*ids, many_windows]


def generate(server: Server, prompt: list[int], tokens: int = TOKENS) -> dict:
    """Return SGLang's own answer: ``output_ids`` and ``meta_info``."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    answer = requests.post(
        f"{server.url}/generate", json={"input_ids": prompt, "sampling_params": sampling}, timeout=300
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def flush(server: Server) -> None:
    """Empty the prefix cache."""
    requests.post(f"{server.url}/flush_cache", timeout=60).raise_for_status()


def options(pair: TinyPair, *, speculative: bool, page_size: int) -> list[str]:
    """Return the options of a server for this pair."""
    paging = ["--page-size", str(page_size), "--chunked-prefill-size", "512"]
    if speculative:
        return ["--pair", pair.name, *paging]
    return ["--model-path", str(pair.target), "--max-total-tokens", "16384", "--max-mamba-cache-size", "64", *paging]


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("speculative", [True, False], ids=["dflash", "plain"])
def test_greedy_text_equals_hugging_face(
    pair: TinyPair,
    reference: Reference,
    prompts: list[list[int]],
    servers: Servers,
    speculative: bool,
    page_size: int,
    record_property: Callable[[str, object], None],
) -> None:
    server = servers.get(*options(pair, speculative=speculative, page_size=page_size))
    flush(server)
    cold = [generate(server, prompt) for prompt in prompts]
    warm = [generate(server, prompt) for prompt in prompts]
    flush(server)
    with ThreadPoolExecutor(4) as four_at_once:
        together = list(four_at_once.map(lambda prompt: generate(server, prompt), prompts))

    agreement = Agreement(0, 0)
    for answers in (cold, warm, together):
        for prompt, answer in zip(prompts, answers, strict=True):
            agreement += reference.compare(prompt, answer["output_ids"])
    record_property("compared with Hugging Face", str(agreement))
    assert agreement.tokens == 3 * len(prompts) * TOKENS
    assert agreement.near_ties <= MAX_NEAR_TIE_SHARE * agreement.tokens, agreement

    grid = STATE_GRID_TOKENS if pair.name == "gdn" else page_size
    for prompt, answer in zip(prompts, warm, strict=True):
        # The last token of a prompt is always computed, and what it shares a page with.
        assert answer["meta_info"]["cached_tokens"] >= (len(prompt) - 1) // grid * grid - page_size, len(prompt)
    if speculative:
        steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in cold)
        assert TOKENS * len(cold) / steps >= 2, "accept length over the sample prompts"
    else:
        assert "spec_verify_ct" not in cold[0]["meta_info"]
