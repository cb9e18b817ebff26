"""``make bench-metrics``: what the hooks on the pools cost a decode step, and what a scrape does to one.

    python -m tests.bench.metrics [--rounds 10] [--blocks 40] [--steps 5]

One engine decodes all the time. In turn, for a block of steps each, its hooks are in place or taken out; what else runs
on the machine meets both sides alike. After that the metrics are scraped at every tenth of a second for half of the
blocks. Ratios are of neighbouring blocks, in the order on, off, off, on, so that the growth of the requests cancels
out; their medians are printed, of the processor time of the scheduler's thread and of the clock. On two cores one
round's median is off by up to two hundredths either way; ten rounds together are good to half of one.
"""

import argparse
import pkgutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from scripted import STRICT_CHECKS, Engine, EngineProcess, Script

MOST_TIME_RATIO, MOST_STEP_RATIO = 1.01, 2.0
REQUESTS, CONTEXT_TOKENS, BLOCK_TOKENS, WARM_STEPS = 4, 200, 8, 60
SCRAPE_SECONDS, LOOKS = 0.1, 2000
CONTEXT_LENGTH = 16384  # of the tiny pairs


@dataclass(frozen=True)
class Step:
    """One pass of the event loop, in seconds of the clock and of the scheduler's thread."""

    wall_seconds: float
    thread_seconds: float


@dataclass(frozen=True)
class Side:
    """The two sides of the same blocks, a list of steps for each block, and what one look at the pools takes."""

    on: list[list[Step]]
    off: list[list[Step]]
    look_seconds: float = 0.0

    def __add__(self, later: "Side") -> "Side":
        return Side(self.on + later.on, self.off + later.off, later.look_seconds)

    def ratio(self, seconds: Callable[[Step], float]) -> float:
        """Return the median over fours of blocks of the ratio of their median steps."""
        pairs = zip(self.on, self.off, strict=True)
        ratios = [_median(on, seconds) / _median(off, seconds) for on, off in pairs]
        return statistics.median(
            statistics.geometric_mean(four) for four in zip(ratios[::2], ratios[1::2], strict=True)
        )


def _median(steps: Sequence[Step], seconds: Callable[[Step], float]) -> float:
    return statistics.median(seconds(step) for step in steps)


class Hooks:
    """The hooks that this process has on its scheduler, which can be taken out and put back."""

    def __init__(self) -> None:
        from sglang.srt.plugins.hook_registry import HookRegistry

        from server_ext.watch import Watch

        self.watch: Any = None
        self._places: list[tuple[Any, str, Callable[..., Any], Callable[..., Any]]] = []
        for target, hooks in HookRegistry._hooks.items():
            owners = [getattr(function, "__self__", None) for _, function, _ in hooks]
            if any(isinstance(owner, Watch) for owner in owners):
                self.watch = owners[0]
                path, name = target.rsplit(".", 1)
                place = pkgutil.resolve_name(path)
                hooked = getattr(place, name)
                self._places.append((place, name, hooked, hooked.__wrapped__))
        self._write = self.watch._exporter.write

    def set(self, on: bool) -> None:
        """Put the hooks in place, or SGLang's own functions and nothing that writes metrics."""
        from sglang.srt.plugins.hook_registry import _propagate_patch

        for place, name, hooked, original in self._places:
            new, old = (hooked, original) if on else (original, hooked)
            setattr(place, name, new)
            _propagate_patch(old, new, place)
        self.watch._exporter.write = self._write if on else lambda *_: None


def tokens_for(blocks: int, steps: int) -> int:
    """Return the most that a request can generate in the steps of both sides."""
    return (WARM_STEPS + 2 * blocks * (steps + 1)) * BLOCK_TOKENS


def decode(engine: Engine, blocks: int, steps: int, scrapes: str | None) -> Script[Side]:
    """Decode and time every step, with hooks in every other block; with `scrapes`, scraped in every other block."""
    hooks = Hooks()
    tokens = tokens_for(blocks, steps)
    for i in range(REQUESTS):
        engine.submit(str(i), [20 + (i * 37 + j * j) % 700 for j in range(CONTEXT_TOKENS)], tokens)
    yield
    yield from engine.until(lambda: len(engine.scheduler.running_batch.reqs) == REQUESTS)
    for _ in range(WARM_STEPS):
        yield
    side = Side([], [])
    both = [(True, side.on), (False, side.off)]
    for i in range(blocks):
        # Steps take longer as requests grow, so each side goes first as often as the other.
        for on, taken in both if i % 2 == 0 else both[::-1]:
            if scrapes is None:
                hooks.set(on)
                taken.append((yield from _timed(steps)))
            else:
                Path(scrapes).write_text(str(int(on)))
                taken.append((yield from _timed(steps)))
    assert len(engine.running()) == REQUESTS, "the requests ended before the benchmark did"
    hooks.set(True)
    started = time.thread_time()
    for _ in range(LOOKS):
        hooks.watch._look_now(engine.scheduler.running_batch)
    side = replace(side, look_seconds=(time.thread_time() - started) / LOOKS)
    for i in range(REQUESTS):
        engine.abort(str(i))
    yield from engine.until_idle()
    yield from engine.flush()
    return side


def _timed(steps: int) -> Script[list[Step]]:
    found = []
    yield
    wall, thread = time.perf_counter(), time.thread_time()
    for _ in range(steps):
        yield
        now = time.perf_counter(), time.thread_time()
        found.append(Step(now[0] - wall, now[1] - thread))
        wall, thread = now
    return found


@contextmanager
def scraping(switch: Path) -> Iterator[list[float]]:
    """Read the metrics as the HTTP process does, in this process, while the file `switch` says 1."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector

    ended = threading.Event()
    took: list[float] = []

    def scrape() -> None:
        while not ended.wait(SCRAPE_SECONDS):
            if switch.read_text() == "1":
                started = time.perf_counter()
                registry = CollectorRegistry()
                MultiProcessCollector(registry, path=str(switch.parent))
                assert b"sglang_dflash_up" in generate_latest(registry)
                took.append(time.perf_counter() - started)

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield took
    finally:
        ended.set()
        thread.join()


def main() -> int:
    """Measure and print; 1 if the hooks cost more than they may."""
    parser = argparse.ArgumentParser(prog="make bench-metrics ARGS=", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="rounds with and without hooks; one more is scraped")
    parser.add_argument("--blocks", type=int, default=40, help="blocks of each side in a round")
    parser.add_argument("--steps", type=int, default=5, help="steps in a block")
    args = parser.parse_args()
    for name in ("rounds", "steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} must be 1 or more")
    if args.blocks < 2 or args.blocks % 2:
        parser.error(f"--blocks {args.blocks} must be even: each side goes first in every other one")
    if tokens_for(args.blocks, args.steps) + CONTEXT_TOKENS > CONTEXT_LENGTH:
        parser.error(f"{args.blocks} blocks of {args.steps} steps may take a request beyond {CONTEXT_LENGTH} tokens")

    with tempfile.TemporaryDirectory() as folder:
        switch = Path(folder) / "scrape"
        switch.write_text("0")
        environment = dict.fromkeys(STRICT_CHECKS, "0") | {"PROMETHEUS_MULTIPROC_DIR": folder}
        pools = {"max_total_tokens": 131072, "speculative_draft_kv_ratio": 0.25}
        with EngineProcess(enable_metrics=True, environment=environment, **pools) as engine:
            hooked = Side([], [])
            for i in range(args.rounds):
                print(f"round {i + 1} of {args.rounds + 1}", file=sys.stderr, flush=True)
                hooked += engine.run(decode, args.blocks, args.steps, None)
            print(f"round {args.rounds + 1} of {args.rounds + 1}, scraped", file=sys.stderr, flush=True)
            with scraping(switch) as took:
                scraped = engine.run(decode, args.blocks, args.steps, str(switch))

    thread_ratio = hooked.ratio(lambda step: step.thread_seconds)
    wall_ratio = hooked.ratio(lambda step: step.wall_seconds)
    median = statistics.median(step.wall_seconds for block in hooked.off for step in block)
    print(
        f"{REQUESTS} requests, {args.rounds} rounds of {args.blocks} blocks of {args.steps} steps a side, "
        f"median step {median * 1e3:.2f} ms\n"
    )
    print(f"step time with hooks to without   {thread_ratio:.3f} of the thread, {wall_ratio:.3f} of the clock")
    share = hooked.look_seconds / statistics.median(step.thread_seconds for block in hooked.off for step in block)
    print(f"a look at the pools               {hooked.look_seconds * 1e6:.0f} us, {share:.2%} of a step of the thread")
    for name, blocks in (("while scraped", scraped.on), ("not scraped", scraped.off)):
        steps = [step.wall_seconds for block in blocks for step in block]
        middle = statistics.median(steps)
        over = sum(step > MOST_STEP_RATIO * middle for step in steps)
        print(f"{name:32}  slowest step {max(steps) / middle:.2f} medians, {over} of {len(steps)} over two")
    print(f"scrapes                           {len(took)}, {statistics.median(took) * 1e3:.1f} ms each")
    return int(thread_ratio > MOST_TIME_RATIO)


if __name__ == "__main__":
    sys.exit(main())
