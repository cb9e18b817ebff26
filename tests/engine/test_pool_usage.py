"""What a server reports of its pools while a hybrid target generates."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests
from prometheus_client.parser import text_string_to_metric_families

from server import Server

FULL_TOKENS = 16384
SWA_SHARE = 0.1
GENERATED_TOKENS = FULL_TOKENS // 3
# The window, SGLang's eviction interval, what one step reserves, and the prompt. Unbounded it would be three pools.
MOST_SWA_TOKENS = 64 + 128 + 2 * 8 + 5


# A running request has its state and two buffers for the next snapshots.
STATES, STATES_PER_REQUEST = 64, 3


def usage(server: Server) -> dict[str, float]:
    """Return what is used of each pool, as a share of it."""
    text = requests.get(f"{server.url}/metrics", timeout=60).text
    samples = {
        sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples
    }
    gauges = {"full": "full_token_usage", "swa": "swa_token_usage", "mamba": "mamba_usage"}
    return {pool: samples[f"sglang:{gauge}"] for pool, gauge in gauges.items()}


def usage_during(server: Server, requests_at_once: int, tokens: int) -> tuple[list[dict], list[dict[str, float]]]:
    """Return the answers to equal requests, and the usage again and again while they ran."""
    with ThreadPoolExecutor(requests_at_once) as pool:
        running = [pool.submit(generate, server, tokens) for _ in range(requests_at_once)]
        seen = []
        while not all(request.done() for request in running):
            seen.append(usage(server))
    return [request.result() for request in running], seen


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
    with Server(arguments, tmp_path / "log").started() as server:
        (answer,), during = usage_during(server, 1, GENERATED_TOKENS)
        generate(server, 1)
        after = usage(server)

    assert len(answer["output_ids"]) == GENERATED_TOKENS
    assert answer["meta_info"]["num_retractions"] == 0
    assert 0.25 < max(seen["full"] for seen in during) < 0.34
    late = [seen["swa"] for seen in during if seen["full"] > 0.05]
    assert min(late) > 64 / (SWA_SHARE * FULL_TOKENS)
    assert max(late) < MOST_SWA_TOKENS / (SWA_SHARE * FULL_TOKENS)
    assert max(after.values()) < 0.01


def test_each_request_holds_its_states(alone: None, tmp_path: Path) -> None:
    arguments = ["--pair", "gdn", "--max-mamba-cache-size", str(STATES), "--decode-log-interval", "1"]
    with Server(arguments, tmp_path / "log").started() as server:
        for at_once in (1, 4):
            _, during = usage_during(server, at_once, 400)
            assert max(seen["mamba"] for seen in during) == at_once * STATES_PER_REQUEST / STATES
            generate(server, 1)
            assert usage(server)["mamba"] == 0
