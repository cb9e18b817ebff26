"""The patches against what ends or restarts long requests, each with its control: the same run without the patch."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import pytest

from reference import MAX_NEAR_TIE_SHARE, Agreement, Reference
from scripted import Answer, Engine, EngineFailure, EngineProcess, Engines, Script
from server import Servers
from server_ext.tiny.build import ensure
from test_draft_kv_ratio import SMALL, diary, prompt
from unpatched import without

ROW_WIDTH = "speculative-reserve-in-every-request-row.patch"
EVICT_FIRST = "window-eviction-before-retraction.patch"
REASON = "reason-when-nothing-is-left-to-retract.patch"


@pytest.fixture(scope="module")
def engines(servers: Servers) -> Iterator[Engines]:
    servers.close()
    shared = Engines()
    yield shared
    shared.close()


def check_text(pair: str, prompts: list[list[int]], answers: list[Answer]) -> None:
    reference, agreement = Reference(ensure(pair).target), Agreement(0, 0)
    for token_ids, answer in zip(prompts, answers, strict=True):
        agreement += reference.follow(token_ids, answer.token_ids)
    assert agreement.near_ties <= max(1, MAX_NEAR_TIE_SHARE * agreement.tokens), agreement


# -- the row of a request

CONTEXT_TOKENS, BLOCK_TOKENS = 512, 16
NARROW_ROW = CONTEXT_TOKENS + 4 + BLOCK_TOKENS
TO_THE_BOUNDARY = {
    "context_length": CONTEXT_TOKENS,
    "speculative_dflash_block_size": BLOCK_TOKENS,
    "page_size": 1,
    "max_running_requests": 4,
    "max_total_tokens": 4096,
}


@dataclass(frozen=True)
class Rows:
    """The width of a request's row of slots, the most slots that a request had, and the answers."""

    width: int
    most_allocated: int
    answers: list[Answer]


def fill_rows(engine: Engine, prompts: list[list[int]]) -> Script[Rows]:
    yield from engine.flush()
    for i, token_ids in enumerate(prompts):
        engine.submit(str(i), token_ids, CONTEXT_TOKENS)
    yield
    most = 0
    for _ in engine.until_idle():
        most = max([most, *(request.kv.kv_allocated_len for request in engine.running())])
        yield
    width = engine.scheduler.req_to_token_pool.req_to_token.shape[1]
    return Rows(width, most, list(engine.answers.values()))


def test_a_request_may_fill_its_row_up_to_the_context_boundary() -> None:
    prompts = [prompt(50 + i, 340 + 3 * i) for i in range(4)]
    with EngineProcess(**TO_THE_BOUNDARY) as engine:
        seen = engine.run(fill_rows, prompts)

    assert NARROW_ROW < seen.most_allocated <= seen.width == CONTEXT_TOKENS + 2 * BLOCK_TOKENS
    assert {answer.finish["type"] for answer in seen.answers} == {"length"}
    check_text("qwen3", prompts, seen.answers)

    # The CPU platform's stand-in refuses what the kernel of a GPU writes past the row's end, into the next row.
    with (
        EngineProcess(**TO_THE_BOUNDARY, without=ROW_WIDTH) as engine,
        pytest.raises(EngineFailure, match="in assign_req_to_token_pool"),
    ):
        engine.run(fill_rows, prompts)


# -- a full pool

SWA_TOKENS = 768
# A request's out-of-window slots are due for eviction later than the pool is full.
LATE_EVICTION_TOKENS = "1024"
SWA = {
    "pair": "swa",
    "max_total_tokens": 16 * SWA_TOKENS,
    "swa_full_tokens_ratio": 1 / 16,
    "max_running_requests": 3,
    "page_size": 1,
}
DRAFT = SMALL | {"page_size": 1}
DRAFT_POOL_TOKENS = 729


def generate(engine: Engine, prompts: list[list[int]], tokens: int, lacking: tuple[str, ...] = ()) -> Script[Any]:
    """All prompts at once, from an empty cache, without the `lacking` patches and with late eviction."""
    yield from engine.flush()
    with contextlib.ExitStack() as stack:
        for name in lacking:
            stack.enter_context(without(name))
        interval = os.environ["SGLANG_SWA_EVICTION_INTERVAL"]
        stack.callback(os.environ.__setitem__, "SGLANG_SWA_EVICTION_INTERVAL", interval)
        os.environ["SGLANG_SWA_EVICTION_INTERVAL"] = LATE_EVICTION_TOKENS
        for i, token_ids in enumerate(prompts):
            engine.submit(str(i), token_ids, tokens)
        yield
        yield from engine.until_idle()
    return list(engine.answers.values())


def test_slots_behind_the_windows_are_freed_before_anything_is_retracted(engines: Engines) -> None:
    prompts = [diary(i, 40 + 10 * i) for i in range(3)]
    engine = engines.get(**SWA)

    answers = engine.run(generate, prompts, SWA_TOKENS // 2)
    assert [len(answer.token_ids) for answer in answers] == [SWA_TOKENS // 2] * 3
    assert sum(answer.retractions for answer in answers) == 0
    check_text("swa", prompts, answers)

    falsely = engine.run(generate, prompts, SWA_TOKENS // 2, (EVICT_FIRST,))
    assert sum(answer.retractions for answer in falsely) >= 1


@pytest.mark.parametrize(("options", "pool_tokens"), [(SWA, SWA_TOKENS), (DRAFT, DRAFT_POOL_TOKENS)])
def test_one_request_outlives_its_pool_when_eviction_is_late(
    engines: Engines, options: dict[str, Any], pool_tokens: int
) -> None:
    tokens = pool_tokens + 100
    (answer,) = engines.get(**options).run(generate, [diary(0, 40)], tokens)
    assert len(answer.token_ids) == tokens and answer.retractions == 0

    (killed,) = engines.get(**options).run(generate, [diary(0, 40)], tokens, (EVICT_FIRST,))
    assert killed.finish["type"] == "abort"


ENDINGS = {
    "sliding window": (
        SWA,
        (EVICT_FIRST,),
        diary(0, 40),
        f"The sliding-window KV cache pool of {SWA_TOKENS} tokens is full: ",
        "Raise --swa-full-tokens-ratio or --mem-fraction-static on the server, or ask for fewer tokens.",
    ),
    "draft": (
        DRAFT,
        (EVICT_FIRST,),
        diary(0, 40),
        f"The draft KV cache pool of {DRAFT_POOL_TOKENS} tokens is full: ",
        "Raise --speculative-draft-kv-ratio or --mem-fraction-static on the server, or ask for fewer tokens.",
    ),
    "target": (
        DRAFT,
        (),
        prompt(7, 4600),
        "The KV cache pool of 4864 tokens is full: ",
        "Raise --max-total-tokens or --mem-fraction-static on the server, or ask for fewer tokens.",
    ),
}


@pytest.mark.parametrize("case", ENDINGS)
def test_the_last_request_ends_with_the_pool_and_what_to_raise(engines: Engines, case: str) -> None:
    options, lacking, token_ids, pool, way_out = ENDINGS[case]
    engine = engines.get(**options)

    (answer,) = engine.run(generate, [token_ids], 1000, lacking)
    message = answer.finish["message"]
    assert message.startswith(pool) and message.endswith(way_out), message
    assert answer.finish["status_code"] == HTTPStatus.INSUFFICIENT_STORAGE

    (answer,) = engine.run(generate, [token_ids], 1000, (*lacking, REASON))
    assert answer.finish["status_code"] == HTTPStatus.INTERNAL_SERVER_ERROR
    assert "pool" not in answer.finish["message"]
