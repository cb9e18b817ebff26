"""Drives the real scheduler in a process of its own, so that a test can look at its pools between two steps.

A script is a generator function at the top of a test module. It gets an `Engine` and yields whenever the scheduler
shall take one step of its own event loop (overlapped or not, as the options say); what it returns comes back to the
test, and what it raises fails the test with the child's traceback:

    def script(engine: Engine) -> Script[int]:
        engine.submit("a", [5, 6, 7], max_new_tokens=32)
        yield from engine.until_idle()
        return engine.allocator.swa_available_size()

    with EngineProcess(speculative_draft_kv_ratio=0.25) as engine:
        engine.run(script)

Nothing of SGLang is replaced but the two ends of its message queues: requests come from the script, answers go to it.
The process that engines are forked from has imported SGLang already, which saves each of them half a minute.
"""

import contextlib
import multiprocessing
import os
import traceback
from array import array
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self, TypeVar

import unpatched
from server import STRICT_CHECKS, free_port
from server_ext.tiny.build import TinyPair, ensure

T = TypeVar("T")
Script = Generator[None, None, T]

TIMEOUT_SECONDS = 420.0
_PROCESS = {
    "SGLANG_PLATFORM": "cpu_reference",
    "OMP_NUM_THREADS": "1",
    # The pools of a tiny engine are small: evict in small steps, as the request cap takes whole intervals per request.
    "SGLANG_SWA_EVICTION_INTERVAL": "8",
}


class EngineFailure(AssertionError):
    """Engine or script raised in the child; carries the traceback."""


@dataclass
class Answer:
    """What the engine has said about one request."""

    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    verify_steps: int = 0
    retractions: int = 0
    finish: dict[str, Any] | None = None

    @property
    def accept_length(self) -> float:
        """Tokens per verify step; the first token is the prefill's."""
        return (len(self.token_ids) - 1) / self.verify_steps


class Engine:
    """The scheduler of this process, as a script sees it."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.answers: dict[str, Answer] = {}
        self.replies: list[Any] = []
        self._inbox: list[Any] = []
        scheduler.ipc_channels.send_to_detokenizer.send_output = self._receive
        scheduler.ipc_channels.send_to_tokenizer.send_output = self._receive

    @property
    def allocator(self) -> Any:
        """The allocator of the target's slots, and at a ratio below 1 of the draft's."""
        return self.scheduler.token_to_kv_pool_allocator

    @property
    def draft_worker(self) -> Any:
        """The DFLASH worker."""
        return self.scheduler.draft_worker

    @property
    def draft_pool(self) -> Any:
        """The draft runner's KV pool."""
        return self.draft_worker.draft_model_runner.token_to_kv_pool

    def submit(self, rid: str, input_ids: list[int], max_new_tokens: int, *, ignore_eos: bool = True) -> None:
        """Queue a greedy request; with `ignore_eos` it is known to need room for all of `max_new_tokens`."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=ignore_eos)
        sampling.normalize(None)
        self.answers[rid] = Answer()
        self._inbox.append(
            TokenizedGenerateReqInput(
                rid=rid,
                input_text=None,
                input_ids=array("q", input_ids),
                input_embeds=None,
                mm_inputs=None,
                token_type_ids=None,
                sampling_params=sampling,
                return_logprob=False,
                logprob_start_len=-1,
                top_logprobs_num=0,
                token_ids_logprob=None,
                stream=False,
            )
        )

    def abort(self, rid: str) -> None:
        """Queue the abort of a request, waiting or running."""
        from sglang.srt.managers.io_struct import AbortReq

        self._inbox.append(AbortReq(rid=rid))

    def flush(self) -> Script[None]:
        """Empty the prefix cache and see that it worked; the engine must be idle."""
        from sglang.srt.managers.io_struct import FlushCacheReqInput, FlushCacheReqOutput

        self._inbox.append(FlushCacheReqInput())
        while not any(isinstance(reply, FlushCacheReqOutput) for reply in self.replies):
            yield
        (reply,) = [reply for reply in self.replies if isinstance(reply, FlushCacheReqOutput)]
        self.replies.remove(reply)
        assert reply.success, reply.message

    def until(self, condition: Callable[[], bool], steps: int = 20_000) -> Script[None]:
        """Step until the condition holds."""
        for _ in range(steps):
            if condition():
                return
            yield
        raise AssertionError(f"no {condition} within {steps} steps")

    def until_idle(self) -> Script[None]:
        """Step until nothing is queued, running or unprocessed."""
        yield from self.until(lambda: not self._inbox and self.scheduler.is_fully_idle())

    def running(self) -> list[Any]:
        """Requests that hold KV: those in the running batch and in the last one, and the one between two chunks."""
        scheduler = self.scheduler
        batches = (scheduler.running_batch, scheduler.last_batch)
        found = [request for batch in batches if batch is not None for request in batch.reqs]
        if scheduler.chunked_req is not None:
            found.append(scheduler.chunked_req)
        return list({request.rid: request for request in found if request.kv.holds_kv}.values())

    def step(self, script: Script[Any]) -> None:
        """Let the script go on to its next yield, then hand its requests to the scheduler."""
        next(script)
        self._inbox, arrived = [], self._inbox
        self.scheduler.process_input_requests(arrived)

    def _receive(self, message: Any, *_: Any) -> None:
        from sglang.srt.managers.io_struct import AbortReq, BatchTokenIDOutput

        if isinstance(message, AbortReq):
            self.answers[message.rid].finish = message.finished_reason or {"type": "abort"}
            return
        if not isinstance(message, BatchTokenIDOutput):
            self.replies.append(message)
            return
        for i, rid in enumerate(message.rids):
            answer = self.answers[rid]
            answer.token_ids += message.output_ids[i]
            answer.cached_tokens = message.cached_tokens[i]
            answer.finish = message.finished_reasons[i]
            answer.verify_steps = message.spec_verify_ct[i] if message.spec_verify_ct else 0
            answer.retractions = message.retraction_counts[i] if message.retraction_counts else 0


class EngineProcess:
    """An engine that runs scripts one after the other until it is closed.

    `pair` is the name of a tiny pair, or one already made; without `speculative` the draft stays out. `environment` is
    laid over `STRICT_CHECKS`, `options` over the fields of SGLang's ``ServerArgs`` that are set here. With
    `memory_budget_bytes` the pools share that much: it stands in for what a GPU has left after loading. With `without`
    the engine lacks the patch of that name. Raises `EngineFailure` if the engine does not start.
    """

    def __init__(
        self,
        *,
        pair: str | TinyPair = "qwen3",
        environment: Mapping[str, str] | None = None,
        speculative: bool = True,
        memory_budget_bytes: int | None = None,
        without: str | None = None,
        **options: Any,
    ) -> None:
        if isinstance(pair, str):
            pair = ensure(pair)
        server_args = {"model_path": str(pair.target), "skip_tokenizer_init": True, "dtype": "bfloat16"}
        server_args |= {"max_running_requests": 8, "chunked_prefill_size": 256, "mem_fraction_static": 0.5}
        if speculative:
            server_args |= {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": str(pair.draft)}
            server_args |= {"speculative_draft_window_size": pair.window_tokens}
        server_args |= {"max_total_tokens": 16384, "nccl_port": free_port(), **options}
        self._pipe, childs_end = multiprocessing.Pipe()
        self._process = _context().Process(
            target=_child,
            args=(childs_end, server_args, STRICT_CHECKS | dict(environment or {}), memory_budget_bytes, without),
        )
        self._process.start()
        childs_end.close()
        try:
            self._outcome("start")
        except BaseException:
            self.close()
            raise

    def run(self, script: Callable[..., Script[T]], *parameters: Any) -> T:
        """Run `script(engine, *parameters)` and return what it returns; the script is found by name in the child.

        Raises:
            EngineFailure: script or engine raised, or the script did not end in `TIMEOUT_SECONDS`. The engine is gone.
        """
        self._pipe.send((script, parameters))
        return self._outcome(script.__name__)  # type: ignore[no-any-return]

    @property
    def alive(self) -> bool:
        """Whether the engine can take another script."""
        return self._process.is_alive()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _outcome(self, what: str) -> Any:
        if not self._pipe.poll(TIMEOUT_SECONDS):
            self._process.kill()
            raise EngineFailure(f"{what}: not done within {TIMEOUT_SECONDS:g} s")
        with contextlib.suppress(EOFError):
            failure, result = self._pipe.recv()
            if failure:
                self._process.join(10)
                raise EngineFailure(failure)
            return result
        self._process.join()
        raise EngineFailure(f"{what}: the engine's process ended with status {self._process.exitcode}")


class Engines:
    """Keeps the engine that was asked for last; a request with other options ends it first."""

    def __init__(self) -> None:
        self._current: tuple[dict[str, Any], EngineProcess] | None = None

    def get(self, **options: Any) -> EngineProcess:
        """Return an engine with these options, the running one if its options are the same and it still runs."""
        if self._current is not None:
            running_options, engine = self._current
            if running_options == options and engine.alive:
                return engine
            self.close()
        engine = EngineProcess(**options)
        self._current = (options, engine)
        return engine

    def close(self) -> None:
        """End the running engine, if there is one."""
        if self._current is not None:
            self._current[1].close()
            self._current = None


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sglang.srt.managers.scheduler"])
    # The platform is chosen while SGLang is imported, so the process to fork from needs the environment.
    before = {name: os.environ.get(name) for name in _PROCESS}
    os.environ.update(_PROCESS)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context


def _child(
    pipe: Connection,
    options: dict[str, Any],
    environment: dict[str, str],
    memory_budget_bytes: int | None,
    without: str | None,
) -> None:
    try:
        os.environ.update(_PROCESS | environment)
        if memory_budget_bytes is not None:
            from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

            KVCacheConfigurator._profile_available_bytes = lambda *_: memory_budget_bytes
        with unpatched.without(without) if without else contextlib.nullcontext():
            _serve(pipe, options)
    except EOFError:
        pass
    except BaseException:
        pipe.send((traceback.format_exc(), None))
        pipe.close()
    # Threads of the engine would keep the process, and there is nothing left to save.
    os._exit(0)


def _serve(pipe: Connection, options: dict[str, Any]) -> None:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    load_plugins()
    server_args = ServerArgs(**options)
    server_args.resolve_once()
    server_args.check_server_args()
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    scheduler = Scheduler(server_args, PortArgs.init_new(server_args))
    engine = Engine(scheduler)
    pipe.send((None, None))
    script: Script[Any] | None = None

    def ingest_requests(stop_at_pause: bool = False) -> list[Any]:
        nonlocal script
        if script is None:
            function, parameters = pipe.recv()
            engine.answers.clear()
            script = function(engine, *parameters)
        try:
            engine.step(script)
        except StopIteration as stop:
            script = None
            pipe.send((None, stop.value))
        return []

    scheduler.ingest_requests = ingest_requests
    # Idle, it would wait a second for its queues, which are not where requests come from.
    scheduler.maybe_sleep_on_idle = lambda: None
    scheduler.run_event_loop()
