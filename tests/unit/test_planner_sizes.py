"""The planner's sizes against reported figures, and against what SGLang allocates."""

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pool_sizing import DFLASH, configurator, draft_configurator, write_model
from published import QWEN38_27B, QWEN38_27B_DFLASH2
from server_ext.planner import engine
from server_ext.planner.engine import Sizes
from server_ext.planner.inputs import GPUS, EngineOptions, Gpu, Memory
from server_ext.planner.models import write_geometry
from server_ext.planner.runner import Refused
from server_ext.planner.weights import weights_gib
from server_ext.tiny.recipe import RECIPES, WINDOW_TOKENS

GIB = 2**30


@pytest.fixture
def published(tmp_path: Path) -> EngineOptions:
    """The pair and the options of the reported figures."""
    return EngineOptions(
        target=write_model(tmp_path / "target", QWEN38_27B),
        draft=write_model(tmp_path / "draft", QWEN38_27B_DFLASH2),
        max_running_requests=8,
        draft_window_size=2048,
        mem_fraction_static=0.8,
    )


def published_memory(options: EngineOptions) -> Memory:
    pair_gib = sum(weights_gib(options, target=target) for target in (True, False))
    return Memory(GPUS["H200"].free_gib(1), pair_gib)


def full_attention(folder: Path, **options: Any) -> EngineOptions:
    """Return a pair with the rows of the published one, whose target has no states."""
    target, draft = "layers=16,kv-heads=4,head-dim=256", "layers=5,kv-heads=8,head-dim=128,window=2048,block=8"
    return EngineOptions(
        target=str(write_geometry("--target-geometry", target, folder / "target")),
        draft=str(write_geometry("--draft-geometry", draft, folder / "draft")),
        draft_window_size=2048,
        **options,
    )


def test_the_reported_figures_of_an_h200(published: EngineOptions) -> None:
    """https://github.com/sgl-project/sglang/pull/40665, from the two configurations and the name of the GPU alone."""
    memory = published_memory(published)
    unbounded = engine.size(published, memory)
    bounded = engine.size(dataclasses.replace(published, draft_kv_ratio=0.25), memory)

    assert unbounded.target_tokens == pytest.approx(450_060, rel=0.02)
    assert unbounded.draft_tokens == unbounded.target_tokens
    assert bounded.target_tokens == pytest.approx(547_899, rel=0.02)
    assert bounded.draft_tokens == pytest.approx(136_974, rel=0.02)
    assert bounded.target_tokens / unbounded.target_tokens == pytest.approx(547_899 / 450_060, rel=1e-4)
    assert unbounded.target_bytes_per_token == 64 * 1024
    assert unbounded.draft_bytes_per_token == 20 * 1024
    assert unbounded.draft_pool_bytes / GIB == pytest.approx(8.6, rel=0.02)
    assert bounded.draft_pool_bytes / GIB == pytest.approx(2.6, rel=0.02)


@pytest.mark.parametrize(
    ("ratio", "target_tokens", "draft_tokens"), [(1.0, 450_060, 450_060), (0.25, 547_899, 136_974)]
)
def test_the_reported_figures_to_the_slot_for_the_reported_memory(
    tmp_path: Path, ratio: float, target_tokens: int, draft_tokens: int
) -> None:
    """The geometry of the pair, without states, in the memory that the first of the figures stands for."""
    options = full_attention(tmp_path, max_running_requests=8, draft_kv_ratio=ratio)
    kv_bytes = 450_060 * (64 + 20) * 1024
    sizes = engine.size(options, Memory(free_gib=(kv_bytes + 1000) / 0.8 / GIB, weights_gib=1e-9))

    assert (sizes.target_tokens, sizes.draft_tokens) == (target_tokens, draft_tokens)


@pytest.mark.parametrize(
    ("page_size", "running_requests", "cap"),
    [
        (64, 8, 41_664),
        (64, 16, 66_880),
        (64, 32, 117_312),
        (64, 48, 167_744),
        (1, 8, 41_097),
        (1, 16, 65_809),
        (1, 32, 115_233),
        (1, 48, 164_657),
    ],
)
def test_request_caps(tmp_path: Path, page_size: int, running_requests: int, cap: int) -> None:
    """Worked by hand from SGLang's formula: window 2048, block 8, chunk 8192, overlap on."""
    options = full_attention(tmp_path, max_running_requests=running_requests, draft_kv_ratio=0.5, page_size=page_size)
    memory = Memory(free_gib=80, weights_gib=1)
    window = engine.size(options, memory).window

    assert window is not None
    assert window.request_cap_tokens == cap
    assert window.retained_tokens == 2048
    smallest = engine.smallest_draft_kv_ratio(options, memory)
    assert smallest is not None
    at_smallest = engine.size(dataclasses.replace(options, draft_kv_ratio=smallest), memory)
    assert at_smallest.draft_tokens >= cap
    with pytest.raises(Refused, match=f"Use --speculative-draft-kv-ratio {smallest:g} or more"):
        engine.size(dataclasses.replace(options, draft_kv_ratio=round(smallest - 0.001, 3)), memory)


def test_weights_are_those_of_the_published_files(published: EngineOptions) -> None:
    target_bytes, draft_bytes = (weights_gib(published, target=target) * GIB for target in (True, False))

    # Language model and vision tower; the published files have a multi-token-prediction layer besides.
    # A few of its vectors are float32.
    assert target_bytes == pytest.approx(2 * 27_356_728_560, rel=1e-6)
    # 1.924 G parameters
    assert draft_bytes == 2 * 1_924_404_480


def test_tensor_parallel_ranks_share_weights_and_rows(published: EngineOptions) -> None:
    two = dataclasses.replace(published, tensor_parallel_size=2)
    memory = Memory(free_gib=70, weights_gib=10)
    alone, shared = engine.size(published, memory), engine.size(two, memory)

    assert shared.target_bytes_per_token * 2 == alone.target_bytes_per_token
    assert shared.draft_bytes_per_token * 2 == alone.draft_bytes_per_token
    for target in (True, False):
        whole, half = weights_gib(published, target=target), weights_gib(two, target=target)
        assert whole / 2 <= half < whole * 0.6


class Allocated:
    """Pools as the target runner and the draft runner allocate them after loading their weights."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], target: str, memory: Memory) -> None:
        from sglang.srt.mem_cache import kv_cache_configurator

        monkeypatch.setattr(kv_cache_configurator.gc, "collect", lambda: 0)  # slow, and nothing was loaded
        monkeypatch.setattr(
            kv_cache_configurator, "get_available_gpu_memory", lambda *_, **__: memory.free_gib - memory.weights_gib
        )
        self.kv = configurator(target, **options)
        with alone():
            self.target = self.kv.configure(pre_model_load_memory=memory.free_gib)
            draft = draft_configurator(self.kv)
            draft = dataclasses.replace(
                draft,
                is_hybrid_swa=draft.model_config.is_hybrid_swa,
                memory_pool_config=self.target.memory_pool_config,
                req_to_token_pool=self.target.req_to_token_pool,
                token_to_kv_pool_allocator=self.target.token_to_kv_pool_allocator,
            )
            self.draft = draft.configure(pre_model_load_memory=memory.free_gib)


def alone() -> Any:
    """A world of one rank."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().override(world_group=SimpleNamespace(world_size=1, rank_in_group=0, cpu_group=None))


def tiny(name: str, folder: Path, **options: Any) -> EngineOptions:
    """Return the options of a tiny pair, weights aside."""
    return EngineOptions(
        target=write_model(folder / "target", RECIPES[name].target),
        draft=write_model(folder / "draft", RECIPES[name].draft),
        draft_window_size=WINDOW_TOKENS,
        chunked_prefill_size=256,
        mem_fraction_static=0.5,
        **options,
    )


def server_options(options: EngineOptions) -> dict[str, Any]:
    """Return the same options as SGLang names them."""
    named = DFLASH | {
        "speculative_draft_model_path": options.draft,
        "speculative_draft_kv_ratio": options.draft_kv_ratio or 1.0,
        "speculative_draft_window_size": options.draft_window_size,
        "max_running_requests": options.max_running_requests,
        "page_size": options.page_size,
        "chunked_prefill_size": options.chunked_prefill_size,
        "mem_fraction_static": options.mem_fraction_static,
        "swa_full_tokens_ratio": options.swa_full_tokens_ratio,
        "max_mamba_cache_size": options.max_mamba_cache_size,
        "max_total_tokens": options.max_total_tokens,
    }
    return {name: value for name, value in named.items() if value is not None}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("qwen3", {"draft_kv_ratio": ratio}) for ratio in (1.0, 0.5, 0.25, 0.2)),
        ("qwen3", {"draft_kv_ratio": 0.25, "max_total_tokens": 60_001}),
        *(("gdn", {"draft_kv_ratio": ratio}) for ratio in (1.0, 0.5)),
        ("gdn", {"draft_kv_ratio": 0.5, "max_mamba_cache_size": 40}),
        *(("swa", {"swa_full_tokens_ratio": ratio}) for ratio in (0.8, 0.3)),
    ],
)
@pytest.mark.parametrize("page_size", [1, 64])
def test_sizes_are_those_that_the_engine_allocates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any], page_size: int
) -> None:
    planned = tiny(name, tmp_path, page_size=page_size, max_running_requests=8, **options)
    memory = Memory(free_gib=0.3, weights_gib=0.05)
    sizes = engine.size(planned, memory)
    pools = Allocated(monkeypatch, server_options(planned), planned.target, memory)

    allocator = pools.target.token_to_kv_pool_allocator
    draft_pool = pools.draft.token_to_kv_pool
    if sizes.window:
        assert (allocator.size_full, allocator.size_swa) == (sizes.target_tokens, sizes.window.tokens)
    else:
        assert allocator.size == sizes.target_tokens
    assert pools.target.max_total_num_tokens == sizes.target_tokens
    assert pools.target.max_running_requests == sizes.running_requests
    assert pool_bytes(pools.target.token_to_kv_pool, page_size) == sizes.target_pool_bytes
    assert pool_bytes(draft_pool, page_size) == sizes.draft_pool_bytes
    if sizes.state:
        assert pools.target.req_to_token_pool.mamba_pool.size == sizes.state.slots


def pool_bytes(pool: Any, page_size: int) -> int:
    """Bytes of a pool's rows, without the page that padding tokens write to."""
    parts = [pool.full_kv_pool] if hasattr(pool, "full_kv_pool") else [pool]
    if hasattr(pool, "swa_kv_pool"):
        parts.append(pool.swa_kv_pool)
    rows = [row for part in parts for row in (*part.k_buffer, *part.v_buffer)]
    return sum((len(row) - page_size) * row[0].numel() * row.element_size() for row in rows)


@pytest.mark.parametrize("pair", ["qwen3", "gdn", "published"])
def test_the_budget_is_the_one_the_engine_measures(
    published: EngineOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: str
) -> None:
    """`_rest_gib` restates what the engine does with a device's free memory."""
    from sglang.srt.mem_cache import kv_cache_configurator

    monkeypatch.setattr(kv_cache_configurator.gc, "collect", lambda: 0)  # slow, and nothing was loaded
    options = published if pair == "published" else tiny(pair, tmp_path / "tiny", max_running_requests=4)
    for fraction, free_gib, pair_gib in itertools.product((0.6, 0.8, 0.95), (80.0, 139.3), (0.5, 20.25)):
        options = dataclasses.replace(options, mem_fraction_static=fraction)
        left_gib = free_gib - pair_gib
        monkeypatch.setattr(
            kv_cache_configurator, "get_available_gpu_memory", lambda *_, left_gib=left_gib, **__: left_gib
        )
        kv = configurator(options.target, **server_options(options))
        with alone():
            measured_bytes = kv._profile_available_bytes(free_gib)
        assert engine.size(options, Memory(free_gib, pair_gib)).kv_bytes == pytest.approx(measured_bytes, abs=64)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_the_chunk_is_the_engine_s_default_for_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: Gpu
) -> None:
    from sglang.srt.arg_groups import memory_hook
    from sglang.srt.runtime_context import get_schedule

    monkeypatch.setattr(memory_hook, "get_device_memory_capacity", lambda _: gpu.memory_mib)
    options = server_options(tiny("qwen3", tmp_path, max_running_requests=4)) | {"chunked_prefill_size": None}
    configurator(write_model(tmp_path / "target", RECIPES["qwen3"].target), **options)

    assert get_schedule().chunked_prefill_size == gpu.chunked_prefill_size


def test_a_gpu_that_is_too_small_is_refused(published: EngineOptions) -> None:
    with pytest.raises(Refused, match=r"54\.5 GiB of weights leave no room for KV in 38\.9 GiB .* or larger GPUs"):
        engine.size(published, Memory(GPUS["A100-40"].free_gib(1), published_memory(published).weights_gib))


def test_sizes_are_plain_numbers(published: EngineOptions) -> None:
    sizes = engine.size(published, Memory(139.3, 54.5))
    assert isinstance(sizes, Sizes)
    numbers = [value for value in dataclasses.asdict(sizes).values() if value is not None]
    assert all(isinstance(value, int | dict) for value in numbers)
