"""``make bench``: decode speed of the CPU reference platform, measured on this machine.

    python -m tests.bench.speed [--pair qwen3] [--context 1000] [--tokens 512]

Starts one server with DFLASH and one without, and prints their figures side by side.
"""

import argparse
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import requests

from server_ext.tiny.build import ensure

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from server import Server

REPEATS = 3


@dataclass(frozen=True)
class Decode:
    """One timed batch of equal requests."""

    steps: int
    tokens: int
    seconds: float


def decode(server: Server, requests_at_once: int, context_tokens: int, tokens: int) -> Decode:
    """Generate after prompts that are in the prefix cache, so that decoding is nearly all there is to time."""

    def one(index: int, new_tokens: int) -> dict:
        prompt = [20 + (index + i * i) % 700 for i in range(context_tokens)]
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling}
        return requests.post(f"{server.url}/generate", json=body, timeout=600).json()["meta_info"]

    with ThreadPoolExecutor(requests_at_once) as pool:
        list(pool.map(lambda i: one(i, 1), range(requests_at_once)))
        started = time.monotonic()
        answers = list(pool.map(lambda i: one(i, tokens), range(requests_at_once)))
        seconds = time.monotonic() - started
    produced = sum(answer["completion_tokens"] for answer in answers)
    return Decode(
        sum(answer.get("spec_verify_ct", answer["completion_tokens"]) for answer in answers), produced, seconds
    )


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="make bench ARGS=", description=__doc__.splitlines()[0])
    parser.add_argument("--pair", default="qwen3")
    parser.add_argument("--context", type=int, default=1000, help="tokens before the first generated one")
    parser.add_argument("--tokens", type=int, default=512, help="tokens to generate for each request")
    args = parser.parse_args()

    pair = ensure(args.pair, progress=print)
    plain = ["--model-path", str(pair.target), "--max-total-tokens", "16384"]
    print(f"{args.pair}, {args.context} tokens of context, best of {REPEATS}\n")
    print(f"{'':10}{'requests':>10}{'steps/s each':>15}{'tokens/s':>12}{'tokens/step':>13}")
    with tempfile.TemporaryDirectory() as folder:
        for label, options in (("DFLASH", ["--pair", args.pair]), ("plain", plain)):
            with Server(options, Path(folder) / f"{label}.log", strict=False).started() as server:
                for at_once in (1, 4):
                    runs = [decode(server, at_once, args.context, args.tokens) for _ in range(REPEATS)]
                    best = min(runs, key=lambda run: run.seconds / run.steps)
                    print(
                        f"{label:10}{at_once:>10}{best.steps / at_once / best.seconds:>15.1f}"
                        f"{best.tokens / best.seconds:>12.1f}{best.tokens / best.steps:>13.2f}",
                        flush=True,
                    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
