"""Whether a server with a bounded draft pool is sound: for any server, over HTTP alone. See ``make accept``."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from any_server import NEAR_TIE_NATS, Answer, AnyServer, first_difference
from server import Server, Servers

TOKENS = 64
# An answer to each is long, and of another kind.
QUESTIONS = (
    "Write a Python function that returns the n-th Fibonacci number, then explain it line by line.",
    "A train leaves at 9:40 and arrives at 13:05. It stops for 25 minutes. How long does it move? Think step by step.",
    "List the planets of the solar system with one sentence about each.",
    "Write a JSON object that describes a bookshelf with five books.",
    "Explain to a child why the sky is blue.",
    "Write a SQL query that finds the three customers with the highest revenue for each country, and explain it.",
)
SMALL_POOLS = [
    "--speculative-draft-kv-ratio=0.15",
    "--max-total-tokens=16384",
    "--max-running-requests=2",
    "--chunked-prefill-size=256",
]
LAUNCHED = {
    "qwen3, page 1": ["--pair=qwen3", "--page-size=1"],
    "gdn, page 64": ["--pair=gdn", "--page-size=64"],
}


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AnyServer]:
    if request.param not in LAUNCHED:
        yield connect(request.param)
        return
    servers.close()
    launched = Server(
        [*LAUNCHED[request.param], *SMALL_POOLS],
        tmp_path_factory.mktemp("accept") / "log",
        # The request cap takes whole intervals for each request, and the pools here are small.
        environment={"SGLANG_SWA_EVICTION_INTERVAL": "8"},
    )
    with launched.started():
        yield AnyServer(launched.url, None)


def connect(url: str) -> AnyServer:
    """Return the server at a URL, or end the run with one line."""
    if not url.startswith(("http://", "https://")):
        pytest.exit(f"{url} is not the URL of a server; expected something like http://127.0.0.1:30000", 2)
    try:
        return AnyServer(url, os.environ.get("SGLANG_API_KEY"))
    except requests.RequestException as error:
        pytest.exit(f"{url}: cannot connect ({type(error).__name__}); is the server running there?", 2)
    except AssertionError as error:
        pytest.exit(f"{url}{error}; a server with a key needs it in SGLANG_API_KEY", 2)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "server" in metafunc.fixturenames:
        url = metafunc.config.getoption("--url")
        metafunc.parametrize("server", [url] if url else LAUNCHED, indirect=True, scope="module")


@pytest.fixture(scope="module")
def window_pool_tokens(server: AnyServer) -> int:
    """Slots of the bounded pool."""
    _, tokens = server.pools_tokens
    if not tokens:
        pytest.skip("no sliding-window pool: ratio 1, and a target without sliding-window layers")
    return tokens


def same_text(server: AnyServer, prompt: list[int], left: Answer, right: Answer) -> None:
    """Raise AssertionError unless two greedy answers are equal, or part where two tokens are too close to tell."""
    place = first_difference(left.token_ids, right.token_ids)
    if place is not None:
        a, b = left.token_ids[place], right.token_ids[place]
        gap = server.gap_nats(prompt + left.token_ids[:place], a, b)
        assert gap <= NEAR_TIE_NATS, f"token {place} is {a} in one answer and {b} in the other, {gap:.3f} nats apart"


def test_the_draft_pool_has_its_share(server: AnyServer, record_property: Any) -> None:
    if server.ratio == 1:
        pytest.skip("ratio 1: the draft's pool is the target's size")
    full, draft = server.pools_tokens
    record_property("target and draft tokens", f"{full}, {draft}")
    assert draft == int(full * server.ratio) // server.page_size * server.page_size


@pytest.fixture(scope="module")
def repeated(server: AnyServer) -> tuple[list[int], Answer, Answer]:
    """A prompt of several windows, and the answers to it the first and the second time."""
    # No whole number of chunks: a state that stands at the last token of a prompt is never reused.
    prompt = server.prompt(min(4 * server.window_tokens, server.context_tokens // 2) + 17)
    return prompt, server.generate(prompt, TOKENS), server.generate(prompt, TOKENS)


def test_a_repeated_prompt_is_reused(server: AnyServer, repeated: tuple[list[int], Answer, Answer]) -> None:
    prompt, cold, warm = repeated
    assert cold.cached_tokens < len(prompt) / 2, "a prompt never sent before"
    # The last token is always computed.
    unused = min(server.window_tokens, server.info["chunked_prefill_size"]) if server.has_states else server.page_size
    assert warm.cached_tokens >= len(prompt) - 1 - unused


def test_greedy_text_is_the_same_across_a_hit(server: AnyServer, repeated: tuple[list[int], Answer, Answer]) -> None:
    same_text(server, *repeated)


def test_an_evicted_window_falls_back(server: AnyServer, window_pool_tokens: int) -> None:
    """More prefixes than the bounded pool has windows for, in a target pool that holds them all."""
    full, _ = server.pools_tokens
    prompt_tokens = server.window_tokens + server.page_size
    others = window_pool_tokens // server.window_tokens * 5 // 4 + 1
    if (others + 1) * (prompt_tokens + server.page_size) + TOKENS > 0.9 * full:
        pytest.skip("the target's own pool would evict them too: nothing to tell apart")
    first = server.prompt(prompt_tokens)
    before = server.generate(first, TOKENS)
    at_once = max(1, server.info["max_running_requests"] // 2)
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lambda _: server.generate(server.prompt(prompt_tokens), 1), range(others)))
    after = server.generate(first, TOKENS)

    assert after.cached_tokens < prompt_tokens / 2, "its window should have been evicted; first words may be shared"
    same_text(server, first, before, after)


def test_one_request_outlives_the_bounded_pool(server: AnyServer, window_pool_tokens: int) -> None:
    prompt, tokens = server.prompt(32), window_pool_tokens + server.window_tokens
    if len(prompt) + tokens > server.context_tokens:
        pytest.skip(f"{tokens} tokens do not fit the context of {server.context_tokens}")
    answer = server.generate(prompt, tokens)

    assert (len(answer.token_ids), answer.finish) == (tokens, "length")
    assert answer.retractions == 0


def test_accept_length(server: AnyServer, pytestconfig: pytest.Config, record_property: Any) -> None:
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda question: server.accept_length(question, 256), QUESTIONS))
    tokens, steps = (sum(column) for column in zip(*answers, strict=True))
    assert steps, "no verify steps: the server does not speculate"
    record_property("accept length", f"{tokens / steps:.2f}")
    assert tokens / steps >= pytestconfig.getoption("--min-accept-length")


def test_gsm8k(server: AnyServer, pytestconfig: pytest.Config, record_property: Any) -> None:
    """Grade-school mathematics, by SGLang's own evaluation."""
    floor, data = pytestconfig.getoption("--min-gsm8k"), pytestconfig.getoption("--gsm8k-data")
    if floor is None:
        pytest.skip("give --min-gsm8k SHARE to ask for an accuracy")
    command = [sys.executable, "-m", "sglang.test.run_eval", "--eval-name", "gsm8k", "--api", "completion"]
    command += ["--base-url", server.url, "--num-threads", "8", "--max-tokens", "512"]
    command += ["--num-examples", str(pytestconfig.getoption("--gsm8k-questions"))]
    command += ["--gsm8k-data-path", str(data)] if data else []
    key = {"OPENAI_API_KEY": os.environ["SGLANG_API_KEY"]} if "SGLANG_API_KEY" in os.environ else {}
    evaluation = subprocess.run(command, env=os.environ | key, capture_output=True, text=True)
    assert evaluation.returncode == 0, evaluation.stderr[-3000:]
    (score,) = re.findall(r"^Score: (\S+)$", evaluation.stdout, re.MULTILINE)
    record_property("GSM8K", score)
    assert float(score) >= floor
