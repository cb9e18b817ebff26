"""The two-sided allocator and the draft pool on its SWA side, as SGLang builds them, on CPU tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pool_sizing import DENSE, DFLASH, DRAFT, configurator, draft_configurator, write_model

TARGET_TOKENS = 20_480
RATIO = 0.5
PAGES = [1, 64]


class Pools:
    """Target pool, draft pool and allocator of one engine."""

    def __init__(self, folder: Path, **options: Any) -> None:
        spec = DFLASH | {"speculative_draft_model_path": write_model(folder / "draft", DRAFT)}
        spec |= {"speculative_draft_kv_ratio": RATIO, "max_total_tokens": TARGET_TOKENS}
        self.kv = configurator(write_model(folder / "target", DENSE), **spec | options)
        self.config = self.kv.config_from_budget(2**30)
        self.config.max_running_requests = 8
        self.allocator, self.target = self._init(self.kv, None, None)
        self.draft_kv = draft_configurator(self.kv)
        _, self.draft = self._init(self.draft_kv, self.req_to_token_pool, self.allocator)

    def _init(self, kv: Any, req_to_token_pool: Any, allocator: Any) -> tuple[Any, Any]:
        pools = kv._init_pools(
            sizes=kv._derive_pool_sizes(config=self.config),
            req_to_token_pool=req_to_token_pool,
            token_to_kv_pool_allocator=allocator,
        )
        self.req_to_token_pool = pools.req_to_token_pool
        return pools.token_to_kv_pool_allocator, pools.token_to_kv_pool

    def allocate(self, tokens: int) -> torch.Tensor:
        """Slots of a request of this many tokens without a prefix."""
        if self.kv.page_size == 1:
            return self.allocator.alloc(tokens)
        none, all_of_it = torch.tensor([0]), torch.tensor([tokens])
        return self.allocator.alloc_extend(none, none, all_of_it, all_of_it, torch.tensor([-1]), tokens)


@pytest.fixture(params=PAGES, ids="page{}".format)
def pools(request: pytest.FixtureRequest, tmp_path: Path) -> Pools:
    return Pools(tmp_path, page_size=request.param)


def test_sizes_and_owners(pools: Pools) -> None:
    allocator = pools.allocator
    assert (allocator.size_full, allocator.size_swa) == (TARGET_TOKENS, TARGET_TOKENS // 2)
    assert allocator.get_kvcache() is pools.target and allocator.draft_kv_pool is pools.draft
    assert (pools.draft.full_layer_nums, pools.draft.swa_layer_nums) == (0, 2)
    assert pools.draft.layers_mapping == {0: (0, True), 1: (1, True)}
    assert pools.draft.full_to_swa_index_mapping is allocator.full_to_swa_index_mapping
    assert allocator.kv_mem_usage_gb == pools.target.mem_usage + pools.draft.mem_usage


def test_a_target_slot_has_one_draft_slot_until_it_leaves_the_window(pools: Pools) -> None:
    allocator, page_size = pools.allocator, pools.kv.page_size
    first, second = pools.allocate(1000), pools.allocate(1000)
    slots = torch.cat([first, second])
    draft_slots = allocator.translate_loc_from_full_to_swa(slots)
    assert len(torch.unique(draft_slots)) == 2000 and draft_slots.min() > 0
    assert torch.equal(pools.draft.translate_loc_from_full_to_swa(slots), draft_slots)
    assert allocator.translate_loc_from_full_to_swa(torch.tensor([-1])).item() == -1

    held_draft = allocator.size_swa - allocator.swa_available_size()
    allocator.free_swa_segment(first[: 10 * page_size], start_pos=0)
    assert allocator.size_swa - allocator.swa_available_size() == held_draft - 10 * page_size
    assert not allocator.translate_loc_from_full_to_swa(first[: 10 * page_size]).any()
    assert allocator.full_available_size() < allocator.size_full - 1900, "the target keeps what the draft gave up"

    allocator.free_full_segment(first[: 10 * page_size], start_pos=0)
    allocator.free_segment(first[10 * page_size :], start_pos=10 * page_size)
    allocator.free_segment(second, start_pos=0)
    assert allocator.full_available_size() == allocator.size_full
    assert allocator.swa_available_size() == allocator.size_swa
    assert not allocator.full_to_swa_index_mapping[:-1].any()


def test_no_slot_where_the_draft_has_none(pools: Pools) -> None:
    page_size = pools.kv.page_size
    assert pools.allocate(TARGET_TOKENS // 2 + page_size) is None
    assert pools.allocator.full_available_size() == TARGET_TOKENS
    assert pools.allocate(TARGET_TOKENS // 2) is not None
    assert pools.allocate(page_size) is None


def test_a_resize_reaches_both_sides_and_the_runner(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.model_executor import model_runner

    smaller = pools.kv.config_from_budget(2**30, cap_tokens=TARGET_TOKENS - 128)
    pools.allocate(500)
    pools.allocator.resize(smaller)
    sizes = (TARGET_TOKENS - 128, (TARGET_TOKENS - 128) // 2)
    assert (pools.allocator.full_available_size(), pools.allocator.swa_available_size()) == sizes
    assert not pools.allocator.full_to_swa_index_mapping[:-1].any()

    resized = SimpleNamespace(
        max_total_num_tokens=sizes[0],
        full_max_total_num_tokens=sizes[0],
        swa_max_total_num_tokens=sizes[1],
        unified_memory_pool_bytes=None,
        capped_max_running_requests=None,
    )
    monkeypatch.setattr(model_runner, "compute_post_capture_kv_resize", lambda runner, draft_runners: resized)
    runner = SimpleNamespace(is_hybrid_swa=False, memory_pool_config=pools.config)
    model_runner.ModelRunner.post_capture_resize_kv_pool(runner)
    assert (runner.full_max_total_num_tokens, runner.swa_max_total_num_tokens) == sizes


class Saver:
    """Stands in for torch_memory_saver, which needs a GPU: records the regions that a release would reach."""

    enabled = True

    def __init__(self) -> None:
        self.regions: list[str] = []

    @contextmanager
    def region(self, tag: str, **_: Any) -> Iterator[None]:
        self.regions.append(tag)
        yield


def test_the_memory_saver_covers_the_draft_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.runtime_context import get_exec

    pools = Pools(tmp_path)
    saver = Saver()
    monkeypatch.setattr(
        memory_pool.TorchMemorySaverAdapter, "create", staticmethod(lambda enable: saver if enable else None)
    )
    with get_exec().features.override(enable_memory_saver=True):
        _, draft = pools._init(pools.draft_kv, pools.req_to_token_pool, pools.allocator)

    assert draft.swa_kv_pool.memory_saver_adapter is saver
    assert "kv_cache" in saver.regions


@pytest.mark.parametrize("page_size", PAGES)
def test_ratio_one_builds_upstreams_pools(tmp_path: Path, page_size: int) -> None:
    pools = Pools(tmp_path, page_size=page_size, speculative_draft_kv_ratio=1.0)

    assert not pools.kv.has_draft_swa_side and not pools.draft_kv.is_hybrid_swa
    assert type(pools.allocator).__name__ in ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator")
    assert type(pools.draft) is type(pools.target)
    assert pools.draft.size == pools.target.size == TARGET_TOKENS
