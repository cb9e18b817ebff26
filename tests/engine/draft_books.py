"""The books of the two-sided allocator: what its free lists and its mapping say must add up at every step."""

from typing import Any

import torch

from scripted import Engine


def check_books(engine: Engine) -> None:
    """Raise AssertionError unless every page of both sides is free or held, once, and held where it is read."""
    allocator = engine.allocator
    page_size = allocator.page_size
    mapping = allocator.full_to_swa_index_mapping[:-1]
    full_slots = torch.nonzero(mapping > 0).flatten()
    draft_slots = mapping[full_slots]
    assert mapping.min() >= 0 and mapping.max() < allocator.size_swa + page_size
    assert len(torch.unique(draft_slots)) == len(draft_slots), "two target slots share a draft slot"
    assert torch.equal(full_slots % page_size, draft_slots % page_size), "a slot changed its place within the page"

    free_full = _free_pages(allocator.full_attn_allocator, allocator.size_full, page_size)
    free_draft = _free_pages(allocator.swa_attn_allocator, allocator.size_swa, page_size)
    held_full = torch.unique(full_slots // page_size)
    held_draft = torch.unique(draft_slots // page_size)
    assert not torch.isin(held_full, free_full).any(), "a free target page maps to the draft"
    assert not torch.isin(held_draft, free_draft).any(), "a draft page is mapped and free"
    assert len(held_draft) + len(free_draft) == allocator.size_swa // page_size, "a draft page is neither held nor free"

    tables = engine.scheduler.req_to_token_pool.req_to_token
    for request in engine.running():
        row = tables[request.kv.req_pool_idx, : request.kv.kv_allocated_len].to(torch.int64)
        assert not torch.isin(row // page_size, free_full).any(), f"{request.rid} reads a free page"
        first_read = max(0, request.kv.kv_committed_len - engine.scheduler.sliding_window_size)
        first_read -= first_read % page_size
        assert (mapping[row[first_read:]] > 0).all(), f"{request.rid} has lost a draft slot inside its window"


def check_empty(engine: Engine) -> None:
    """Raise AssertionError unless every slot of both sides is free."""
    check_books(engine)
    allocator = engine.allocator
    assert not allocator.full_to_swa_index_mapping[:-1].any()
    assert allocator.full_available_size() == allocator.size_full
    assert allocator.swa_available_size() == allocator.size_swa


def _free_pages(side: Any, size: int, page_size: int) -> torch.Tensor:
    pages = side.get_all_free_pages()
    assert len(torch.unique(pages)) == len(pages), "a page is free twice"
    assert len(pages) == 0 or (pages.min() >= 1 and pages.max() <= size // page_size)
    return pages
