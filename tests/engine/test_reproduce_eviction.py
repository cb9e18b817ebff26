"""``make reproduce-eviction`` tells the story that the README tells."""

import re
import subprocess
import sys
from pathlib import Path

from test_eviction import SWA_TOKENS

REPOSITORY = Path(__file__).parents[2]
TOKENS = SWA_TOKENS + 128


def reproduce(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.bench.eviction", *options]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


def test_it_prints_and_draws_both_runs(alone: None, tmp_path: Path) -> None:
    picture = tmp_path / "made" / "picture.png"
    run = reproduce("--tokens", str(TOKENS), "--plot", str(picture))

    assert run.returncode == 0, run.stdout + run.stderr
    ends = re.findall(
        r"generated (\d+) tokens, held at most (\d+) SWA slots, found the pool full\n"
        r"(\d) times, was retracted 0 times and ended with: (\w+)",
        run.stdout,
    )
    (whole_tokens, most_held, full, end), (broken_tokens, broken_held, times_full, broken_end) = ends
    assert (end, full, broken_end, times_full) == ("length", "0", "abort", "1")
    assert TOKENS - 8 <= int(whole_tokens) <= TOKENS
    assert int(most_held) < SWA_TOKENS / 4
    assert SWA_TOKENS - 64 < int(broken_tokens) < SWA_TOKENS <= int(broken_held) + 8
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_too_few_tokens_are_refused_in_one_line() -> None:
    run = reproduce("--tokens", "1")
    assert run.returncode == 2 and run.stdout == ""
    last = run.stderr.splitlines()[-1]
    assert last.startswith("make reproduce-eviction ARGS=: error: --tokens must be between")
