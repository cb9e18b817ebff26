"""The values that `sglang-dflash plan` prints: the chart takes them, and counts as the plan does."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from pool_sizing import DRAFT, TARGETS, write_model
from rendering import VALUES, engine_yaml, merged, refusal, texts
from server_ext.planner import report
from server_ext.planner.inputs import EngineOptions, Memory, Workload
from server_ext.planner.models import write_geometry
from server_ext.planner.plan import Plan, make_plan
from value_docs import CHART

TARGET, DRAFT_ROWS = "layers=16,kv-heads=4,head-dim=256", "layers=5,kv-heads=8,head-dim=128,window=2048,block=8"


def plan_of(folder: Path, concurrency: int, **options: Any) -> Plan:
    """Plan for a pair with the rows of Qwen3.8-27B and its draft, in 36 GiB."""
    pair = EngineOptions(
        target=str(write_geometry("--target-geometry", TARGET, folder / "target")),
        draft=str(write_geometry("--draft-geometry", DRAFT_ROWS, folder / "draft")),
        max_running_requests=1,
        draft_window_size=2048,
        **options,
    )
    return make_plan(pair, Memory(free_gib=46, weights_gib=0.8), Workload(8192, 2048, concurrency), 2048)


def printed(plan: Plan) -> dict[str, Any]:
    """The values block of the text."""
    block = report.as_text(plan).partition("Values for the chart:\n")[2]
    values = yaml.safe_load(block)
    assert isinstance(values, dict)
    return values


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"page_size": 64, "chunked_prefill_size": 4096},
        {"tensor_parallel_size": 2, "context_length": 32768, "kv_cache_dtype": "fp8_e4m3", "max_total_tokens": 300_000},
        {"draft_kv_ratio": 1.0},
    ],
    ids=str,
)
def test_the_chart_takes_the_values_and_says_the_same_cap(tmp_path: Path, options: dict[str, Any]) -> None:
    plan = plan_of(tmp_path, 8, **options)
    values = merged(VALUES, printed(plan))

    jsonschema.validate(values, yaml.safe_load((CHART / "values.schema.json").read_text()))
    notes = re.sub(r"\s+", " ", texts(values)["sglang-dflash/templates/NOTES.txt"])
    if window := plan.sizes.window:
        assert f"can hold {window.request_cap_tokens} of its tokens" in notes
    rendered = yaml.safe_load(engine_yaml(values))
    assert rendered["max-running-requests"] == 8
    assert rendered["speculative-draft-kv-ratio"] == plan.ratio
    assert rendered["page-size"] == plan.options.page_size
    for name in ("context-length", "kv-cache-dtype", "max-total-tokens"):
        given = options.get(name.replace("-", "_"))
        assert rendered.get(name) == given


def test_the_chart_refuses_what_the_planner_calls_too_small(tmp_path: Path) -> None:
    """Both know the tokens only where a limit says them."""
    plan = plan_of(tmp_path, 8, max_total_tokens=200_000)
    assert plan.smallest_ratio is not None
    values = merged(VALUES, printed(plan))

    def at(ratio: float) -> dict[str, Any]:
        return merged(values, {"speculative": {"draftKvRatio": ratio}})

    texts(at(plan.smallest_ratio))
    assert f"set speculative.draftKvRatio={plan.smallest_ratio:g}" in refusal(at(round(plan.smallest_ratio - 0.001, 3)))


def test_values_of_a_target_with_sliding_layers(tmp_path: Path) -> None:
    options = EngineOptions(
        target=write_model(tmp_path / "target", TARGETS["sliding windows"]),
        draft=write_model(tmp_path / "draft", DRAFT),
        max_running_requests=1,
        draft_window_size=64,
        chunked_prefill_size=256,
    )
    plan = make_plan(options, Memory(0.5, 0.001), Workload(2000, 500, 4), 64)
    values = merged(VALUES, printed(plan))

    jsonschema.validate(values, yaml.safe_load((CHART / "values.schema.json").read_text()))
    rendered = yaml.safe_load(engine_yaml(values))
    assert rendered["swa-full-tokens-ratio"] == plan.ratio < 1
    assert rendered["speculative-draft-kv-ratio"] == 1
    assert dataclasses.replace(plan.options, swa_full_tokens_ratio=None) == dataclasses.replace(
        options, max_running_requests=4
    )
