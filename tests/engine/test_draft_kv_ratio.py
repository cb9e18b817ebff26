"""The DFLASH draft's KV in a bounded pool, on the real scheduler with strict memory checks."""

import contextlib
import functools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from draft_books import check_books, check_empty
from reference import MAX_NEAR_TIE_SHARE, Agreement, Reference, spacing
from scripted import Answer, Engine, EngineFailure, EngineProcess, Engines, Script
from server import Servers
from server_ext.tiny import corpus, documents
from server_ext.tiny.build import ensure

WINDOW_TOKENS = 64
CHUNK_TOKENS = 64
PLAIN_FLOWS = [
    pytest.param({"page_size": page_size, "disable_overlap_schedule": not overlap}, id=f"page{page_size}-{overlap=}")
    for page_size in (1, 64)
    for overlap in (True, False)
]
# A prefix cache of three parts: the target's KV, the draft's, and the state checkpoints.
WITH_STATE = {"pair": "gdn", "mamba_radix_cache_strategy": "extra_buffer", "max_mamba_cache_size": 120}
FLOWS = [
    *PLAIN_FLOWS,
    pytest.param(WITH_STATE | {"page_size": 1}, id="gdn-page1-overlap=True"),
    pytest.param(WITH_STATE | {"page_size": 64, "disable_overlap_schedule": True}, id="gdn-page64-overlap=False"),
]


@pytest.fixture(scope="module")
def engines(servers: Servers) -> Iterator[Engines]:
    servers.close()
    shared = Engines()
    yield shared
    shared.close()


@dataclass(frozen=True)
class Upstream:
    """An engine at ratio 1, which is SGLang's own behaviour, and Hugging Face's logits to judge near ties by."""

    engine: EngineProcess
    model: Any

    def expect(self, prompts: list[list[int]], served: list[Answer], *, steps_differ: float = 0.01) -> int:
        """Hold greedy text and accept length against this engine's; return how many prompts part at a near tie.

        Where requests meet in a batch, and where a prompt is cut into a cached part and a rest, decides how bfloat16
        rounds; so two texts may part where the logits of the two tokens are too close to tell. Up to there, and for all
        the text where they do not part, the number of verify steps may differ by the share `steps_differ`.
        """
        answers = self.engine.run(generate, prompts, max(len(answer.token_ids) for answer in served))
        near_ties, steps, expected_steps = 0, 0, 0
        for token_ids, want, got in zip(prompts, answers, served, strict=True):
            place = next((i for i, got_id in enumerate(got.token_ids) if got_id != want.token_ids[i]), None)
            if place is None:
                steps += got.verify_steps
                expected_steps += want.verify_steps
                continue
            logits = self.model(torch.tensor([token_ids + want.token_ids[:place]])).logits[0, -1].float()
            a, b = want.token_ids[place], got.token_ids[place]
            assert (logits[a] - logits[b]).abs() <= spacing(logits.max()), f"token {place}: {b} for {a}"
            near_ties += 1
        assert steps == pytest.approx(expected_steps, rel=steps_differ, abs=1)
        return near_ties


@pytest.fixture
def upstream(request: pytest.FixtureRequest, upstreams: dict[str, Upstream]) -> Upstream:
    """The engine to hold the pair of this flow against."""
    flow = request.getfixturevalue("flow")
    pair = flow.get("pair", "qwen3")
    if pair not in upstreams:
        options = WITH_STATE if pair == "gdn" else {}
        engine = EngineProcess(max_running_requests=4, chunked_prefill_size=CHUNK_TOKENS, **options)
        upstreams[pair] = Upstream(engine, Reference(ensure(pair).target).model)
    return upstreams[pair]


@pytest.fixture(scope="module")
def upstreams(servers: Servers) -> Iterator[dict[str, Upstream]]:
    servers.close()
    running: dict[str, Upstream] = {}
    yield running
    for upstream in running.values():
        upstream.engine.close()


@functools.cache
def prompt(seed: int, tokens: int) -> list[int]:
    """Token ids of texts of the kind that the pair was trained on; each seed begins with another one."""
    tokenizer = AutoTokenizer.from_pretrained(ensure("qwen3").target)
    ids: list[int] = []
    for document in documents.documents(random.Random(seed)):
        ids += tokenizer("".join(text for text, _ in document)[: 8 * tokens])["input_ids"]
        if len(ids) >= tokens:
            return ids[:tokens]
    raise AssertionError("documents end")


@functools.cache
def diary(writer: int, tokens: int) -> list[int]:
    """Token ids of a diary, which the pair goes on with for ever, where other texts of `prompt` come to an end."""
    tokenizer = AutoTokenizer.from_pretrained(ensure("qwen3").target)
    return tokenizer(corpus.diary_text(corpus.HEROES[writer], corpus.FIRST_WHEELS, tokens))["input_ids"][:tokens]


def generate(engine: Engine, prompts: list[list[int]], tokens: int, ignore_eos: bool = True) -> Script[list[Answer]]:
    """All prompts at once, from an empty cache; the books are checked at every step."""
    yield from engine.flush()
    for i, token_ids in enumerate(prompts):
        engine.submit(str(i), token_ids, tokens, ignore_eos=ignore_eos)
    yield
    yield from checked(engine)
    return list(engine.answers.values())


def checked(engine: Engine) -> Script[None]:
    """Until idle, with a look at the books at every step."""
    bounded = hasattr(engine.allocator, "draft_kv_pool")
    for _ in engine.until_idle():
        if bounded:
            check_books(engine)
        yield
    if bounded:
        check_books(engine)


# -- sizes


@dataclass(frozen=True)
class Pools:
    full_tokens: int
    draft_tokens: int
    draft_rows: set[int]
    draft_layers: int
    full_side_layers: int
    target_gib: float
    draft_gib: float
    figure_gib: float


def pools(engine: Engine) -> Script[Pools]:
    allocator, pool = engine.allocator, engine.draft_pool
    yield
    assert pool is allocator.draft_kv_pool
    assert allocator.get_kvcache() is engine.scheduler.tp_worker.model_runner.token_to_kv_pool
    assert engine.scheduler.sliding_window_size == WINDOW_TOKENS
    return Pools(
        full_tokens=allocator.size_full,
        draft_tokens=allocator.size_swa,
        draft_rows={len(buffer) for buffer in (*pool.swa_kv_pool.k_buffer, *pool.swa_kv_pool.v_buffer)},
        draft_layers=pool.swa_layer_nums,
        full_side_layers=pool.full_layer_nums,
        target_gib=allocator.get_kvcache().mem_usage,
        draft_gib=pool.mem_usage,
        figure_gib=allocator.kv_mem_usage_gb,
    )


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("ratio", [0.5, 0.29])
def test_the_draft_pool_has_its_share_of_the_targets_slots(engines: Engines, ratio: float, page_size: int) -> None:
    seen = engines.get(speculative_draft_kv_ratio=ratio, page_size=page_size).run(pools)

    assert seen.full_tokens == 16384
    assert seen.draft_tokens == int(16384 * ratio) // page_size * page_size
    assert seen.draft_rows == {seen.draft_tokens + page_size}
    assert (seen.draft_layers, seen.full_side_layers) == (2, 0)
    assert seen.figure_gib == pytest.approx(seen.target_gib + seen.draft_gib)
    draft_row_bytes = 2 * 2 * 2 * 32 * 2  # k and v, layers, heads, head dimension, bfloat16
    assert seen.draft_gib == pytest.approx((seen.draft_tokens + page_size) * draft_row_bytes / 2**30)


def upstream_pools(engine: Engine) -> Script[tuple[str, str, int, bool]]:
    yield
    scheduler = engine.scheduler
    types = (type(engine.allocator).__name__, type(engine.draft_pool).__name__)
    return *types, engine.draft_pool.size, scheduler.is_hybrid_swa


def test_ratio_one_has_the_pools_of_an_engine_without_the_flag(engines: Engines) -> None:
    seen = engines.get(speculative_draft_kv_ratio=1.0).run(upstream_pools)

    assert seen == ("TokenToKVPoolAllocator", "CpuMHATokenToKVPool", 16384, False)


# -- write paths


@dataclass(frozen=True)
class Rows:
    """The draft's KV of one request at positions [first, first + rows), as float32 [layer, k or v, row, head, dim]."""

    first: int
    values: np.ndarray[Any, Any]


def rows_of(engine: Engine, request: Any) -> Rows:
    committed = request.kv.kv_committed_len
    first = max(0, committed - WINDOW_TOKENS)
    slots = engine.scheduler.req_to_token_pool.req_to_token[request.kv.req_pool_idx, first:committed].to(torch.int64)
    pool = engine.draft_pool
    if hasattr(pool, "swa_kv_pool"):
        slots = engine.allocator.full_to_swa_index_mapping[slots]
        assert (slots > 0).all()
        pool = pool.swa_kv_pool
    layers = [
        torch.stack([keys[slots], values[slots]]) for keys, values in zip(pool.k_buffer, pool.v_buffer, strict=True)
    ]
    return Rows(first, torch.stack(layers).float().numpy())


class MaterializeByLayer:
    """Stands in for the fused CUDA kernel, which hands each layer's keys and values to the same callback."""

    def __init__(self, draft_model: Any) -> None:
        self.layers = draft_model.layers

    def materialize(self, ctx_hidden: torch.Tensor, positions: torch.Tensor, write_layer_kv: Any) -> None:
        for i, layer in enumerate(self.layers):
            attention = layer.self_attn
            keys, values = attention.kv_proj_only(ctx_hidden)
            keys = attention.apply_k_rope(positions, attention.apply_k_norm(keys))
            shape = (-1, attention.num_kv_heads, attention.head_dim)
            write_layer_kv(i, keys.view(shape), values.view(shape))


def written_rows(engine: Engine, fused: bool, mutant: bool) -> Script[list[Rows]]:
    """The window of two requests after their prefill, and again when all of it has been generated."""
    worker, allocator = engine.draft_worker, engine.allocator
    yield from engine.flush()
    if hasattr(allocator, "swa_attn_allocator"):
        # On a fresh pool a target slot and its draft slot have the same number.
        allocator.swa_attn_allocator.free_pages = allocator.swa_attn_allocator.free_pages.flip(0)
    helper = MaterializeByLayer(worker.draft_model) if fused else None
    requests: dict[str, Any] = {}

    def decoding(tokens: int) -> bool:
        requests.update((request.rid, request) for request in engine.running())
        return len(requests) == 2 and all(len(request.output_ids) > tokens for request in requests.values())

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(worker, _use_fused_kv_materialize=fused, _fused_kv_helper=helper))
        if mutant:
            stack.enter_context(mock.patch.object(worker, "_draft_write_ids", untranslated(worker)))
        engine.submit("a", prompt(1, 300), 200)
        engine.submit("b", prompt(2, 130), 200)
        rows = []
        for tokens in (0, WINDOW_TOKENS):
            yield from engine.until(lambda tokens=tokens: decoding(tokens))
            rows += [rows_of(engine, requests[rid]) for rid in ("a", "b")]
        yield from engine.until_idle()
        assert worker._use_fused_kv_materialize == fused, "the engine fell back from the fused path"
    return rows


def untranslated(worker: Any) -> Callable[[Any], torch.Tensor]:
    """The fault that corrupts other requests: write ids as the target counts them."""
    return lambda plan: plan.write_ids(worker.draft_model_runner.kv_index_translator)


def rows_differ(left: list[Rows], right: list[Rows]) -> list[bool]:
    assert [rows.first for rows in left] == [rows.first for rows in right]
    return [not np.array_equal(a.values, b.values) for a, b in zip(left, right, strict=True)]


BOUNDED = {
    "speculative_draft_kv_ratio": 0.25,
    "max_total_tokens": 9216,
    "max_running_requests": 4,
    "chunked_prefill_size": CHUNK_TOKENS,
}


@pytest.mark.parametrize("flow", FLOWS, scope="module")
def test_every_write_path_writes_what_an_unbounded_pool_holds(engines: Engines, flow: dict[str, Any]) -> None:
    unbounded = engines.get(**BOUNDED | flow | {"speculative_draft_kv_ratio": 1.0})
    expected = {fused: unbounded.run(written_rows, fused, False) for fused in (False, True)}
    bounded = engines.get(**BOUNDED | flow)

    for fused in (False, True):
        rows = bounded.run(written_rows, fused, False)
        prefill_a, _, generated_a, _ = rows
        assert prefill_a.first < 300 <= generated_a.first, "one window from the prefill, one generated"
        assert all(np.abs(r.values).min(axis=(0, 1, 3, 4)).max() > 0 for r in rows)
        assert rows_differ(rows, expected[fused]) == [False] * 4, f"{fused=}"


@pytest.mark.parametrize("fused", [False, True], ids=["by layer", "fused"])
def test_a_write_through_the_targets_slot_is_caught(engines: Engines, fused: bool) -> None:
    expected = engines.get(**BOUNDED | {"speculative_draft_kv_ratio": 1.0}).run(written_rows, fused, False)
    rows = engines.get(**BOUNDED).run(written_rows, fused, True)

    assert rows_differ(rows[:2], expected[:2]) == [True] * 2


NEVER_WRITTEN = 77.0


def stray_rows(engine: Engine, mutant: str | None) -> Script[int]:
    """How many rows of the draft's pool two requests change that were never lent to a request."""
    worker, pool, draft_slots = engine.draft_worker, engine.draft_pool, engine.allocator.swa_attn_allocator
    yield from engine.flush()
    draft_slots.free_pages = draft_slots.free_pages.flip(0)
    lent = {0}  # where padding goes

    def noting(alloc: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
            slots = alloc(*args, **kwargs)
            lent.update(slots.tolist())
            return slots

        return noted

    with contextlib.ExitStack() as stack:
        for name in ("alloc", "alloc_extend", "alloc_decode"):
            stack.enter_context(mock.patch.object(draft_slots, name, noting(getattr(draft_slots, name))))
        if mutant == "context":
            stack.enter_context(mock.patch.object(worker, "_draft_write_ids", untranslated(worker)))
        elif mutant == "block":
            stack.enter_context(mock.patch.object(pool, "translate_loc_from_full_to_swa", lambda slots: slots))
        buffers = (*pool.swa_kv_pool.k_buffer, *pool.swa_kv_pool.v_buffer)
        for buffer in buffers:
            buffer.fill_(NEVER_WRITTEN)
        engine.submit("a", prompt(1, 300), 100)
        engine.submit("b", prompt(2, 130), 100)
        yield from engine.until_idle()
    changed = torch.stack([(buffer != NEVER_WRITTEN).flatten(1).any(dim=1) for buffer in buffers]).any(dim=0)
    return len(set(changed.nonzero()[:, 0].tolist()) - lent)


@pytest.mark.parametrize("flow", FLOWS, scope="module")
def test_nothing_is_written_outside_the_slots_of_requests(engines: Engines, flow: dict[str, Any]) -> None:
    """The draft's own blocks, which are written before they are known to be right, included."""
    assert engines.get(**BOUNDED | flow).run(stray_rows, None) == 0


@pytest.mark.parametrize("mutant", ["context", "block"])
def test_writes_outside_the_slots_of_requests_are_caught(engines: Engines, mutant: str) -> None:
    assert engines.get(**BOUNDED).run(stray_rows, mutant) > 0


# -- greedy text and accept length


PROMPT_TOKENS = (5, 40, 64, 65, 100, 150, 200, 250)
TOKENS = 256


def smallest_ratio(engines: Engines, **options: Any) -> float:
    """Return the ratio that the refusal of a far too small one proposes."""
    with pytest.raises(EngineFailure) as refusal:
        engines.get(speculative_draft_kv_ratio=0.001, **options)
    (proposed,) = re.findall(r"Use --speculative-draft-kv-ratio (\S+) or more", str(refusal.value))
    return float(proposed)


@pytest.mark.parametrize(
    "options",
    [{"page_size": 1, "max_total_tokens": 8192}, WITH_STATE | {"page_size": 64, "max_total_tokens": 24576}],
    ids=["qwen3-page1", "gdn-page64"],
)
def test_greedy_text_and_accept_length_do_not_depend_on_the_ratio(
    engines: Engines, record_property: Any, options: dict[str, Any]
) -> None:
    prompts = [prompt(10 + i, tokens) for i, tokens in enumerate(PROMPT_TOKENS)]
    smallest = smallest_ratio(engines, **options)
    assert smallest < 0.25
    answers = {
        ratio: engines.get(speculative_draft_kv_ratio=ratio, **options).run(generate, prompts, TOKENS)
        for ratio in (1.0, 0.5, 0.25, smallest)
    }
    plain = engines.get(speculative=False, **options).run(generate, prompts, TOKENS)

    accept_length = mean_accept_length(answers[1.0])
    record_property("accept_length", accept_length)
    assert accept_length > 2
    for ratio in (0.5, 0.25, smallest):
        assert [a.token_ids for a in answers[ratio]] == [a.token_ids for a in answers[1.0]], ratio
        assert mean_accept_length(answers[ratio]) == pytest.approx(accept_length, rel=0.01), ratio

    reference, agreement = Reference(ensure(options.get("pair", "qwen3")).target), Agreement(0, 0)
    for run in (answers[1.0], plain):
        for token_ids, answer in zip(prompts, run, strict=True):
            agreement += reference.compare(token_ids, answer.token_ids)
    record_property("near_ties", agreement.near_ties)
    assert agreement.near_ties <= MAX_NEAR_TIE_SHARE * agreement.tokens, agreement


def mean_accept_length(answers: list[Answer]) -> float:
    assert all(len(answer.token_ids) == TOKENS for answer in answers)
    return len(answers) * (TOKENS - 1) / sum(answer.verify_steps for answer in answers)


# -- prefix cache


def twice(engine: Engine, token_ids: list[int]) -> Script[list[Answer]]:
    """A prompt from an empty cache, and once more."""
    (cold,) = yield from generate(engine, [token_ids], 96)
    engine.submit("warm", token_ids, 96)
    yield
    yield from checked(engine)
    return [cold, engine.answers["warm"]]


@pytest.mark.parametrize("flow", FLOWS, scope="module")
def test_a_repeated_long_prompt_hits_up_to_its_last_page(
    engines: Engines, upstream: Upstream, flow: dict[str, Any]
) -> None:
    token_ids = prompt(3, 1000)
    cold, warm = engines.get(**BOUNDED | flow).run(twice, token_ids)

    assert cold.cached_tokens == 0
    # The last token of a prompt is always computed, and a state checkpoint stands only where a chunk ends.
    least = len(token_ids) - 1 - (CHUNK_TOKENS if "pair" in flow else flow["page_size"] - 1)
    assert least <= warm.cached_tokens < len(token_ids)
    assert upstream.expect([token_ids], [cold]) == 0
    upstream.expect([token_ids], [warm], steps_differ=0.05)


def crowded_out(engine: Engine, first: list[int], others: list[list[int]]) -> Script[list[Answer]]:
    """A prompt, others one after the other, then the first one and the last one again."""
    yield from engine.flush()
    for i, token_ids in enumerate([first, *others, first, others[-1]]):
        engine.submit(str(i), token_ids, 40)
        yield
        yield from checked(engine)
    answers = list(engine.answers.values())
    return [answers[0], *answers[-2:]]


@pytest.mark.parametrize("flow", FLOWS, scope="module")
def test_a_prefix_whose_window_was_evicted_is_computed_again(
    engines: Engines, upstream: Upstream, flow: dict[str, Any]
) -> None:
    first, others = prompt(4, 150), [prompt(100 + i, 150) for i in range(40)]
    cold, fallen_back, recent = engines.get(**BOUNDED | flow).run(crowded_out, first, others)

    assert fallen_back.cached_tokens == 0, "2304 slots do not hold the windows of 41 prompts"
    assert recent.cached_tokens >= 128, "the latest prompt is still there"
    for token_ids, answer in ((first, cold), (first, fallen_back), (others[-1], recent)):
        upstream.expect([token_ids], [answer], steps_differ=0.05)

    _, still_there, _ = upstream.engine.run(crowded_out, first, others)
    assert still_there.cached_tokens >= 128, "the target's own pool has room for all of them"


# -- pressure, aborts, bounds


def retracted_every_few_steps(engine: Engine, prompts: list[list[int]], tokens: int) -> Script[list[Answer]]:
    from sglang.srt.managers import scheduler

    scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL = True, 5
    try:
        return (yield from generate(engine, prompts, tokens))
    finally:
        scheduler.TEST_RETRACT = False


@pytest.mark.parametrize("flow", FLOWS, scope="module")
def test_a_retracted_request_resumes_with_the_same_text(
    engines: Engines, upstream: Upstream, flow: dict[str, Any]
) -> None:
    prompts = [prompt(20 + i, 100 + 50 * i) for i in range(4)]
    answers = engines.get(**BOUNDED | flow).run(retracted_every_few_steps, prompts, 80)

    assert sum(answer.retractions for answer in answers) >= 2
    assert [len(answer.token_ids) for answer in answers] == [80] * 4
    # A resumed request gets a token from its prefill, without a verify step.
    assert upstream.expect(prompts, answers, steps_differ=0.5) <= 1


@pytest.mark.parametrize("flow", PLAIN_FLOWS, scope="module")
def test_requests_that_outgrow_the_target_pool_together_are_retracted_and_finish(
    engines: Engines, upstream: Upstream, flow: dict[str, Any]
) -> None:
    prompts = [diary(i, 100) for i in range(4)]
    options = {"max_total_tokens": 2048, "speculative_draft_kv_ratio": 0.75, "schedule_conservativeness": 0.01}
    # A request that may end early is let in before there is room for all that it may generate.
    answers = engines.get(**BOUNDED | flow | options).run(generate, prompts, 600, False)

    assert sum(answer.retractions for answer in answers) >= 1
    assert [len(answer.token_ids) for answer in answers] == [600] * 4
    assert upstream.expect(prompts, answers, steps_differ=0.05) <= 1


def aborted(engine: Engine, long: list[int], other: list[int]) -> Script[list[Answer]]:
    """Abort between two chunks of a prefill, while decoding and while waiting; then serve the same prompts."""
    yield from engine.flush()
    scheduler = engine.scheduler
    engine.submit("in prefill", long, 50)
    yield from engine.until(lambda: scheduler.chunked_req is not None and scheduler.chunked_req.kv.holds_kv)
    yield
    engine.abort("in prefill")
    yield
    yield from checked(engine)

    engine.submit("decoding", other, 400)
    yield from engine.until(lambda: any(len(request.output_ids) > 100 for request in engine.running()))
    engine.submit("waiting", long, 50)
    engine.abort("waiting")
    engine.abort("decoding")
    yield
    yield from checked(engine)
    finished = {rid: answer.finish and answer.finish["type"] for rid, answer in engine.answers.items()}
    assert finished == {"in prefill": "abort", "decoding": "abort", "waiting": "abort"}

    engine.submit("long", long, 50)
    engine.submit("other", other, 50)
    yield
    yield from checked(engine)
    answers = [engine.answers["long"], engine.answers["other"]]
    yield from engine.flush()
    check_empty(engine)
    return answers


@pytest.mark.parametrize("flow", FLOWS, scope="module")
def test_aborts_leave_both_sides_whole(engines: Engines, upstream: Upstream, flow: dict[str, Any]) -> None:
    long, other = prompt(5, 1000), prompt(6, 90)
    answers = engines.get(**BOUNDED | flow).run(aborted, long, other)

    upstream.expect([long, other], answers, steps_differ=0.05)


def flushed(engine: Engine, prompts: list[list[int]]) -> Script[list[list[Answer]]]:
    runs = []
    for _ in range(2):
        runs.append((yield from generate(engine, prompts, 64)))
        yield from engine.flush()
        check_empty(engine)
    return runs


@pytest.mark.parametrize("flow", FLOWS, scope="module")
def test_a_flush_frees_both_sides_and_the_engine_goes_on(engines: Engines, flow: dict[str, Any]) -> None:
    prompts = [prompt(40 + i, 30 + 90 * i) for i in range(4)]
    before, after = engines.get(**BOUNDED | flow).run(flushed, prompts)

    assert [answer.cached_tokens for answer in after] == [answer.cached_tokens for answer in before]
    assert [answer.token_ids for answer in before] == [answer.token_ids for answer in after]


DRAFT_POOL_TOKENS = 729
SMALL = BOUNDED | {"max_running_requests": 1, "max_total_tokens": 4864, "speculative_draft_kv_ratio": 0.15}


@pytest.mark.parametrize("flow", FLOWS, scope="module")
def test_a_prompt_longer_than_the_draft_pool_is_served(
    engines: Engines, upstream: Upstream, flow: dict[str, Any]
) -> None:
    token_ids = prompt(7, 3000)
    (answer,) = engines.get(**SMALL | flow).run(generate, [token_ids], 64)

    assert answer.retractions == 0
    assert upstream.expect([token_ids], [answer]) == 0


def draft_slots_in_use(engine: Engine, token_ids: list[int], tokens: int) -> Script[tuple[Answer, list[int]]]:
    yield from engine.flush()
    engine.submit("a", token_ids, tokens)
    yield
    in_use = []
    for _ in checked(engine):
        in_use.append(engine.allocator.size_swa - engine.allocator.swa_available_size())
        yield
    return engine.answers["a"], in_use


@pytest.mark.parametrize("flow", FLOWS, scope="module")
def test_one_request_outlives_the_draft_pool(engines: Engines, upstream: Upstream, flow: dict[str, Any]) -> None:
    token_ids, tokens = prompt(8, 20), 2 * DRAFT_POOL_TOKENS
    answer, in_use = engines.get(**SMALL | flow).run(draft_slots_in_use, token_ids, tokens)

    assert len(answer.token_ids) == tokens and answer.retractions == 0
    assert upstream.expect([token_ids], [answer]) == 0
    # A request's share of the cap that the pool is sized for: with state, also back to its last checkpoint.
    interval, block, track_interval = 8, 8, 256 if "pair" in flow else 0
    cap = WINDOW_TOKENS + track_interval + interval * block + flow["page_size"] + 2 * block
    assert WINDOW_TOKENS <= max(in_use) <= cap
    assert any(later < earlier for earlier, later in pairwise(in_use)), "slots are freed while it runs"


@pytest.mark.parametrize("flow", FLOWS, scope="module")
def test_generation_ends_at_the_context_boundary(engines: Engines, upstream: Upstream, flow: dict[str, Any]) -> None:
    prompts = [prompt(50 + i, 350) for i in range(2)]
    answers = engines.get(**BOUNDED | flow, context_length=512).run(generate, prompts, 1000)

    assert [answer.finish and answer.finish["type"] for answer in answers] == ["length"] * 2
    assert all(512 - 350 - 8 <= len(answer.token_ids) <= 512 - 350 for answer in answers)
    assert upstream.expect(prompts, answers) == 0
