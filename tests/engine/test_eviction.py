"""Sliding-window eviction while DFLASH decodes, on the real scheduler with strict memory checks.

Each run has its control: the same run with the two calls that `DFlashDraftInputV2.prepare_for_decode` makes for it
taken out, as SGLang 0.5.15.post1 to 0.5.17 were.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
from transformers import AutoTokenizer

from reference import MAX_NEAR_TIE_SHARE, Reference
from scripted import Answer, Engine, EngineProcess, Engines, Script
from server import Servers
from server_ext.pools import held_bound
from server_ext.tiny import corpus
from server_ext.tiny.build import TinyPair, ensure

SWA_TOKENS = 768
FULL_TOKENS = 16 * SWA_TOKENS
LONG_TOKENS = 4 * SWA_TOKENS
REQUESTS = 3
FLOWS = {
    f"page{page_size}-{'overlap' if overlap else 'no_overlap'}": {
        "page_size": page_size,
        "disable_overlap_schedule": not overlap,
    }
    for page_size in (1, 64)
    for overlap in (True, False)
}


@pytest.fixture(scope="module")
def engines(servers: Servers) -> Iterator[Engines]:
    servers.close()
    shared = Engines()
    yield shared
    shared.close()


@pytest.fixture(scope="module", params=FLOWS)
def engine(engines: Engines, request: pytest.FixtureRequest) -> EngineProcess:
    return engines.get(
        pair="swa",
        max_total_tokens=FULL_TOKENS,
        swa_full_tokens_ratio=SWA_TOKENS / FULL_TOKENS,
        max_running_requests=REQUESTS,
        **FLOWS[request.param],
    )


@pytest.fixture(scope="module")
def pair() -> TinyPair:
    return ensure("swa")


@pytest.fixture(scope="module")
def reference(pair: TinyPair) -> Reference:
    return Reference(pair.target)


@pytest.fixture(scope="module")
def prompts(pair: TinyPair) -> list[list[int]]:
    """Token ids of texts that the pair continues without end: two shorter than the window, one of many windows."""
    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    long = corpus.diary_text(corpus.HEROES[4], corpus.random_wheels(random.Random(1)), 30)
    ids = [tokenizer(text)["input_ids"] for text in ("Ada keeps a diary.", "On Monday the red fox meets", long)]
    assert len(ids) == REQUESTS and len(ids[2]) > 5 * pair.window_tokens
    return ids


# -- the bound


@dataclass(frozen=True)
class Settings:
    """What an engine says of itself; sizes are in tokens."""

    overlap: bool

    full: int
    swa: int
    page: int
    window: int
    interval: int
    block: int
    reserve: int

    def most_held(self, prompt_tokens: int) -> int:
        """The most SWA slots that a decoding request holds, however long it generates.

        Beside its own, the request keeps the last window of its prompt locked in the prefix cache until it ends.
        """
        window = -(-self.window // self.page) * self.page
        own = held_bound(
            retained_slots=window,
            page_size_tokens=self.page,
            eviction_interval_tokens=self.interval,
            reserve_tokens=self.reserve,
        )
        return own + min(prompt_tokens // self.page * self.page, window)


def settings_of(engine: Engine) -> Settings:
    from sglang.srt.environ import envs
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    return Settings(
        overlap=engine.scheduler.enable_overlap,
        full=engine.allocator.size_full,
        swa=engine.allocator.size_swa,
        page=engine.allocator.page_size,
        window=engine.scheduler.tree_cache.swa_retain_window,
        interval=envs.SGLANG_SWA_EVICTION_INTERVAL.get(),
        block=engine.draft_worker.block_size,
        reserve=get_alloc_reserve_per_decode(),
    )


def settings_alone(engine: Engine) -> Script[Settings]:
    yield
    return settings_of(engine)


# -- runs


@dataclass(frozen=True)
class Retraction:
    """The pools when the scheduler finds that the next step does not fit, in tokens."""

    requests: int
    generated: int
    swa_held: int
    full_held: int


@dataclass(frozen=True)
class Run:
    """A run, what its requests held at every step while all of them decoded, and how many ran at once."""

    settings: Settings
    answers: list[Answer]
    swa_held: list[int]
    full_held: list[int]
    together: int
    retractions: list[Retraction]


def held(engine: Engine) -> tuple[int, int]:
    """Return the tokens that requests hold in the SWA pool and in the full one; the prefix cache's do not count."""
    stats = engine.scheduler.pool_stats_observer.get_pool_stats()
    return stats.swa_num_used, stats.full_num_used


def evicting(engine: Engine, prompts: list[list[int]], tokens: int) -> Script[Run]:
    """All prompts at once, from an empty cache."""
    yield from engine.flush()
    seen = Run(settings_of(engine), [], [], [], 0, [])
    together = 0
    with retractions_to(seen.retractions, engine):
        for i, prompt in enumerate(prompts):
            engine.submit(str(i), prompt, tokens)
        yield
        for _ in engine.until_idle():
            running = engine.running()
            if all(request.output_ids for request in running):
                swa_held, full_held = held(engine)
                seen.swa_held.append(swa_held)
                seen.full_held.append(full_held)
            together = max(together, len(running))
            yield
    seen.answers.extend(engine.answers.values())
    return replace(seen, together=together)


def never_evicting(engine: Engine, prompts: list[list[int]], tokens: int) -> Script[Run]:
    """The same run without the two calls."""
    with without_the_two_calls():
        return (yield from evicting(engine, prompts, tokens))


@contextlib.contextmanager
def retractions_to(log: list[Retraction], engine: Engine) -> Iterator[None]:
    """Note every time that requests are taken out of the running batch for lack of memory."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    retract_decode = ScheduleBatch.retract_decode

    def noted(batch: Any) -> Any:
        swa_held, full_held = held(engine)
        generated = sum(len(request.output_ids) for request in batch.reqs)
        log.append(Retraction(len(batch.reqs), generated, swa_held, full_held))
        return retract_decode(batch)

    with mock.patch.object(ScheduleBatch, "retract_decode", noted):
        yield


@contextlib.contextmanager
def without_the_two_calls() -> Iterator[None]:
    """Take eviction and tick out of `DFlashDraftInputV2.prepare_for_decode`."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2

    prepare_for_decode = DFlashDraftInputV2.prepare_for_decode

    def broken(draft_input: Any, batch: Any) -> None:
        ticks = [request.decode_batch_idx for request in batch.reqs]
        with mock.patch.object(ScheduleBatch, "maybe_evict_swa", lambda _: None):
            prepare_for_decode(draft_input, batch)
        for request, tick in zip(batch.reqs, ticks, strict=True):
            request.decode_batch_idx = tick

    with mock.patch.object(DFlashDraftInputV2, "prepare_for_decode", broken):
        yield


def check_text(reference: Reference, prompts: list[list[int]], answers: list[Answer]) -> None:
    for prompt, answer in zip(prompts, answers, strict=True):
        agreement = reference.follow(prompt, answer.token_ids)
        assert agreement.near_ties <= max(1, MAX_NEAR_TIE_SHARE * agreement.tokens), agreement


# -- conformance and control


@pytest.mark.parametrize("requests", [1, REQUESTS])
def test_requests_outgrow_the_pool_without_filling_it(
    engine: EngineProcess, reference: Reference, prompts: list[list[int]], requests: int
) -> None:
    prompts = prompts[:requests]

    seen = engine.run(evicting, prompts, LONG_TOKENS)

    settings = seen.settings
    assert (settings.full, settings.swa) == (FULL_TOKENS, SWA_TOKENS)
    assert [len(answer.token_ids) for answer in seen.answers] == [LONG_TOKENS] * requests
    assert {answer.finish["type"] for answer in seen.answers} == {"length"}
    assert seen.together == requests
    assert seen.retractions == []
    assert max(seen.swa_held) <= sum(settings.most_held(len(prompt)) for prompt in prompts) < settings.swa
    assert max(seen.full_held) >= LONG_TOKENS
    check_text(reference, prompts, seen.answers)


def test_without_the_two_calls_the_same_run_ends_at_the_pools_size(
    engine: EngineProcess, prompts: list[list[int]]
) -> None:
    seen = engine.run(never_evicting, prompts[:1], LONG_TOKENS)

    settings = seen.settings
    (retraction,) = seen.retractions
    assert retraction.requests == 1
    # Whole pages, each step at most a block: what is left could not take the next step.
    assert 0 <= settings.swa - retraction.swa_held < max(settings.block, settings.page)
    assert settings.swa - retraction.generated <= len(prompts[0]) + settings.reserve + max(
        settings.block, settings.page
    )
    assert retraction.full_held < settings.full / 10
    assert [answer.finish["type"] for answer in seen.answers] == ["abort"]


def test_without_the_two_calls_requests_retract_each_other(engine: EngineProcess, prompts: list[list[int]]) -> None:
    seen = engine.run(never_evicting, prompts, SWA_TOKENS // 2)

    settings = seen.settings
    first = seen.retractions[0]
    assert first.requests == len(prompts)
    assert 0 <= settings.swa - first.swa_held < len(prompts) * max(settings.block, settings.page)
    assert first.full_held < settings.full / 10
    assert sum(answer.retractions for answer in seen.answers) >= 1


def test_text_is_the_same_without_eviction_while_the_pool_lasts(
    engine: EngineProcess, prompts: list[list[int]]
) -> None:
    tokens = SWA_TOKENS - 128

    with_eviction = engine.run(evicting, prompts[:1], tokens)
    without = engine.run(never_evicting, prompts[:1], tokens)

    assert without.retractions == with_eviction.retractions == []
    assert max(without.swa_held) >= tokens > 2 * max(with_eviction.swa_held)
    assert without.answers == with_eviction.answers


# -- bookkeeping


@dataclass(frozen=True)
class Books:
    """What a batch's requests say, each by its name."""

    ticks: dict[str, int]
    allocated: dict[str, int]
    evicted: dict[str, int]


@dataclass(frozen=True)
class Preparation:
    """One preparation of a decode batch: the books around it and whenever the batch was told to evict."""

    before: Books
    at_evictions: list[Books]
    after: Books


def books_of(batch: Any) -> Books:
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    requests = {request.rid: request for request in batch.reqs}
    return Books(
        ticks={rid: request.decode_batch_idx for rid, request in requests.items()},
        allocated={rid: request.kv.kv_allocated_len for rid, request in requests.items()},
        evicted={rid: request.kv.get_evicted_seqlen(ComponentType.SWA) for rid, request in requests.items()},
    )


class Bookkeeper:
    """Notes what preparations of decode batches do to the real batch."""

    def __init__(self) -> None:
        self.preparations: list[Preparation] = []
        self._evictions: list[Books] = []

    @contextlib.contextmanager
    def watching(self, *prepare: Callable[..., None]) -> Iterator[None]:
        """While the context lasts, DFLASH prepares a batch by calling `prepare` in turn, each of them noted."""
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2

        maybe_evict_swa = ScheduleBatch.maybe_evict_swa

        def noting_eviction(batch: Any) -> None:
            self._evictions.append(books_of(batch))
            maybe_evict_swa(batch)

        def prepare_all(draft_input: Any, batch: Any) -> None:
            for function in prepare:
                self._note(function, draft_input, batch)

        with (
            mock.patch.object(ScheduleBatch, "maybe_evict_swa", noting_eviction),
            mock.patch.object(DFlashDraftInputV2, "prepare_for_decode", prepare_all),
        ):
            yield

    def _note(self, prepare: Callable[..., None], draft_input: Any, batch: Any) -> None:
        self._evictions.clear()  # a prefill evicts too
        before = books_of(batch)
        prepare(draft_input, batch)
        self.preparations.append(Preparation(before, list(self._evictions), books_of(batch)))


def prepare_functions() -> tuple[Callable[..., None], Callable[..., None]]:
    """Return SGLang's own preparations for EAGLE and for DFLASH; each takes the draft input and the batch."""
    from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
    from sglang.srt.speculative.eagle_utils import eagle_prepare_for_decode

    return lambda _, batch: eagle_prepare_for_decode(batch), DFlashDraftInputV2.prepare_for_decode


def bookkeeping(engine: Engine, prompts: list[list[int]]) -> Script[list[Preparation]]:
    """An early request's decoding, joined by a late one; of what was prepared, the last is the late one's alone."""
    early, late = prompts
    yield from engine.flush()
    keeper = Bookkeeper()
    _, dflash = prepare_functions()
    with keeper.watching(dflash):
        engine.submit("early", early, 256)
        yield from engine.until(lambda: len(keeper.preparations) >= 10)
        engine.submit("late", late, 256)
        yield from engine.until_idle()
    return keeper.preparations


def check_order(preparation: Preparation) -> None:
    """Raise AssertionError unless the batch evicted once, then allocated, then ticked."""
    (at_eviction,) = preparation.at_evictions
    assert at_eviction == preparation.before
    assert preparation.after.ticks == {rid: tick + 1 for rid, tick in preparation.before.ticks.items()}


def test_every_step_evicts_then_ticks(engine: EngineProcess, prompts: list[list[int]]) -> None:
    preparations = engine.run(bookkeeping, prompts[2:] + prompts[:1])

    for preparation in preparations:
        check_order(preparation)
    for rid in ("early", "late"):
        ticks = [preparation.before.ticks[rid] for preparation in preparations if rid in preparation.before.ticks]
        assert ticks == list(range(len(ticks))) and len(ticks) > 256 / 8, "a step without a tick"
    assert any(len(preparation.before.ticks) == 2 for preparation in preparations)


def test_the_first_step_skips_eviction(engine: EngineProcess, prompts: list[list[int]]) -> None:
    """Under overlap scheduling the prefill is not processed yet, and a prompt of many windows makes eviction due."""
    settings = engine.run(settings_alone)
    first, *_, last = engine.run(bookkeeping, prompts[2:] + prompts[:1])

    left_the_window = len(prompts[2]) - 1 - settings.window - first.before.evicted["early"]
    assert (left_the_window >= settings.interval) == settings.overlap
    assert first.before.ticks == {"early": 0}
    assert first.before.evicted == first.after.evicted
    assert last.after.evicted["late"] > len(prompts[0])


def idle_preparation(engine: Engine) -> Script[tuple[bool, list[Preparation]]]:
    """Prepare the scheduler's own batch while it has no requests."""
    from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2

    yield from engine.flush()
    batch = engine.scheduler.running_batch
    keeper = Bookkeeper()
    _, dflash = prepare_functions()
    with keeper.watching(dflash):
        DFlashDraftInputV2.create_idle_input(engine.scheduler.device).prepare_for_decode(batch)
    return batch.is_empty(), keeper.preparations


def test_an_empty_batch_neither_evicts_nor_ticks(engine: EngineProcess) -> None:
    empty, (preparation,) = engine.run(idle_preparation)

    assert empty
    assert preparation.at_evictions == []
    assert preparation.after.ticks == {}


def eagle_before_dflash(engine: Engine, prompt: list[int]) -> Script[tuple[list[Preparation], Answer]]:
    """Prepare each decode batch as EAGLE does, right before DFLASH does."""
    yield from engine.flush()
    keeper = Bookkeeper()
    with keeper.watching(*prepare_functions()):
        engine.submit("0", prompt, 256)
        yield from engine.until_idle()
    return keeper.preparations, engine.answers["0"]


def test_eagle_keeps_the_same_books(engine: EngineProcess, reference: Reference, prompts: list[list[int]]) -> None:
    preparations, answer = engine.run(eagle_before_dflash, prompts[0])

    eagle, dflash = preparations[::2], preparations[1::2]
    for preparation in preparations:
        check_order(preparation)
    for after, before in zip(eagle, dflash, strict=True):
        assert before.before == after.after
        # Nothing is left to do: both keep and reserve the same.
        assert (before.after.evicted, before.after.allocated) == (after.after.evicted, after.after.allocated)
    assert eagle[-1].after.evicted["0"] > 0
    check_text(reference, prompts[:1], [answer])
