"""`--speculative-draft-kv-ratio` on a served pair: the start-up line, the figures, a prefix hit, and refused starts."""

import math
import re
from pathlib import Path

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from server import Server, Servers
from server_ext.planner.inputs import EngineOptions, Memory, Workload
from server_ext.planner.plan import Plan, make_plan
from server_ext.tiny.build import ensure
from test_draft_kv_ratio import prompt

TARGET_TOKENS = 65536
# k and v, heads, head dimension, bfloat16, and layers of target and draft
TARGET_BYTES, DRAFT_BYTES = (2 * 2 * 32 * 2 * layers for layers in (4, 2))


def metrics(server: Server) -> dict[str, float]:
    text = requests.get(f"{server.url}/metrics", timeout=60).text
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


def generate(server: Server, prompt_ids: list[int], tokens: int) -> dict:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": prompt_ids, "sampling_params": sampling}
    answer = requests.post(f"{server.url}/generate", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json()


def plan(page_size: int) -> Plan:
    """Plan for the served pair, which needs no more than a fraction of this memory, and for requests of 860 tokens."""
    pair = ensure("qwen3")
    options = EngineOptions(
        target=str(pair.target),
        draft=str(pair.draft),
        max_running_requests=1,
        draft_window_size=pair.window_tokens,
        page_size=page_size,
        chunked_prefill_size=1024,
        max_total_tokens=TARGET_TOKENS,
    )
    return make_plan(options, Memory(free_gib=8, weights_gib=0.1), Workload(760, 100, 8), pair.window_tokens)


@pytest.mark.parametrize("page_size", [1, 64])
def test_line_figures_and_prefix_hit(servers: Servers, page_size: int) -> None:
    ratio = 0.25
    server = servers.get("--pair", "qwen3", "--speculative-draft-kv-ratio", str(ratio), "--page-size", str(page_size))
    draft_tokens = math.floor(TARGET_TOKENS * ratio) // page_size * page_size

    (line,) = re.findall(r"DFLASH draft KV pool: .*", server.output())
    match = re.fullmatch(
        r"DFLASH draft KV pool: window=64, ratio=0\.25, tokens=(\d+) "
        r"\(request cap (\d+), (\d+) cached prefixes at max concurrency\)",
        line,
    )
    assert match, line
    tokens, cap, prefixes = map(int, match.groups())
    assert tokens == draft_tokens
    assert prefixes == (tokens - cap) // 64

    planned = plan(page_size)
    assert planned.ratio == ratio, "what the planner recommends is what runs here"
    assert planned.sizes.window is not None
    assert (planned.sizes.target_tokens, planned.sizes.draft_tokens) == (TARGET_TOKENS, draft_tokens)
    assert planned.sizes.window.request_cap_tokens == cap

    figures = metrics(server)
    assert figures["sglang:max_total_num_tokens"] == TARGET_TOKENS
    assert figures["sglang:max_total_num_tokens_swa"] == draft_tokens
    pool_bytes = (TARGET_TOKENS + page_size) * TARGET_BYTES + (draft_tokens + page_size) * DRAFT_BYTES
    assert figures["sglang:kv_cache_memory_usage_gb"] == pytest.approx(pool_bytes / 2**30)

    prompt_ids = prompt(60, 1000)
    cold, warm = generate(server, prompt_ids, 64), generate(server, prompt_ids, 64)
    assert cold["meta_info"]["cached_tokens"] == 0
    assert warm["meta_info"]["cached_tokens"] == 999 // page_size * page_size
    assert cold["output_ids"] == warm["output_ids"]
    steps = [answer["meta_info"]["spec_verify_ct"] for answer in (cold, warm)]
    assert steps[1] == pytest.approx(steps[0], abs=2)


def test_the_planner_names_the_smallest_ratio_of_the_refusal() -> None:
    assert plan(page_size=1).smallest_ratio == 0.167


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--speculative-draft-kv-ratio", "0.25", "--enable-hierarchical-cache"],
            "--speculative-draft-kv-ratio 0.25 is not supported with --enable-hierarchical-cache",
        ),
        (
            ["--speculative-draft-kv-ratio", "0.05"],
            "Use --speculative-draft-kv-ratio 0.167 or more, or lower --max-running-requests.",
        ),
    ],
    ids=["another option", "too small"],
)
def test_a_refused_start_says_why_and_ends(alone: None, tmp_path: Path, options: list[str], message: str) -> None:
    with Server(["--pair", "qwen3", *options], tmp_path / "log") as server:
        assert server.wait() == 2
        assert server.output().splitlines()[-1].startswith("sglang-dflash serve: error: SGLang refuses these options: ")
        assert message in server.output().splitlines()[-1]
        assert "Traceback" not in server.output()
