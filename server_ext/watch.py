"""Watches one scheduler from inside its process: counts what happens to its pools, and looks at them as it goes.

The scheduler's own thread does all the looking, once in each pass of its event loop, right after it has decided on the
next batch: only this thread changes the pools, so its figures agree with each other, and between two passes they stay
true, whether it computes, waits for a device or sleeps for lack of work. A thread of ours writes the latest look to
Prometheus twice a second and never touches an object of the engine.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

from server_ext import pools
from server_ext.hooks import Hook
from server_ext.metrics import Exporter
from server_ext.pools import Cause, Config, Pool, PoolName, Retractions, Snapshot, Speculation

logger = logging.getLogger(__name__)

REQUEST_ID = "sglang_dflash.pools"
"""Marks a `GetInternalStateReq` that asks for the pools alone."""

EXPORT_SECONDS = 0.5
_HELD_SECONDS = 0.25  # between two looks at every running request
_PAUSED_SECONDS = 0.25  # between two looks while the event loop decides on no batches


@dataclass(frozen=True)
class _Look:
    """The pools at one moment; `stats` is SGLang's ``PoolStats``."""

    stats: Any
    held_max_slots: int
    running_requests: int
    waiting_requests: int


class Watch:
    """One scheduler's pools and what has happened to them since start.

    Admissions are counted as delayed once for each time that a request starts to wait for a pool, not at each attempt.
    """

    def __init__(self) -> None:
        self._scheduler: Any = None
        self._stopped = False
        self._config: Config
        self._window_pool: Literal["swa", "draft"] | None = None
        self._exporter: Exporter | None = None
        self._look: _Look | None = None
        self._look_seconds = 0.0
        self._held_seconds = 0.0
        self._high_water: Counter[PoolName] = Counter()
        self._evicted: Counter[PoolName] = Counter()
        self._window_freed = 0
        self._prefix_lost = 0
        self._delayed: Counter[PoolName] = Counter()
        self._retracted: Counter[Cause] = Counter()
        self._retracted_input: Counter[Cause] = Counter()
        self._retracted_output: Counter[Cause] = Counter()
        self._aborted: Counter[Cause] = Counter()
        self._verify_steps = 0
        self._accepted = 0
        self._accept_lengths: deque[float] = deque()
        self._window_pool_refused = False
        self._waits: WeakKeyDictionary[Any, set[PoolName]] = WeakKeyDictionary()
        self._lost_prefix: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def hooks(self) -> tuple[Hook, ...]:
        """Return the hooks on SGLang; they count nothing before the first of them has started the watch."""
        managers, cache = "sglang.srt.managers", "sglang.srt.mem_cache"
        components = f"{managers}.scheduler_components"
        results = f"{components}.batch_result_processor.SchedulerBatchResultProcessor"
        adder = f"{managers}.schedule_policy.PrefillAdder"
        budget = f"{cache}.prefill_budget.SWAPrefillBudget"
        return (
            Hook(f"{managers}.scheduler.Scheduler.run_event_loop", self._start, "before"),
            Hook(f"{managers}.scheduler.Scheduler.get_next_batch_to_run", self._decided, "after"),
            Hook(f"{managers}.scheduler.Scheduler.process_input_requests", self._received, "after"),
            Hook(f"{managers}.schedule_batch.ScheduleBatch.retract_decode", self._retract, "around"),
            Hook(f"{adder}.add_one_req", self._considered, "after"),
            Hook(f"{budget}.check_prefill", self._checked, "after"),
            Hook(f"{budget}.can_allocate_prefill", self._checked_without_cache, "after"),
            Hook(f"{results}._resolve_spec_v2_tokens", self._verified, "after"),
            Hook(f"{cache}.common.release_kv_cache", self._releasing, "before"),
            Hook(f"{cache}.common.match_kv_cache", self._matched, "after"),
            Hook(f"{cache}.common.free_swa_out_of_window_slots", self._slide, "around"),
            Hook(f"{cache}.unified_radix_cache.UnifiedRadixCache._evict", self._evicted_from_cache, "after"),
            Hook(
                f"{components}.internal_state.SchedulerInternalStateController.get_internal_state",
                self._answer,
                "around",
            ),
        )

    def stop(self) -> None:
        """Count nothing: with some hooks missing, figures would stay at zero as if nothing happened."""
        self._stopped = True

    def snapshot(self) -> Snapshot:
        """Return the pools as last looked at."""
        look, config = self._look, self._config
        assert look is not None
        return Snapshot(
            dp_rank=config.dp_rank,
            unix_time_seconds=time.time(),
            running_requests=look.running_requests,
            waiting_requests=look.waiting_requests,
            pools=tuple(self._pool(pool, look) for pool in config.pools),
            retractions=tuple(self._retractions(cause) for cause in self._causes()),
            speculation=None
            if config.speculative_algorithm is None
            else Speculation(self._verify_steps, self._accepted),
        )

    def _pool(self, config: pools.PoolConfig, look: _Look) -> Pool:
        name, windowed = config.name, config.name == self._window_pool
        return Pool(
            name=name,
            size_slots=config.size_slots,
            used_slots=pools.used_slots(look.stats, name),
            evictable_slots=pools.evictable_slots(look.stats, name),
            free_slots=pools.free_slots(look.stats, name),
            high_water_slots=self._high_water[name],
            evicted_slots_total=self._evicted[name],
            delayed_admissions_total=None if name == "mamba" else self._delayed[name],
            window_freed_slots_total=self._window_freed if windowed else None,
            prefix_lost_tokens_total=self._prefix_lost if windowed else None,
            held_max_slots=look.held_max_slots if config.held_bound_slots is not None else None,
            held_bound_slots=config.held_bound_slots,
        )

    def _causes(self) -> Sequence[Cause]:
        """Return the pools that decoding allocates from, and what else has been a cause."""
        expected = [pool.name for pool in self._config.pools if pool.name != "mamba"]
        return [c for c in get_args(Cause) if c in expected or self._retracted[c] or self._aborted[c]]

    def _retractions(self, cause: Cause) -> Retractions:
        return Retractions(
            cause=cause,
            requests_total=self._retracted[cause],
            input_tokens_total=self._retracted_input[cause],
            output_tokens_total=self._retracted_output[cause],
            aborted_requests_total=self._aborted[cause],
        )

    # -- looking

    def _start(self, scheduler: Any) -> None:
        if self._stopped:
            return
        self._scheduler = scheduler
        self._config = pools.read_config(scheduler)
        self._window_pool = pools.window_pool_name(scheduler)
        self._look_now(scheduler.running_batch)
        reporter = scheduler.metrics_reporter
        if reporter.current_scheduler_metrics_enabled:
            self._exporter = Exporter(reporter.metrics_collector.labels, self._config)
            arguments = (self._exporter,)
            threading.Thread(target=self._export, args=arguments, name="sglang-dflash-metrics", daemon=True).start()

    def _export(self, exporter: Exporter) -> None:
        try:
            while True:
                lengths = [self._accept_lengths.popleft() for _ in range(len(self._accept_lengths))]
                exporter.write(self.snapshot(), lengths)
                time.sleep(EXPORT_SECONDS)
        except Exception:
            logger.exception("pool metrics have stopped")
            self._exporter = None
            exporter.down()

    def _look_now(self, running_batch: Any) -> None:
        scheduler, now = self._scheduler, time.monotonic()
        stats = scheduler.pool_stats_observer.get_pool_stats()
        for pool in self._config.pools:
            used = pools.used_slots(stats, pool.name)
            if used > self._high_water[pool.name]:
                self._high_water[pool.name] = used
        held = self._look.held_max_slots if self._look is not None else 0
        if self._window_pool is not None and now - self._held_seconds >= _HELD_SECONDS:
            held = pools.held_max(running_batch.reqs, scheduler.page_size, self._config.block_size_tokens or 1)
            self._held_seconds = now
        self._look = _Look(stats, held, len(running_batch.reqs), len(scheduler.waiting_queue))
        self._look_seconds = now

    def _decided(self, plan: Any, scheduler: Any, *_: Any, **__: Any) -> None:
        if self._scheduler is not None:
            self._look_now(plan.running_batch)

    def _received(self, _: None, scheduler: Any, *__: Any, **___: Any) -> None:
        """Look while no batch is decided on, as when the engine is paused."""
        if self._scheduler is not None and time.monotonic() - self._look_seconds >= _PAUSED_SECONDS:
            self._look_now(scheduler.running_batch)

    def _answer(self, answer: Callable[..., Any], controller: Any, request: Any) -> Any:
        from sglang.srt.managers.io_struct import GetInternalStateReqOutput

        if request.rid != REQUEST_ID or self._scheduler is None:
            return answer(controller, request)
        self._held_seconds = 0.0
        self._look_now(self._scheduler.running_batch)
        state = {"config": asdict(self._config), "snapshot": asdict(self.snapshot())}
        return GetInternalStateReqOutput(internal_state=state)

    # -- counting

    def _retract(self, retract: Callable[..., Any], batch: Any) -> Any:
        if self._scheduler is None:
            return retract(batch)
        self._look_now(batch)
        cause = self._short_pool(batch)
        retracted, ratio, aborted = retract(batch)
        self._retracted[cause] += len(retracted)
        self._retracted_input[cause] += sum(len(request.origin_input_ids) for request in retracted)
        self._retracted_output[cause] += sum(len(request.output_ids) for request in retracted)
        self._aborted[cause] += len(aborted)
        return retracted, ratio, aborted

    def _short_pool(self, batch: Any) -> Cause:
        """Return the pool that lacks most of what the batch's next step needs; its evictable slots are free by now."""
        stats = self._scheduler.pool_stats_observer.get_pool_stats()
        needed = batch.new_tokens_required_next_decode()
        missing = {
            pool.name: needed - pools.free_slots(stats, pool.name)
            for pool in self._config.pools
            if pool.name != "mamba"
        }
        worst = max(missing, key=lambda name: missing[name])
        if missing[worst] > 0:
            return worst
        exhausted = stats.is_hybrid_ssm and not stats.mamba_available_size + stats.mamba_evictable_size
        return "mamba" if exhausted else "none"

    def _checked(self, verdict: tuple[bool, Any], budget: Any, *, total_tokens: int, **_: Any) -> None:
        self._window_pool_refused = not verdict[0] and total_tokens < budget.remaining_total

    def _checked_without_cache(self, fits: bool, budget: Any, *, paged_input: int, **_: Any) -> None:
        room = min(budget.remaining_current, budget.remaining_total)
        self._window_pool_refused = not fits and paged_input <= room

    def _considered(self, verdict: Any, adder: Any, request: Any, *_: Any, **__: Any) -> None:
        from sglang.srt.managers.schedule_policy import AddReqResult

        if self._scheduler is None:
            return
        refused, self._window_pool_refused = self._window_pool_refused, False
        if adder.can_run_list and adder.can_run_list[-1] is request:
            self._prefix_lost += self._lost_prefix.pop(request, 0)
            self._waits.pop(request, None)
        elif verdict is AddReqResult.NO_TOKEN:
            pool = self._window_pool if refused and self._window_pool is not None else self._config.pools[0].name
            waits = self._waits.setdefault(request, set())
            if pool not in waits:
                waits.add(pool)
                self._delayed[pool] += 1

    def _matched(self, match: Any, request: Any, tree_cache: Any, *_: Any, **__: Any) -> None:
        if self._scheduler is None or self._window_pool is None:
            return
        if lost := _lost_to_window(match, tree_cache):
            self._lost_prefix[request] = lost
        else:
            self._lost_prefix.pop(request, None)

    def _slide(self, free: Callable[..., None], request: Any, *args: Any, page_size: int, **kwargs: Any) -> None:
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        kind = kwargs.get("component_type", ComponentType.SWA)
        before = max(request.kv.get_evicted_seqlen(kind), request.kv.swa_dead_lo(page_size))
        free(request, *args, page_size=page_size, **kwargs)
        if self._scheduler is not None and kind == ComponentType.SWA:
            self._window_freed += max(0, request.kv.get_evicted_seqlen(kind) - before)

    def _evicted_from_cache(self, result: Any, *_: Any, **__: Any) -> None:
        if self._scheduler is None:
            return
        self._evicted["full"] += result.num_tokens_evicted
        self._evicted["mamba"] += result.mamba_num_evicted
        if self._window_pool is not None:
            self._evicted[self._window_pool] += result.swa_num_tokens_evicted

    def _verified(self, accepted: Sequence[Sequence[int]], _: Any, __: Any, batch: Any) -> None:
        if self._scheduler is None:
            return
        for request, tokens in zip(batch.reqs, accepted, strict=True):
            if not (request.is_retracted or request.finished()):
                self._verify_steps += 1
                self._accepted += len(tokens)

    def _releasing(self, request: Any, *_: Any, **__: Any) -> None:
        if self._exporter is not None and request.spec_verify_ct and request.finished():
            self._accept_lengths.append(1 + request.spec_num_correct_drafts / request.spec_verify_ct)


def _lost_to_window(match: Any, tree_cache: Any) -> int:
    """Return the tokens that a match could have reused if only their window were still there.

    On a target with states a match needs a checkpoint where it ends, too. What ends at a node without one is not the
    window's fault, unless the window is gone: the prefix cache then drops the checkpoint with it.
    """
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    matched = match.device_prefix_len + match.host_hit_length
    reusable = match.full_kv_hit_length
    if reusable > matched and tree_cache.supports_mamba():
        core = tree_cache.tree_core

        def has(node: Any, component: ComponentType) -> bool:
            return core.get_component_device_value(node.node_id, component) is not None

        (path,) = core.collect_path_info([match.last_visited_node_id])
        ends = (n.path_end for n in path if has(n, ComponentType.MAMBA) or not has(n, ComponentType.SWA))
        reusable = max(ends, default=0)
    return max(0, int(reusable - matched))
