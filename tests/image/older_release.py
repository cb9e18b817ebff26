"""Decode steps of a release whose own dependencies are not installed, driven without a model.

Run by test_older_releases.py in a process of its own: ``python older_release.py PUBLISHED PATCHED`` with two unpacked
packages prints what happens under each as JSON. Batch, requests, pools and prefix cache are the release's own classes.
Provided is what a running engine brings: the configuration, and the one GPU kernel, which writes slot numbers to rows.
"""

import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import sys
from array import array
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

WINDOW_TOKENS, SWA_TOKENS, FULL_TOKENS = 64, 256, 4096
PROMPT_TOKENS, BLOCK_TOKENS, ACCEPTED_TOKENS = 32, 8, 5
STEPS = 200


class GpuLibrary:
    """Finds an empty module in the place of `sgl_kernel`, which needs a GPU driver to be imported."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        ours = name.partition(".")[0] == "sgl_kernel"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return mock.MagicMock(__name__=spec.name, __spec__=spec, __path__=[], __all__=[])

    def exec_module(self, module: ModuleType) -> None:
        pass


def make_importable(published: Path) -> None:
    """Let the release be imported among the dependencies of another."""
    sys.path.insert(0, str(published))
    sys.meta_path.insert(0, GpuLibrary())
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_SWA_EVICTION_INTERVAL": "1"}
    entry_points = importlib.metadata.entry_points

    def without_plugins(**selection: Any) -> Any:
        plugins = selection.get("group", "").startswith("sglang")
        return importlib.metadata.EntryPoints() if plugins else entry_points(**selection)

    importlib.metadata.entry_points = without_plugins
    from transformers.models.auto import configuration_auto as auto

    register = auto._LazyConfigMapping.register
    auto._LazyConfigMapping.register = lambda self, key, value, exist_ok=False: register(self, key, value, True)


def load_patched(patched: Path) -> ModuleType:
    """The patched file, beside the published module of the same name and with the same imports."""
    file = patched / "sglang/srt/speculative/dflash_info_v2.py"
    spec = importlib.util.spec_from_file_location("patched_dflash_info_v2", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def write_rows(rows: Any, table: Any, starts: Any, ends: Any, slots: Any, count: int) -> None:
    """Stand in for the kernel `assign_req_to_token_pool`."""
    at = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = slots[at : at + end - start].to(table.dtype)
        at += end - start


def new_batch() -> Any:
    """A batch of one request with its prompt's KV in place."""
    import torch
    from sglang.srt.managers.schedule_batch import Req, ReqKvInfo, ScheduleBatch
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.chunk_cache import SWAChunkCache
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.sampling.sampling_params import SamplingParams

    kv_pool = mock.MagicMock(spec=BaseSWAKVPool)
    allocator = SWATokenToKVPoolAllocator(
        FULL_TOKENS, SWA_TOKENS, 1, dtype=torch.bfloat16, device="cpu", kvcache=kv_pool, need_sort=False
    )
    rows = ReqToTokenPool(1, FULL_TOKENS, "cpu", False)
    params = CacheInitParams(disable=True, req_to_token_pool=rows, token_to_kv_pool_allocator=allocator, page_size=1)
    params.sliding_window_size, params.chunked_prefill_size = WINDOW_TOKENS, -1
    request = Req("0", "", array("q", range(PROMPT_TOKENS)), SamplingParams(max_new_tokens=FULL_TOKENS))
    request.output_ids.append(0)
    request.req_pool_idx = 1
    request.kv_committed_len = PROMPT_TOKENS
    request.kv = ReqKvInfo(kv_allocated_len=PROMPT_TOKENS, swa_evicted_seqlen=0)
    rows.req_to_token[1, :PROMPT_TOKENS] = allocator.alloc(PROMPT_TOKENS).to(torch.int32)
    return ScheduleBatch(
        reqs=[request],
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=allocator,
        tree_cache=SWAChunkCache(params),
        device="cpu",
        forward_mode=ForwardMode.DECODE,
        req_pool_indices=torch.tensor([1]),
        sampling_info=SimpleNamespace(penalizer_orchestrator=SimpleNamespace(is_required=False)),
    )


def books(batch: Any) -> dict[str, int]:
    """What the request has ticked, allocated and evicted, and what is held of the sliding-window pool."""
    (request,) = batch.reqs
    held = SWA_TOKENS - batch.token_to_kv_pool_allocator.swa_available_size()
    return {
        "ticks": request.decode_batch_idx,
        "allocated": request.kv.kv_allocated_len,
        "evicted": request.kv.swa_evicted_seqlen,
        "swa_held": held,
    }


def decode(prepare: Any, steps: int = STEPS) -> dict[str, Any]:
    """Prepare one decode batch after the other; each step generates some tokens."""
    batch = new_batch()
    (request,) = batch.reqs
    at_evictions, after = [], []
    evict = type(batch).maybe_evict_swa

    def noting(batch: Any) -> None:
        at_evictions.append(books(batch))
        evict(batch)

    error = None
    with mock.patch.object(type(batch), "maybe_evict_swa", noting):
        for _ in range(steps):
            try:
                prepare(batch)
            except RuntimeError as problem:
                error = str(problem)
                break
            after.append(books(batch))
            request.output_ids.extend([0] * ACCEPTED_TOKENS)
            request.kv_committed_len += ACCEPTED_TOKENS
    return {"at_evictions": at_evictions, "after": after, "error": error, "generated": len(request.output_ids)}


def decode_around_an_empty_batch(prepare: Any) -> dict[str, Any]:
    """One step, the same batch while it has no request, one more step."""
    batch = new_batch()
    calls = []
    with mock.patch.object(type(batch), "maybe_evict_swa", lambda batch: calls.append(len(batch.reqs))):
        for reqs in (batch.reqs, [], batch.reqs):
            batch.reqs, kept = reqs, batch.reqs
            prepare(batch)
            batch.reqs = kept
    return {"requests_at_evictions": calls, **books(batch)}


def main() -> None:
    published, patched = map(Path, sys.argv[1:])
    make_importable(published)
    import torch
    from sglang.srt.managers import schedule_batch
    from sglang.srt.mem_cache import allocation
    from sglang.srt.speculative import dflash_info_v2, eagle_utils

    spec = SimpleNamespace(speculative_num_draft_tokens=BLOCK_TOKENS, speculative_eagle_topk=1)
    modules = {"published": dflash_info_v2, "patched": load_patched(patched)}
    for module in modules.values():
        module.get_spec = lambda: spec
        module.is_pin_memory_available = lambda _: False
    eagle_utils.get_spec = lambda: spec
    eagle_utils.get_alloc_reserve_per_decode = lambda: 2 * BLOCK_TOKENS
    schedule_batch.get_server_args = lambda: None
    allocation.assign_req_to_token_pool_func = write_rows
    results: dict[str, Any] = {"eagle": decode(eagle_utils.eagle_prepare_for_decode)}
    for name, module in modules.items():
        prepare = module.DFlashDraftInputV2.create_idle_input(torch.device("cpu")).prepare_for_decode
        results[name] = {"decode": decode(prepare), "empty": decode_around_an_empty_batch(prepare)}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
