"""The pools' figures against the allocator's own books and against what a workload must have caused."""

import contextlib
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import scripted
from scripted import Answer, Engine, EngineFailure, EngineProcess, Script
from server import Servers
from server_ext import metrics, plugin
from server_ext.hooks import Hook
from server_ext.watch import EXPORT_SECONDS, Watch
from test_draft_kv_ratio import BOUNDED, WITH_STATE, diary, prompt
from test_eviction import without_the_two_calls

DRAFT = BOUNDED | {"page_size": 64}
DRAFT_WITH_STATE = BOUNDED | WITH_STATE | {"page_size": 1}
# A request that may end early is let in before there is room for all that it may generate.
FULL = BOUNDED | {"max_total_tokens": 2048, "speculative_draft_kv_ratio": 0.75, "schedule_conservativeness": 0.01}
SWA = {"pair": "swa", "max_total_tokens": 12288, "swa_full_tokens_ratio": 1 / 16, "max_running_requests": 3}


class Engines:
    """Keeps every engine it has started: they are tiny, and wait for their next script without work."""

    def __init__(self) -> None:
        self._running: list[tuple[dict[str, Any], EngineProcess]] = []

    def get(self, options: dict[str, Any]) -> EngineProcess:
        for known, engine in self._running:
            if known == options and engine.alive:
                return engine
        self._running.append((options, EngineProcess(enable_metrics=True, **options)))
        return self._running[-1][1]

    def close(self) -> None:
        for _, engine in self._running:
            engine.close()


@pytest.fixture(scope="module")
def engines(servers: Servers) -> Iterator[Engines]:
    servers.close()
    shared = Engines()
    yield shared
    shared.close()


Samples = dict[tuple[str, str], float]


@dataclass(frozen=True)
class State:
    """What the engine answers to ``GET /pools`` and what it exports; samples by name and their own label's value."""

    config: dict[str, Any]
    snapshot: dict[str, Any]
    samples: Samples

    def pool(self, name: str) -> dict[str, Any]:
        (pool,) = [pool for pool in self.snapshot["pools"] if pool["name"] == name]
        return pool

    def retractions(self) -> dict[str, dict[str, int]]:
        return {entry["cause"]: entry for entry in self.snapshot["retractions"]}


def asked(engine: Engine) -> dict[str, Any]:
    """Ask the scheduler for its pools as the HTTP process does."""
    from sglang.srt.managers.io_struct import GetInternalStateReq

    from server_ext.watch import REQUEST_ID

    return engine.scheduler.get_internal_state(GetInternalStateReq(rid=REQUEST_ID)).internal_state


def samples() -> Samples:
    from prometheus_client import REGISTRY

    found = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            labels = [sample.labels[label] for label in ("pool", "cause", "le") if label in sample.labels]
            found[sample.name, ",".join(labels)] = sample.value
    return found


def state(engine: Engine) -> State:
    """Return snapshot and metrics of the same moment; nothing may run meanwhile."""
    answer, now = asked(engine), time.time()
    while (exported := samples())[f"{metrics.PREFIX}update_timestamp_seconds", ""] <= now:
        time.sleep(0.02)
    return State(answer["config"], answer["snapshot"], exported)


def differences(before: Samples, after: Samples) -> Samples:
    return {key: after[key] - before.get(key, 0) for key in after if key[0].endswith(("_total", "_sum", "_count"))}


# -- books


@dataclass(frozen=True)
class Books:
    """Free slots by pool, those of the running requests' rows, and the most that a decoding one maps of its own."""

    free: dict[str, int]
    full_rows: int
    held_max: int | None


def free_slots(side: Any) -> int:
    return len(side.get_all_free_pages()) * side.page_size


def books(engine: Engine, window_pool: str | None) -> Books:
    import torch

    scheduler, allocator = engine.scheduler, engine.allocator
    page = scheduler.page_size
    free, held_max = {}, None
    rows = []
    for request in engine.running():
        row = scheduler.req_to_token_pool.req_to_token[request.kv.req_pool_idx]
        rows.append(row[: request.kv.kv_allocated_len] // page)
    full_rows = len(torch.unique(torch.cat(rows))) * page if rows else 0
    if window_pool is None:
        free["full"] = free_slots(allocator)
    else:
        free["full"] = free_slots(allocator.full_attn_allocator)
        free[window_pool] = free_slots(allocator.swa_attn_allocator)
        held_max = 0
        for request in scheduler.running_batch.reqs:
            if request.kv.holds_kv and len(request.output_ids) > 1 + engine.draft_worker.block_size:
                row = scheduler.req_to_token_pool.req_to_token[request.kv.req_pool_idx]
                own = row[request.kv.cache_protected_len : request.kv.kv_allocated_len].to(torch.int64)
                mapped = allocator.full_to_swa_index_mapping[own]
                held_max = max(held_max, len(torch.unique(mapped[mapped > 0] // page)) * page)
    if hasattr(scheduler.req_to_token_pool, "mamba_allocator"):
        free["mamba"] = len(scheduler.req_to_token_pool.mamba_allocator.free_slots)
    return Books(free, full_rows, held_max)


@contextlib.contextmanager
def most_used(engine: Engine) -> Iterator[dict[str, int]]:
    """Note the most slots used of each pool whenever a batch is about to run."""
    most: dict[str, int] = {}
    run_batch = engine.scheduler.run_batch

    def noted(*args: Any, **kwargs: Any) -> Any:
        for pool in asked(engine)["snapshot"]["pools"]:
            most[pool["name"]] = max(most.get(pool["name"], 0), pool["used_slots"])
        return run_batch(*args, **kwargs)

    with mock.patch.object(engine.scheduler, "run_batch", noted):
        yield most


def compared(engine: Engine, prompts: list[list[int]], window_pool: str | None) -> Script[tuple[State, State, Any]]:
    """Requests from an empty cache; at every step the figures must be what the books say."""
    yield from engine.flush()
    with most_used(engine) as most:
        for i, token_ids in enumerate(prompts):
            engine.submit(str(i), token_ids, 200)
        yield
        for _ in engine.until_idle():
            pools = {pool["name"]: pool for pool in asked(engine)["snapshot"]["pools"]}
            expected = books(engine, window_pool)
            assert {name: pool["free_slots"] for name, pool in pools.items()} == expected.free
            for pool in pools.values():
                assert pool["used_slots"] + pool["evictable_slots"] + pool["free_slots"] == pool["size_slots"]
            assert pools["full"]["used_slots"] == expected.full_rows
            if window_pool is not None:
                assert pools[window_pool]["held_max_slots"] == expected.held_max
            yield
    after = state(engine)
    yield from engine.flush()
    return after, state(engine), most


@pytest.mark.parametrize(
    ("options", "names"),
    [
        pytest.param({"speculative": False}, ["full"], id="plain"),
        pytest.param(DRAFT, ["full", "draft"], id="draft"),
        pytest.param(DRAFT_WITH_STATE, ["full", "draft", "mamba"], id="draft-with-state"),
        pytest.param(SWA, ["full", "swa"], id="swa"),
    ],
)
def test_every_figure_is_in_the_allocators_books(engines: Engines, options: dict[str, Any], names: list[str]) -> None:
    window_pool = names[1] if len(names) > 1 else None
    prompts = [prompt(i, 60 + 60 * i) for i in range(4)]
    after, flushed, most = engines.get(options).run(compared, prompts, window_pool)

    assert [pool["name"] for pool in after.snapshot["pools"]] == names
    for pool in after.snapshot["pools"]:
        assert pool["used_slots"] == 0 < pool["evictable_slots"]
        assert pool["high_water_slots"] == most[pool["name"]]
    for pool in flushed.snapshot["pools"]:
        assert pool["free_slots"] == pool["size_slots"]
    for quiet in (after, flushed):
        check_exported(quiet)


def check_exported(quiet: State) -> None:
    """Raise AssertionError unless the metrics say what the snapshot says, and of nothing that does not apply."""
    for pool, config in zip(quiet.snapshot["pools"], quiet.config["pools"], strict=True):
        name = pool["name"]
        for figure in ("size", "used", "evictable", "free", "high_water"):
            assert quiet.samples[f"{metrics.PREFIX}pool_{figure}_slots", name] == pool[f"{figure}_slots"]
        assert quiet.samples[f"{metrics.PREFIX}pool_usage_ratio", name] == pool["used_slots"] / pool["size_slots"]
        assert quiet.samples[f"{metrics.PREFIX}pool_size_bytes", name] == config["size_bytes"] > 0
        for figure in ("window_tokens", "request_cap_slots", "headroom_slots", "cacheable_prefixes"):
            assert quiet.samples.get((f"{metrics.PREFIX}pool_{figure}", name)) == config[figure]
        for figure in ("window_freed_slots_total", "evicted_slots_total", "prefix_lost_tokens_total"):
            assert quiet.samples.get((f"{metrics.PREFIX}{figure}", name)) == pool[figure]
        assert quiet.samples.get((f"{metrics.PREFIX}request_held_max_slots", name)) == pool["held_max_slots"]
        windowed = name in ("swa", "draft")
        assert quiet.samples.get((f"{metrics.PREFIX}request_held_within_bound", name)) == (1 if windowed else None)
    assert quiet.samples[f"{metrics.PREFIX}up", ""] == 1
    exported = {name.removeprefix(metrics.PREFIX) for name, _ in quiet.samples if name.startswith(metrics.PREFIX)}
    of_draft = {"verify_steps_total", "accepted_tokens_total", "block_size_tokens", "draft_kv_ratio"}
    assert of_draft & exported == (of_draft if quiet.config["speculative_algorithm"] == "DFLASH" else set())


# -- events of the window pool


@contextlib.contextmanager
def freed_by_the_window(engine: Engine) -> Iterator[list[int]]:
    """Note the slots that each eviction of a decode batch gives back."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    maybe_evict_swa = ScheduleBatch.maybe_evict_swa
    freed: list[int] = []

    def noted(batch: Any) -> None:
        before = engine.allocator.swa_available_size()
        maybe_evict_swa(batch)
        freed.append(engine.allocator.swa_available_size() - before)

    with mock.patch.object(ScheduleBatch, "maybe_evict_swa", noted):
        yield freed


def one_request(engine: Engine, token_ids: list[int], tokens: int) -> Script[tuple[Samples, int, Answer, float]]:
    yield from engine.flush()
    before = state(engine).samples
    found: list[Any] = []
    with freed_by_the_window(engine) as freed:
        engine.submit("a", token_ids, tokens)
        yield
        for _ in engine.until_idle():
            found = engine.running() or found
            yield
    (request,) = found
    accept_length = 1 + request.spec_num_correct_drafts / request.spec_verify_ct
    return differences(before, state(engine).samples), sum(freed), engine.answers["a"], accept_length


@pytest.mark.parametrize(
    ("options", "pool"), [pytest.param(DRAFT, "draft", id="draft"), pytest.param(SWA, "swa", id="swa")]
)
def test_one_request_slides_its_window_and_reports_its_accept_length(
    engines: Engines, options: dict[str, Any], pool: str
) -> None:
    seen, freed, answer, accept_length = engines.get(options).run(one_request, diary(0, 40), 400)

    assert seen[f"{metrics.PREFIX}window_freed_slots_total", pool] == freed
    assert 400 - 64 - 2 * 64 <= freed <= 400
    assert seen[f"{metrics.PREFIX}verify_steps_total", ""] == answer.verify_steps
    assert 399 <= seen[f"{metrics.PREFIX}accepted_tokens_total", ""] < 399 + 8
    assert seen[f"{metrics.PREFIX}request_accept_length_tokens_count", ""] == 1
    assert seen[f"{metrics.PREFIX}request_accept_length_tokens_sum", ""] == pytest.approx(accept_length)
    assert accept_length == pytest.approx(answer.accept_length, rel=0.1)


@contextlib.contextmanager
def evicted_from_the_cache(engine: Engine) -> Iterator[dict[str, int]]:
    """Add up the slots that each eviction from the prefix cache gives back."""
    tree_cache, allocator = engine.scheduler.tree_cache, engine.allocator
    evict_for_alloc = tree_cache.evict_for_alloc
    evicted = {"full": 0, "window": 0}

    def noted(*args: Any, **kwargs: Any) -> Any:
        before = allocator.full_available_size(), allocator.swa_available_size()
        result = evict_for_alloc(*args, **kwargs)
        evicted["full"] += allocator.full_available_size() - before[0]
        evicted["window"] += allocator.swa_available_size() - before[1]
        return result

    with mock.patch.object(tree_cache, "evict_for_alloc", noted):
        yield evicted


def crowded_out(
    engine: Engine, first: list[int], others: list[list[int]]
) -> Script[tuple[Samples, dict[str, int], Samples, int]]:
    """Prompts one after the other until the window pool has forgotten the first one; then that one again.

    Also returns how many tokens of that one the full pool still had and were computed again.
    """
    from sglang.srt.mem_cache.radix_cache import RadixKey

    yield from engine.flush()
    before = state(engine).samples
    with evicted_from_the_cache(engine) as evicted:
        for i, token_ids in enumerate([first, *others]):
            engine.submit(str(i), token_ids, 8)
            yield from engine.until_idle()
    crowded = state(engine).samples
    key = RadixKey(array("q", first[:-1]))
    in_full_pool, _, _ = engine.scheduler.tree_cache.tree_core.match_full_device_prefix(key)
    engine.submit("again", first, 8)
    yield from engine.until_idle()
    again = differences(crowded, state(engine).samples)
    return differences(before, crowded), evicted, again, in_full_pool - engine.answers["again"].cached_tokens


def test_evictions_and_the_prefix_they_cost(engines: Engines) -> None:
    others = [prompt(100 + i, 150) for i in range(40)]
    crowding, evicted, again, lost = engines.get(DRAFT).run(crowded_out, prompt(4, 150), others)

    assert crowding[f"{metrics.PREFIX}evicted_slots_total", "draft"] == evicted["window"] > 0
    assert crowding[f"{metrics.PREFIX}evicted_slots_total", "full"] == evicted["full"]
    assert crowding["sglang:evicted_tokens_total", ""] == evicted["full"]
    assert crowding[f"{metrics.PREFIX}prefix_lost_tokens_total", "draft"] == 0
    assert again[f"{metrics.PREFIX}prefix_lost_tokens_total", "draft"] == lost >= 64


def shared_prefix(
    engine: Engine, first: list[int], tail: list[int], others: list[list[int]]
) -> Script[tuple[list[int], list[float]]]:
    """A prompt; one that shares its first 100 tokens; others that crowd out its first windows; one that shares 128.

    Returns how many tokens the full pool had and were computed again, and how many of these count as lost.
    """
    from sglang.srt.mem_cache.radix_cache import RadixKey

    yield from engine.flush()
    engine.submit("first", first, 8)
    yield from engine.until_idle()
    again, lost = [], []
    for shared in (100, 128):
        in_full_pool, _, _ = engine.scheduler.tree_cache.tree_core.match_full_device_prefix(
            RadixKey(array("q", first[:shared]))
        )
        before = state(engine).samples
        engine.submit(str(shared), first[:shared] + tail, 8)
        yield from engine.until_idle()
        again.append(in_full_pool - engine.answers[str(shared)].cached_tokens)
        lost.append(differences(before, state(engine).samples)[f"{metrics.PREFIX}prefix_lost_tokens_total", "draft"])
        for i, token_ids in enumerate(others):
            engine.submit(f"{shared}-{i}", token_ids, 40)
            yield from engine.until_idle()
    return again, lost


def test_a_missing_checkpoint_is_not_a_lost_window(engines: Engines) -> None:
    others = [prompt(100 + i, 150) for i in range(25)]
    again, lost = engines.get(DRAFT_WITH_STATE).run(shared_prefix, prompt(4, 300), prompt(5, 50), others)

    assert again == [100 - 64, 128], "the first checkpoint; nothing, as the cache dropped it with its window"
    assert lost == [0, 128]


# -- admissions and retractions


def queued(engine: Engine, prompts: list[list[int]], tokens: int) -> Script[Samples]:
    yield from engine.flush()
    before = state(engine).samples
    for i, token_ids in enumerate(prompts):
        engine.submit(str(i), token_ids, tokens)
    yield from engine.until_idle()
    assert [len(answer.token_ids) for answer in engine.answers.values()] == [tokens] * len(prompts)
    return differences(before, state(engine).samples)


def test_a_request_that_waits_for_the_full_pool_is_counted_once(engines: Engines) -> None:
    seen = engines.get(FULL).run(queued, [diary(i, 40) for i in range(3)], 900)

    assert seen[f"{metrics.PREFIX}delayed_admissions_total", "full"] == 1, "two requests of 940 fit into 2048 slots"
    assert seen[f"{metrics.PREFIX}delayed_admissions_total", "draft"] == 0
    assert seen.get(("sglang:num_retracted_requests_total", ""), 0) == 0


@dataclass(frozen=True)
class Exhausted:
    """A run that fills a pool: what it added to the metrics, the figures at its end, and the answers."""

    seen: Samples
    after: State
    answers: list[Answer]
    within_bound: list[bool]


def exhausting(engine: Engine, prompts: list[list[int]], tokens: int, window_pool: str | None) -> Script[Exhausted]:
    """All prompts at once; with `window_pool` its eviction is taken out, as in releases that lack it."""
    yield from engine.flush()
    before = state(engine).samples
    within_bound = []
    with without_the_two_calls() if window_pool else contextlib.nullcontext():
        for i, token_ids in enumerate(prompts):
            engine.submit(str(i), token_ids, tokens, ignore_eos=window_pool is not None)
        yield
        for _ in engine.until_idle():
            pools = {pool["name"]: pool for pool in asked(engine)["snapshot"]["pools"]}
            if window_pool:
                pool = pools[window_pool]
                within_bound.append(pool["held_max_slots"] <= pool["held_bound_slots"])
            yield
    after = state(engine)
    return Exhausted(differences(before, after.samples), after, list(engine.answers.values()), within_bound)


@pytest.mark.parametrize(
    ("options", "cause", "tokens"),
    [
        pytest.param(FULL, "full", 600, id="full"),
        pytest.param(DRAFT, "draft", 1000, id="draft"),
        pytest.param(SWA, "swa", 500, id="swa"),
    ],
)
def test_retractions_have_the_pool_that_ran_out_as_their_cause(
    engines: Engines, options: dict[str, Any], cause: str, tokens: int
) -> None:
    prompts = [diary(i, 100) for i in range(options["max_running_requests"])]
    window_pool = None if cause == "full" else cause
    run = engines.get(options).run(exhausting, prompts, tokens, window_pool)

    for kind in ("requests", "input_tokens", "output_tokens"):
        by_cause = {
            label: value
            for (name, label), value in run.seen.items()
            if name == f"{metrics.PREFIX}retracted_{kind}_total"
        }
        assert by_cause[cause] > 0
        assert sum(by_cause.values()) == by_cause[cause] == run.seen[f"sglang:num_retracted_{kind}_total", ""]
    retracted = run.seen[f"{metrics.PREFIX}retracted_requests_total", cause]
    assert retracted == sum(answer.retractions for answer in run.answers)
    aborted = [answer for answer in run.answers if answer.finish and answer.finish["type"] == "abort"]
    assert run.seen[f"{metrics.PREFIX}retraction_aborted_requests_total", cause] == len(aborted)
    full = run.after.pool(cause)
    assert full["high_water_slots"] > 0.9 * full["size_slots"]
    assert set(run.after.retractions()) == {pool["name"] for pool in run.after.snapshot["pools"]}
    if window_pool:
        first_over = run.within_bound.index(False)
        assert all(run.within_bound[:first_over]) and first_over > 0, "the bound is broken before the pool is full"


def alone_without_eviction(engine: Engine, token_ids: list[int], late: list[int]) -> Script[tuple[Samples, Any]]:
    """One request fills the window pool alone; another arrives when there is no room for it."""
    yield from engine.flush()
    before = state(engine).samples
    submitted = False
    with without_the_two_calls():
        engine.submit("a", token_ids, 2000)
        yield
        for _ in engine.until_idle():
            pool = asked(engine)["snapshot"]["pools"][1]
            if not submitted and pool["free_slots"] < len(late) // 2:
                engine.submit("late", late, 8)
                submitted = True
            yield
    return differences(before, state(engine).samples), dict(engine.answers)


def test_a_request_that_cannot_be_satisfied_is_counted_as_aborted_and_not_as_retracted(engines: Engines) -> None:
    seen, answers = engines.get(SWA).run(alone_without_eviction, diary(0, 40), prompt(7, 240))

    assert answers["a"].finish["type"] == "abort"
    assert seen[f"{metrics.PREFIX}retraction_aborted_requests_total", "swa"] == 1
    assert seen[f"{metrics.PREFIX}retracted_requests_total", "swa"] == 0
    assert seen.get(("sglang:num_retracted_requests_total", ""), 0) == 0
    assert len(answers["late"].token_ids) == 8
    delayed = {pool: seen[f"{metrics.PREFIX}delayed_admissions_total", pool] for pool in ("full", "swa")}
    assert delayed == {"full": 0, "swa": 1}


def test_the_bound_holds_while_eviction_works(engines: Engines) -> None:
    for options in (DRAFT, DRAFT_WITH_STATE, SWA):
        held, bound = engines.get(options).run(held_over_time, diary(1, 100), 700)
        assert 64 <= max(held) <= bound, options
        assert any(later < earlier for earlier, later in pairwise(held))


def held_over_time(engine: Engine, token_ids: list[int], tokens: int) -> Script[tuple[list[int], int]]:
    yield from engine.flush()
    engine.submit("a", token_ids, tokens)
    yield
    held = []
    for _ in engine.until_idle():
        pool = asked(engine)["snapshot"]["pools"][1]
        held.append(pool["held_max_slots"])
        yield
    return held, pool["held_bound_slots"]


# -- a release that has renamed what a hook is on

RENAMED = "sglang.srt.managers.scheduler.Scheduler.renamed_in_this_release"


def child_of_another_release(*args: Any) -> None:
    """Stand in for the child process of `EngineProcess`, with one hook whose target is not there."""
    hooks = Watch.hooks

    def with_a_renamed_target(watch: Watch) -> tuple[Hook, ...]:
        return (*hooks(watch), Hook(RENAMED, print, "after"))

    with mock.patch.object(Watch, "hooks", with_a_renamed_target):
        scripted._child(*args)


@pytest.fixture
def another_release(servers: Servers) -> Iterator[None]:
    servers.close()
    with mock.patch.object(scripted, "_child", child_of_another_release):
        yield


def test_a_renamed_target_ends_the_start_with_its_name(another_release: None) -> None:
    with pytest.raises(EngineFailure, match=f"hooks that did not take on this SGLang: {RENAMED}"):
        EngineProcess()


def answered(engine: Engine, token_ids: list[int]) -> Script[tuple[Answer, Samples, set[str]]]:
    engine.submit("a", token_ids, 50)
    yield from engine.until_idle()
    time.sleep(2 * EXPORT_SECONDS)  # long enough for metrics to appear, if there were any
    return engine.answers["a"], samples(), set(asked(engine))


def test_with_best_effort_the_engine_serves_and_says_that_it_is_blind(another_release: None, tmp_path: Path) -> None:
    environment = {plugin.BEST_EFFORT_VARIABLE: "1", "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    with EngineProcess(enable_metrics=True, environment=environment) as engine:
        answer, found, answers = engine.run(answered, prompt(0, 30))

    assert len(answer.token_ids) == 50
    assert {name: value for (name, _), value in found.items() if name.startswith(metrics.PREFIX)} == {
        metrics.UP.name: 0
    }
    assert "snapshot" not in answers
