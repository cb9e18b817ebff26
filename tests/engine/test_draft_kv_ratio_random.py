"""Random work on a bounded draft pool: whatever comes in what order, the allocator's books balance at every step."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from draft_books import check_books, check_empty
from scripted import Engine, Engines, Script
from server import Servers
from test_draft_kv_ratio import BOUNDED, PLAIN_FLOWS, WITH_STATE, prompt

# Four requests of up to 480 tokens meet in 2,048 target slots, and their prefixes in 1,228 draft slots.
OPTIONS = BOUNDED | {"max_total_tokens": 2048, "speculative_draft_kv_ratio": 0.6, "schedule_conservativeness": 0.01}
PREFIX_TOKENS = (40, 100, 200, 320)
FLOWS = [
    *PLAIN_FLOWS,
    pytest.param(WITH_STATE | {"page_size": 1, "speculative_draft_kv_ratio": 0.9}, id="gdn"),
    pytest.param({"page_size": 64, "disable_radix_cache": True}, id="no prefix cache"),
]

submits = st.tuples(st.just("submit"), st.integers(0, 3), st.integers(0, 80), st.integers(1, 80))
steps = st.tuples(st.just("steps"), st.integers(1, 20))
aborts = st.tuples(st.just("abort"), st.integers(0, 5))
retractions = st.tuples(st.just("retract"), st.integers(1, 4))
flushes = st.tuples(st.just("flush"))
operations = st.lists(st.one_of(submits, submits, steps, steps, aborts, retractions, flushes), max_size=20)
# All work begins with two requests that run together, so that one of them can be retracted.
BEGINNING = [("submit", 2, 0, 80), ("submit", 3, 0, 80), ("steps", 12), ("retract", 1)]


@pytest.fixture(scope="module")
def engines(servers: Servers) -> Iterator[Engines]:
    servers.close()
    shared = Engines()
    yield shared
    shared.close()


def work(engine: Engine, todo: list[tuple[Any, ...]], prefixes: list[list[int]]) -> Script[dict[str, Any]]:
    """Do the operations, then finish and empty the engine; the books are checked at every step."""
    from sglang.srt.managers import scheduler

    yield from engine.flush()
    check_empty(engine)
    aborted: set[str] = set()
    lengths: dict[str, int] = {}
    for i, (operation, *arguments) in enumerate(todo):
        if operation == "submit":
            prefix, own_tokens, new_tokens = arguments
            lengths[str(i)] = new_tokens
            engine.submit(str(i), [*prefixes[prefix], *range(16, 16 + own_tokens)], new_tokens, ignore_eos=i % 2 == 0)
        elif operation == "abort":
            unfinished = [rid for rid, answer in engine.answers.items() if answer.finish is None]
            for rid in unfinished[arguments[0] : arguments[0] + 1]:
                engine.abort(rid)
                aborted.add(rid)
        elif operation == "flush":
            yield from _checked(engine, engine.until_idle())
            yield from engine.flush()
            check_empty(engine)
        else:
            scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL = operation == "retract", 1
            for _ in range(arguments[0]):
                yield
                check_books(engine)
            scheduler.TEST_RETRACT = False
    yield from _checked(engine, engine.until_idle())
    for rid, answer in engine.answers.items():
        assert answer.finish is not None
        if rid not in aborted:
            assert answer.finish["type"] in ("length", "stop"), rid
            assert len(answer.token_ids) <= lengths[rid]
    yield from engine.flush()
    check_empty(engine)
    return {rid: (answer.retractions, answer.cached_tokens) for rid, answer in engine.answers.items()}


def _checked(engine: Engine, steps: Script[None]) -> Script[None]:
    for _ in steps:
        check_books(engine)
        yield


@pytest.mark.parametrize("flow", FLOWS)
def test_the_books_balance(engines: Engines, flow: dict[str, Any]) -> None:
    prefixes = [prompt(200 + i, tokens) for i, tokens in enumerate(PREFIX_TOKENS)]
    seen: list[dict[str, tuple[int, int]]] = []

    # No shrinking: a failing engine has to start anew each time.
    @settings(
        max_examples=8,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operations)
    def on_any_work(todo: list[tuple[Any, ...]]) -> None:
        seen.append(engines.get(**OPTIONS | flow).run(work, BEGINNING + todo, prefixes))

    on_any_work()
    answers = [answer for run in seen for answer in run.values()]
    assert any(retractions for retractions, _ in answers)
    assert any(cached for _, cached in answers) != flow.get("disable_radix_cache", False)
