"""What a server reports of its two KV pools while a hybrid sliding-window target generates."""

import threading
from pathlib import Path

import requests
from prometheus_client.parser import text_string_to_metric_families

from server import Server

FULL_TOKENS = 16384
SWA_SHARE = 0.1
GENERATED_TOKENS = FULL_TOKENS // 3
# The window, SGLang's eviction interval, what one step reserves, and the prompt. Unbounded it would be three pools.
MOST_SWA_TOKENS = 64 + 128 + 2 * 8 + 5


def usage(server: Server) -> tuple[float, float]:
    """Return the gauges of the full pool and of the SWA pool, as shares of each."""
    text = requests.get(f"{server.url}/metrics", timeout=60).text
    samples = {
        sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples
    }
    return samples["sglang:full_token_usage"], samples["sglang:swa_token_usage"]


def generate(server: Server, tokens: int) -> dict:
    """Return SGLang's answer to a short prompt."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"text": "Ada keeps a diary.", "sampling_params": sampling}
    answer = requests.post(f"{server.url}/generate", json=body, timeout=500)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_full_pool_fills_and_the_swa_pool_does_not(alone: None, tmp_path: Path) -> None:
    pools = ["--max-total-tokens", str(FULL_TOKENS), "--swa-full-tokens-ratio", str(SWA_SHARE)]
    arguments = ["--pair", "swa", *pools, "--decode-log-interval", "1"]
    answers: list[dict] = []
    with Server(arguments, tmp_path / "log").started() as server:
        worker = threading.Thread(target=lambda: answers.append(generate(server, GENERATED_TOKENS)))
        worker.start()
        during = []
        while worker.is_alive():
            during.append(usage(server))
        worker.join()
        generate(server, 1)
        after = usage(server)

    (answer,) = answers
    assert len(answer["output_ids"]) == GENERATED_TOKENS
    assert answer["meta_info"]["num_retractions"] == 0
    assert 0.25 < max(full_usage for full_usage, _ in during) < 0.34
    late = [swa_usage for full_usage, swa_usage in during if full_usage > 0.05]
    assert min(late) > 64 / (SWA_SHARE * FULL_TOKENS)
    assert max(late) < MOST_SWA_TOKENS / (SWA_SHARE * FULL_TOKENS)
    assert max(after) < 0.01
