"""``GET /pools`` and ``GET /pools/config``: the schedulers' own snapshots, asked for over SGLang's request channel."""

import asyncio
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query

from server_ext.pools import Config, Snapshot
from server_ext.watch import REQUEST_ID

ANSWER_SECONDS = 10.0
"""How long a scheduler may take; it answers between two steps."""

router = APIRouter(tags=["pools"])

Rank = Annotated[int | None, Query(ge=0, description="Only this data-parallel rank; all without it.")]


@dataclass(frozen=True)
class Pools:
    """The pools of every scheduler now.

    Attributes:
        schedulers: One for each data-parallel rank.
    """

    schedulers: tuple[Snapshot, ...]


@dataclass(frozen=True)
class Configs:
    """What every scheduler was started with.

    Attributes:
        schedulers: One for each data-parallel rank.
    """

    schedulers: tuple[Config, ...]


@router.get("/pools", response_model=Pools)
async def get_pools(dp_rank: Rank = None) -> dict[str, Any]:
    """Return the memory pools as they are now, and what has happened to them since start."""
    return {"schedulers": await _ask("snapshot", dp_rank)}


@router.get("/pools/config", response_model=Configs)
async def get_config(dp_rank: Rank = None) -> dict[str, Any]:
    """Return the sizes and limits of the memory pools, which stay the same while the server runs."""
    return {"schedulers": await _ask("config", dp_rank)}


async def _ask(part: str, dp_rank: int | None) -> list[dict[str, Any]]:
    from sglang.srt.entrypoints.http_server import get_global_state
    from sglang.srt.managers.io_struct import GetInternalStateReq

    manager = get_global_state().tokenizer_manager
    manager.auto_create_handle_loop()
    request = GetInternalStateReq(rid=REQUEST_ID)
    try:
        answers = await asyncio.wait_for(manager.get_internal_state_communicator(request), ANSWER_SECONDS)
    except TimeoutError:
        raise HTTPException(
            HTTPStatus.SERVICE_UNAVAILABLE, f"The scheduler did not answer within {ANSWER_SECONDS:g} seconds."
        ) from None
    states = [answer.internal_state for answer in answers]
    if not all(part in state for state in states):
        raise HTTPException(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "The plugin's hooks are not in place in the scheduler; its log at start-up says which.",
        )
    found = [state[part] for state in states if dp_rank in (None, state[part]["dp_rank"])]
    if not found:
        raise HTTPException(HTTPStatus.NOT_FOUND, f"There is no data-parallel rank {dp_rank}.")
    return sorted(found, key=lambda answer: answer["dp_rank"])
