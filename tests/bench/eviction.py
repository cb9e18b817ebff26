"""``make reproduce-eviction``: one long request with sliding-window eviction during decode, and the same without.

    python -m tests.bench.eviction [--tokens 3072] [--plot build/eviction.png]

The engine runs twice on a hybrid target whose sliding-window pool is a small part of the full one. The second time
`DFlashDraftInputV2.prepare_for_decode` neither evicts nor ticks, as in SGLang 0.5.15.post1 to 0.5.17.
"""

import argparse
import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from scripted import Engine, EngineProcess, Script
from server_ext.tiny.build import ensure
from test_eviction import FULL_TOKENS, LONG_TOKENS, SWA_TOKENS, Retraction, held, retractions_to, without_the_two_calls

ROWS = 8


@dataclass(frozen=True)
class Story:
    """What became of the request: tokens it had generated and slots it held after each step, and how it ended."""

    generated: list[int]
    swa_held: list[int]
    full_held: list[int]
    pool_full: list[Retraction]
    retractions: int
    end: dict[str, object]


def long_request(engine: Engine, prompt: list[int], tokens: int, fixed: bool) -> Script[Story]:
    """Generate `tokens` after the prompt; with `fixed` off the two calls are left out."""
    pool_full: list[Retraction] = []
    rows: list[tuple[int, int, int]] = []
    with contextlib.nullcontext() if fixed else without_the_two_calls(), retractions_to(pool_full, engine):
        engine.submit("0", prompt, tokens)
        yield
        for _ in engine.until_idle():
            for request in engine.running():
                rows.append((len(request.output_ids), *held(engine)))
            yield
    generated, swa_held, full_held = map(list, zip(*rows, strict=True))
    answer = engine.answers["0"]
    return Story(generated, swa_held, full_held, pool_full, answer.retractions, answer.finish or {})


def main() -> int:
    """Run both engines, print both stories and draw them; exit status 1 if they do not differ as they should."""
    parser = argparse.ArgumentParser(prog="make reproduce-eviction ARGS=", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=LONG_TOKENS, help="how many to generate (default: %(default)s)")
    parser.add_argument("--plot", type=Path, default=Path("build/eviction.png"))
    args = parser.parse_args()
    if not SWA_TOKENS < args.tokens < FULL_TOKENS - SWA_TOKENS:
        parser.error(f"--tokens must be between {SWA_TOKENS + 1} and {FULL_TOKENS - SWA_TOKENS - 1}, got {args.tokens}")

    pair = ensure("swa", progress=print)
    prompt = AutoTokenizer.from_pretrained(pair.target)("Ada keeps a diary.")["input_ids"]
    print(f"{pair.name}: window {pair.window_tokens}, pools of {FULL_TOKENS:,} (full) and {SWA_TOKENS:,} (SWA) tokens")
    stories: dict[str, Story] = {}
    for name, fixed in (("with eviction", True), ("without", False)):
        print(f"\n{name}: starting an engine", flush=True)
        options = {"max_total_tokens": FULL_TOKENS, "swa_full_tokens_ratio": SWA_TOKENS / FULL_TOKENS}
        with EngineProcess(pair=pair, log_level="error", **options) as engine:
            stories[name] = engine.run(long_request, prompt, args.tokens, fixed)
        tell(stories[name])
    plot(args.plot, stories)
    print(f"\npicture: {args.plot}")
    whole, broken = stories["with eviction"], stories["without"]
    as_expected = whole.end["type"] == "length" and not whole.pool_full and broken.end["type"] == "abort"
    return int(not as_expected)


def tell(story: Story) -> None:
    """Print a story in a few rows."""
    print(f"{'generated':>12}{'SWA held':>10}{'full held':>11}")
    for i in range(ROWS):
        at = (len(story.generated) - 1) * i // (ROWS - 1)
        print(f"{story.generated[at]:>12,}{story.swa_held[at]:>10,}{story.full_held[at]:>11,}")
    print(
        f"generated {story.generated[-1]:,} tokens, held at most {max(story.swa_held):,} SWA slots, found the pool full"
    )
    print(f"{len(story.pool_full)} times, was retracted {story.retractions} times and ended with: {story.end['type']}")
    if "message" in story.end:
        print(f"  {story.end['message']}")


def plot(path: Path, stories: dict[str, Story]) -> None:
    """Draw the slots that the request holds against the tokens that it has generated."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    axes.axhline(SWA_TOKENS, color="grey", linestyle="--", linewidth=1, label="SWA pool")
    for (name, story), colour in zip(stories.items(), ("tab:blue", "tab:red"), strict=True):
        axes.plot(story.generated, story.swa_held, color=colour, label=name)
        if story.end["type"] == "abort":
            axes.plot(story.generated[-1], story.swa_held[-1], "x", color=colour, markersize=9, label="request ends")
    axes.set(xlabel="generated tokens", ylabel="SWA slots held", title="One request, DFLASH on a hybrid target")
    axes.set_ylim(0, SWA_TOKENS * 1.1)
    axes.legend(loc="center right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    sys.exit(main())
