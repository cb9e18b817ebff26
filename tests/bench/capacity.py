"""``make bench-capacity``: what a lower draft KV ratio gives the target, and what it costs.

    python -m tests.bench.capacity [--rounds 15] [--plot build/capacity.png]

Starts an engine for each ratio on the same memory budget and compares the target's tokens with what the budget allows.
Then ratio 1 and ratio 0.25 decode the same prompts in turn, timed by the processor time of their one thread: what else
runs on the machine moves that little, and both sides of a round alike.
"""

import argparse
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from scripted import STRICT_CHECKS, Engine, EngineProcess, Script
from server_ext.tiny import documents
from server_ext.tiny.build import ensure

RATIOS = (1.0, 0.5, 0.25)
BUDGET_BYTES = 256 << 20
REQUESTS, CONTEXT_TOKENS, NEW_TOKENS = 4, 200, 256
LEAST_CAPACITY_SHARE, LEAST_SPEED_RATIO = 0.99, 0.98


@dataclass(frozen=True)
class Pools:
    """Sizes of an engine's pools in tokens, and the bytes that a token takes in each."""

    target_tokens: int
    draft_tokens: int
    target_token_bytes: float
    draft_token_bytes: float

    def allowed_tokens(self, ratio: float) -> float:
        """Return the target tokens that the budget has room for at this ratio."""
        return BUDGET_BYTES / (self.target_token_bytes + ratio * self.draft_token_bytes)


def pools(engine: Engine) -> Script[Pools]:
    """Measure the pools as allocated."""
    target, draft = engine.allocator.get_kvcache(), engine.draft_pool
    yield
    bounded = getattr(draft, "swa_kv_pool", draft)
    return Pools(
        target_tokens=engine.scheduler.max_total_num_tokens,
        draft_tokens=bounded.size,
        target_token_bytes=_bytes_of(target) / (target.size + target.page_size),
        draft_token_bytes=_bytes_of(bounded) / (bounded.size + bounded.page_size),
    )


def _bytes_of(pool: object) -> int:
    buffers = (*pool.k_buffer, *pool.v_buffer)  # type: ignore[attr-defined]
    return sum(buffer.nbytes for buffer in buffers)


def decode(engine: Engine, prompts: list[list[int]]) -> Script[tuple[float, float]]:
    """Return processor seconds per verify step of all prompts at once, already prefilled, and tokens per step."""
    for tokens in (1, NEW_TOKENS):
        for i, prompt in enumerate(prompts):
            engine.submit(f"{tokens}-{i}", prompt, tokens)
        yield
        started = time.process_time()
        yield from engine.until_idle()
        seconds = time.process_time() - started
    answers = [engine.answers[f"{NEW_TOKENS}-{i}"] for i in range(len(prompts))]
    steps = sum(answer.verify_steps for answer in answers)
    return seconds / steps, sum(len(answer.token_ids) for answer in answers) / steps


def main() -> int:
    """Measure, print a table and draw a picture; exit status 1 if a limit is missed."""
    parser = argparse.ArgumentParser(prog="make bench-capacity ARGS=", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="how often the two ratios decode in turn")
    parser.add_argument("--plot", type=Path, default=Path("build/capacity.png"))
    args = parser.parse_args()

    pair = ensure("qwen3", progress=print)
    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    texts = documents.texts(random.Random(0), REQUESTS, length=8 * CONTEXT_TOKENS)
    prompts = [tokenizer(text)["input_ids"][:CONTEXT_TOKENS] for text in texts]
    engines: dict[float, EngineProcess] = {}
    try:
        for ratio in RATIOS:
            print(f"starting an engine at ratio {ratio:g}", flush=True)
            engines[ratio] = EngineProcess(
                pair=pair,
                environment=dict.fromkeys(STRICT_CHECKS, "0"),
                memory_budget_bytes=BUDGET_BYTES,
                speculative_draft_kv_ratio=ratio,
                max_total_tokens=None,
                log_level="error",
            )
        sizes = {ratio: engine.run(pools) for ratio, engine in engines.items()}
        first, last = engines[RATIOS[0]], engines[RATIOS[-1]]
        speeds, lengths = [], []
        for i in range(args.rounds):
            # Who goes first changes, so that neither always finds the warmer machine.
            order = (first, last) if i % 2 else (last, first)
            times = {engine: engine.run(decode, prompts) for engine in order}
            speeds.append(times[first][0] / times[last][0])
            lengths.append([times[engine][1] for engine in (first, last)])
            print(
                f"round {i + 1} of {args.rounds}: decode speed at {RATIOS[-1]:g} over 1: {speeds[-1]:.3f}", flush=True
            )
    finally:
        for engine in engines.values():
            engine.close()

    print(f"\n{pair.name}, {BUDGET_BYTES >> 20} MiB for KV\n")
    print(f"{'ratio':>6}{'target tokens':>15}{'gain':>8}{'allowed':>10}{'reached':>9}{'draft tokens':>14}")
    shares = []
    for ratio, size in sizes.items():
        allowed = size.allowed_tokens(ratio)
        shares.append(size.target_tokens / allowed)
        gain = size.target_tokens / sizes[1.0].target_tokens - 1
        print(
            f"{ratio:>6g}{size.target_tokens:>15,}{gain:>8.1%}{allowed:>10,.0f}{shares[-1]:>9.2%}{size.draft_tokens:>14,}"
        )
    speed = statistics.median(speeds)
    print(f"\ndecode speed at ratio {RATIOS[-1]:g} over ratio 1: median {speed:.3f} of {args.rounds} rounds")
    print("tokens a step: " + ", ".join(f"{statistics.mean(column):.2f}" for column in zip(*lengths, strict=True)))
    plot(args.plot, sizes, speeds)
    print(f"picture: {args.plot}")
    missed = min(shares) < LEAST_CAPACITY_SHARE or max(shares) > 1 or speed < LEAST_SPEED_RATIO
    if missed:
        print(f"MISSED: capacity {LEAST_CAPACITY_SHARE:.0%} to 100 %, speed at least {LEAST_SPEED_RATIO:g}")
    return int(missed)


def plot(path: Path, sizes: dict[float, Pools], speeds: list[float]) -> None:
    """Draw tokens against what the budget allows, and the rounds' speed ratios."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    grid = [0.1 + 0.9 * i / 100 for i in range(101)]
    left.plot(grid, [sizes[1.0].allowed_tokens(ratio) for ratio in grid], label="what the budget allows")
    left.plot(list(sizes), [size.target_tokens for size in sizes.values()], "o", label="engine")
    left.set(xlabel="draft KV ratio", ylabel="target tokens", title="Capacity")
    left.legend()
    right.axhline(1, color="grey", linewidth=1)
    right.plot(range(1, len(speeds) + 1), speeds, "o-")
    right.set(xlabel="round", ylabel=f"speed at {RATIOS[-1]:g} / speed at 1", title="Decode speed", ylim=(0, None))
    right.xaxis.get_major_locator().set_params(integer=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
