"""The table of metrics: its rules, its copy in the README, and the table that ``status`` prints."""

import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from server_ext import metrics, status
from server_ext.metrics import METRICS, Metric
from server_ext.pools import held_bound

README = Path(__file__).parents[2] / "README.md"


def readme_row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.text} |"


def test_the_readme_has_the_table() -> None:
    rows = "\n".join(readme_row(metric) for metric in METRICS)
    assert rows in README.read_text(), f"the table in README.md should be:\n{rows}"


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_follow_the_rules(metric: Metric) -> None:
    assert re.fullmatch(r"sglang_dflash_[a-z_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert not re.search(r"_(kb|mb|gb|ms|count|sum|bucket|gauge|counter)$", metric.name)
    assert metric.text.endswith(".") and metric.text.isascii()
    assert set(metric.labels) <= {"pool", "cause", "sglang_version", "patch_series", "speculative_algorithm"}


def test_names_are_unique() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("page_size_tokens", "expected"),
    # The window, 7 tokens of a started interval and 16 of reserve; with pages also what pages round up.
    [(1, 64 + 7 + 16), (64, 64 + 2 * 64)],
)
def test_bound_of_a_request(page_size_tokens: int, expected: int) -> None:
    bound = held_bound(
        retained_slots=64, page_size_tokens=page_size_tokens, eviction_interval_tokens=8, reserve_tokens=16
    )
    assert bound == expected


def pool(name: str, *, used: int, held: tuple[int, int] | None = None) -> dict[str, Any]:
    return {
        "name": name,
        "size_slots": 1000,
        "used_slots": used,
        "evictable_slots": 900 - used,
        "free_slots": 100,
        "high_water_slots": 950,
        "evicted_slots_total": 12_345,
        "delayed_admissions_total": 3,
        "window_freed_slots_total": 7 if held else None,
        "prefix_lost_tokens_total": 8 if held else None,
        "held_max_slots": held[0] if held else None,
        "held_bound_slots": held[1] if held else None,
    }


def answers(pools: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    config = {
        "dp_rank": 0,
        "sglang_version": "1.2.3",
        "speculative_algorithm": "DFLASH",
        "draft_kv_ratio": 0.25,
        "draft_window_tokens": 64,
        "block_size_tokens": 8,
        "page_size_tokens": 1,
        "max_running_requests": 8,
    }
    scheduler = {
        "dp_rank": 0,
        "running_requests": 5,
        "waiting_requests": 2,
        "pools": pools,
        "retractions": [{"cause": "full", "requests_total": 4, "aborted_requests_total": 0}],
        "speculation": {"verify_steps_total": 10, "accepted_tokens_total": 55},
    }
    return {"schedulers": [config]}, {"schedulers": [scheduler]}


def shown(*pools: dict[str, Any], terminal: bool) -> str:
    console = Console(width=120, force_terminal=terminal, color_system="standard" if terminal else None)
    with console.capture() as capture:
        console.print(status.render(*answers(list(pools))))
    return capture.get()


def test_status_table() -> None:
    text = shown(pool("full", used=500), pool("draft", used=10, held=(60, 86)), terminal=False)

    assert "SGLang 1.2.3 · DFLASH block 8 · window 64 · ratio 0.25 · page 1 · running 5 of 8 · waiting 2" in text
    assert "accept length 5.50" in text
    rows = {line[:18].strip(): line[18:].split() for line in text.splitlines()[1:]}
    assert rows["slots"] == ["full", "draft"]
    assert rows["used"] == ["500", "(50%)", "10", "(1%)"]
    assert rows["largest request"] == ["60", "of", "86"]
    assert rows["evicted"] == ["12,345", "12,345"]
    assert rows["left the window"] == ["7"]
    assert rows["requests retracted"] == ["4"]


@pytest.mark.parametrize(("used", "colour"), [(749, 32), (750, 33), (900, 31)])
def test_status_colours_say_how_full(used: int, colour: int) -> None:
    assert re.search(rf"\x1b\[{colour}m *{used} ", shown(pool("full", used=used), terminal=True))


def test_status_shows_a_request_over_its_bound() -> None:
    assert re.search(r"\x1b\[31m *87 of 86", shown(pool("swa", used=1, held=(87, 86)), terminal=True))
    assert not re.search(r"\x1b\[31m *86 of 86", shown(pool("swa", used=1, held=(86, 86)), terminal=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["not-a-url"], "not-a-url is not the URL of a server; expected something like http://127.0.0.1:30000"),
        (["ftp://host"], "ftp://host is not the URL of a server"),
        (["http://127.0.0.1:1"], "http://127.0.0.1:1/pools/config: cannot connect"),
        (["http://127.0.0.1:1", "--interval-seconds", "0"], "--interval-seconds 0 must be greater than 0"),
        (["http://127.0.0.1:1", "--interval-seconds", "nan"], "--interval-seconds nan must be greater than 0"),
        (["http://127.0.0.1:1", "--api-key-file", "/nowhere"], "--api-key-file /nowhere: No such file"),
    ],
)
def test_status_refuses(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from server_ext import cli

    monkeypatch.setattr("sys.argv", ["sglang-dflash", "status", *arguments])
    assert cli.main() == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_what_is_missing_has_no_sample() -> None:
    """A pool's figure that is None yields nothing, and so does everything of a draft that is not there."""
    from server_ext.pools import Config, Pool, Snapshot

    plain = Pool("full", 10, 1, 2, 7, 3, 0, 0, None, None, None, None)
    config = Config(0, "1.2.3", None, None, None, None, None, 1, None, 8, ())
    snapshot = Snapshot(0, 1.5, 0, 0, (plain,), (), None)
    read = {metric.name.removeprefix(metrics.PREFIX): metric.read for metric in METRICS if metric.read is not None}
    empty = {name for name, function in read.items() if not list(function(config, snapshot))}

    assert empty == {
        "request_held_max_slots",
        "request_held_bound_slots",
        "request_held_within_bound",
        "window_freed_slots_total",
        "prefix_lost_tokens_total",
        "retracted_requests_total",
        "retracted_input_tokens_total",
        "retracted_output_tokens_total",
        "retraction_aborted_requests_total",
        "verify_steps_total",
        "accepted_tokens_total",
        "draft_kv_ratio",
        "draft_window_tokens",
        "block_size_tokens",
        "eviction_interval_tokens",
        "pool_size_bytes",
        "pool_window_tokens",
        "pool_request_cap_slots",
        "pool_headroom_slots",
        "pool_cacheable_prefixes",
    }
    assert dict(read["pool_usage_ratio"](config, snapshot)) == {("full",): 0.1}
    assert list(read["engine_info"](config, snapshot)) == [(("1.2.3", "none", "none"), 1)]
