"""Sizes of the target pool and the bounded draft pool for a budget."""

import itertools
import json
import logging
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from server_ext.image import patchset

from pool_sizing import DENSE, DFLASH, DRAFT, TARGETS, configurator, write_model

TARGET_BYTES = 4 * 2 * 2 * 32 * 2  # layers, k and v, heads, head dimension, bfloat16
DRAFT_BYTES = TARGET_BYTES // 2
BUDGET_BYTES = 200 * 2**20


class Pair:
    """Model folders of a target and a draft."""

    def __init__(self, folder: Path, target: dict[str, Any] = DENSE, draft: dict[str, Any] = DRAFT) -> None:
        self.target = write_model(folder / "target", target)
        self.draft = write_model(folder / "draft", draft)

    def sizer(self, ratio: float, **options: Any) -> Any:
        """Return the pool configurator that the engine uses for these options."""
        from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator

        return create_memory_pool_configurator(self._configurator(ratio, **options))

    def sizes(self, ratio: float, budget_bytes: int = BUDGET_BYTES, **options: Any) -> tuple[int, int]:
        """Return target and draft tokens."""
        config = self._configurator(ratio, **options).config_from_budget(budget_bytes)
        assert config.full_max_total_num_tokens == config.max_total_num_tokens
        return config.max_total_num_tokens, config.swa_max_total_num_tokens

    def refusal(self, ratio: float, budget_bytes: int = BUDGET_BYTES, **options: Any) -> str:
        """Return the message of a start that is refused."""
        with pytest.raises(ValueError) as refusal:
            self.sizes(ratio, budget_bytes, **options)
        return str(refusal.value)

    def _configurator(self, ratio: float, **options: Any) -> Any:
        draft = {"speculative_draft_model_path": self.draft, "speculative_draft_kv_ratio": ratio}
        return configurator(self.target, **DFLASH | draft | options)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def proposed(message: str) -> float:
    (ratio,) = re.findall(r"Use --speculative-draft-kv-ratio (\S+) or more", message)
    return float(ratio)


@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
@pytest.mark.parametrize("ratio", [0.999, 0.75, 0.5, 0.29, 0.25, 0.1])
def test_both_pools_fill_the_budget(pair: Pair, ratio: float, page_size: int) -> None:
    target_tokens, draft_tokens = pair.sizes(ratio, page_size=page_size)

    assert target_tokens % page_size == 0
    assert draft_tokens == int(target_tokens * ratio) // page_size * page_size
    used_bytes = target_tokens * TARGET_BYTES + draft_tokens * DRAFT_BYTES
    assert 0.99 * BUDGET_BYTES <= used_bytes <= BUDGET_BYTES
    page_more = (target_tokens + page_size) * (TARGET_BYTES + ratio * DRAFT_BYTES)
    assert page_more > BUDGET_BYTES, "one page more would not fit"


def test_a_lower_ratio_gives_the_target_more_tokens(pair: Pair) -> None:
    tokens = [pair.sizes(ratio)[0] for ratio in (0.9, 0.5, 0.25, 0.1)]

    assert tokens == sorted(tokens)
    assert tokens[2] / (BUDGET_BYTES // (TARGET_BYTES + DRAFT_BYTES)) == pytest.approx(1.5 / 1.125, rel=1e-3)


@pytest.mark.parametrize("page_size", [1, 64])
def test_a_token_limit_bounds_the_target_and_the_draft_keeps_its_share(pair: Pair, page_size: int) -> None:
    limit = 60_000 + 7
    target_tokens, draft_tokens = pair.sizes(0.3, max_total_tokens=limit, page_size=page_size)

    assert target_tokens == limit // page_size * page_size
    assert draft_tokens == int(target_tokens * 0.3) // page_size * page_size


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(dict(zip(names, values, strict=True)), id="-".join(map(str, values)))
        for names in [("page_size", "max_running_requests", "chunked_prefill_size", "disable_overlap_schedule")]
        for values in itertools.product((1, 64), (1, 8, 32), (256, 2048), (False, True))
    ],
)
@pytest.mark.parametrize("limited", [False, True], ids=["budget", "token limit"])
def test_the_proposed_ratio_starts_and_is_the_smallest(pair: Pair, options: dict[str, Any], limited: bool) -> None:
    options = options | ({"max_total_tokens": 80_000} if limited else {})
    message = pair.refusal(0.001, **options)
    if "No ratio below 1" in message:
        assert int(80_000 if limited else BUDGET_BYTES / (TARGET_BYTES + DRAFT_BYTES)) < cap_of(message)
        return
    ratio = proposed(message)

    cap = cap_of(message)
    _, draft_tokens = pair.sizes(ratio, **options)
    assert draft_tokens >= cap
    assert proposed(pair.refusal(round(ratio - 0.001, 3), **options)) == ratio
    if options["page_size"] == 1:
        least = cap / 80_000 if limited else cap * TARGET_BYTES / (BUDGET_BYTES - cap * DRAFT_BYTES)
        assert ratio == math.ceil(least * 1000) / 1000


def cap_of(message: str) -> int:
    (cap,) = re.findall(r"fewer than the (\d+) that", message)
    return int(cap)


def test_the_refusal_names_what_to_change(pair: Pair) -> None:
    message = pair.refusal(0.01, max_running_requests=16)

    for part in (
        "--speculative-draft-kv-ratio 0.01 ",
        "--max-running-requests 16",
        "--chunked-prefill-size 256",
        "--speculative-draft-window-size 64",
        "lower --max-running-requests",
    ):
        assert part in message
    assert "EVICTION_INTERVAL" not in message


def test_no_ratio_is_proposed_where_none_works(pair: Pair) -> None:
    message = pair.refusal(0.5, max_total_tokens=4096, max_running_requests=64)

    assert "No ratio below 1 is enough: lower --max-running-requests" in message


def test_a_token_limit_that_a_larger_ratio_would_miss_is_not_promised(pair: Pair) -> None:
    """At the limit alone a ratio might do, but the larger draft leaves room for fewer target tokens than the limit."""
    cap = cap_of(pair.refusal(0.001))
    budget_bytes = int(cap / 0.5 * (TARGET_BYTES + 0.5 * DRAFT_BYTES)) + TARGET_BYTES
    limit = int(budget_bytes / (TARGET_BYTES + 0.4 * DRAFT_BYTES))

    ratio = proposed(pair.refusal(0.4, budget_bytes, max_total_tokens=limit))
    assert ratio > math.ceil(cap / limit * 1000) / 1000
    _, draft_tokens = pair.sizes(ratio, budget_bytes, max_total_tokens=limit)
    assert draft_tokens >= cap


def test_a_share_below_one_byte_is_priced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SWA_EVICTION_INTERVAL", "1")
    thin = DRAFT | {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "num_key_value_heads": 1}
    thin |= {"head_dim": 16}
    pair = Pair(tmp_path, draft=thin)
    draft_bytes = 2 * 16 * 2
    options = {"max_running_requests": 1, "chunked_prefill_size": 16, "speculative_draft_window_size": 16}

    ratio = 0.002
    assert ratio * draft_bytes < 1
    target_tokens, draft_tokens = pair.sizes(ratio, **options)
    assert draft_tokens == int(target_tokens * ratio) > 0
    assert 0.99 * BUDGET_BYTES <= target_tokens * TARGET_BYTES + draft_tokens * draft_bytes <= BUDGET_BYTES
    assert target_tokens < BUDGET_BYTES // TARGET_BYTES, "the draft is not free"
    smallest = proposed(pair.refusal(0.0001, **options))
    assert smallest * draft_bytes < 1
    pair.sizes(smallest, **options)


@pytest.mark.parametrize("page_size", [1, 64])
def test_a_target_with_state_checkpoints_keeps_a_tracking_interval_more(tmp_path: Path, page_size: int) -> None:
    from sglang.srt.runtime_context import mamba_track_grid

    options = {"page_size": page_size, "max_mamba_cache_size": 64, "mamba_radix_cache_strategy": "extra_buffer"}
    dense = cap_of(Pair(tmp_path / "dense").refusal(0.001, page_size=page_size))
    with_state = cap_of(Pair(tmp_path / "state", TARGETS["linear attention"]).refusal(0.001, **options))

    assert with_state == dense + 8 * mamba_track_grid(page_size)


@pytest.mark.parametrize("page_size", [1, 64])
def test_the_start_up_line(pair: Pair, caplog: pytest.LogCaptureFixture, page_size: int) -> None:
    sizer = pair.sizer(0.25, page_size=page_size)
    config = sizer.calculate_pool_sizes(BUDGET_BYTES, page_size)
    cap = cap_of(pair.refusal(0.001, page_size=page_size))

    with caplog.at_level(logging.INFO):
        assert sizer.finalize_with_max_running_requests(config) is config
    tokens = config.swa_max_total_num_tokens
    assert (
        f"DFLASH draft KV pool: window=64, ratio=0.25, tokens={tokens} "
        f"(request cap {cap}, {(tokens - cap) // 64} cached prefixes at max concurrency)"
    ) in caplog.messages


def test_a_draft_without_a_size_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.speculative import dflash_utils

    def unreadable(**_: Any) -> int:
        raise AttributeError("no head_dim")

    monkeypatch.setattr(dflash_utils, "dflash_draft_cell_size_per_token", unreadable)
    message = Pair(tmp_path).refusal(0.25)

    assert "--speculative-draft-kv-ratio 0.25 needs the KV bytes per token" in message
    assert str(tmp_path / "draft") in message


CASES = [
    [target, with_draft, budget_bytes, {"page_size": page_size, **limit}]
    for target in TARGETS
    for with_draft in (True, False)
    for budget_bytes in (50 * 2**20, 3 * 2**30)
    for page_size in (1, 64)
    for limit in ({}, {"max_total_tokens": 20_000})
]


def sizes_with(package_folder: Path | None) -> list[dict[str, Any]]:
    """Return the pool configurations of `CASES` from the SGLang in a folder, or from the one installed here."""
    environment = os.environ | {"SGLANG_PLATFORM": "cpu_reference"}
    if package_folder is not None:
        environment["PYTHONPATH"] = str(package_folder)
    program = Path(__file__).with_name("pool_sizing.py")
    run = subprocess.run(
        [sys.executable, program], input=json.dumps(CASES), env=environment, text=True, capture_output=True, timeout=400
    )
    assert run.returncode == 0, run.stderr[-5000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_without_the_flag_the_pools_are_those_of_the_published_engine(tmp_path: Path) -> None:
    patched, published = sizes_with(None), sizes_with(patchset.pristine_copy(tmp_path / "published"))

    assert len(published) == len(CASES)
    assert patched == published
