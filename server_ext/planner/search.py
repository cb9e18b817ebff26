"""Looks for the ratio, and for the number of requests that fit.

Every number about pools comes from the engine; here they are compared.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from server_ext.errors import UserError
from server_ext.planner import engine
from server_ext.planner.engine import Sizes
from server_ext.planner.inputs import EngineOptions, Knob, Memory, Workload
from server_ext.planner.runner import Refused


@dataclass(frozen=True)
class Point:
    """What one ratio gives. `sizes` is `None` where the engine refuses it, and `refusal` says why.

    `headroom_tokens` is what a bounded pool has beyond its running requests: beyond its request cap, and beyond the end
    of each request's prompt, which the prefix cache keeps locked while the request runs (SGLang's
    ``SGLANG_OPT_RELEASE_PREFILL_SWA`` is off by default). It is `None` when nothing is bounded. `cached_prefixes` is
    how many requests stay in the prefix cache beside the running ones, and `limited_by` the pool that ends them.
    """

    ratio: float
    sizes: Sizes | None
    refusal: str | None = None
    headroom_tokens: int | None = None
    cached_prefixes: int = 0
    limited_by: Literal["target", "window", "state", ""] = ""

    @property
    def holds_its_requests(self) -> bool:
        """Whether the running requests fit in what the ratio bounds."""
        return self.sizes is not None and (self.headroom_tokens is None or self.headroom_tokens >= 0)


class Search:
    """Looks at ratios and numbers of requests for one pair, one memory and one workload.

    Raises `Refused` for options that the engine refuses whatever the ratio, and `UserError` for requests longer than
    the context.
    """

    def __init__(self, options: EngineOptions, memory: Memory, workload: Workload) -> None:
        self._options = options
        self._memory = memory
        self._workload = workload
        one_request = engine.size(self.at(1), memory)
        self.knob: Knob = "swa_full_tokens_ratio" if one_request.swa_bytes_per_token else "draft_kv_ratio"
        self.fixed_ratio: float | None = getattr(options, self.knob)
        if workload.request_tokens > one_request.context_length:
            raise UserError(
                f"--prompt-tokens {workload.prompt_tokens} and --output-tokens {workload.output_tokens} do not fit in "
                f"a context of {one_request.context_length} tokens; shorten them or raise --context-length"
            )

    def at(self, requests: int) -> EngineOptions:
        """Return the options with this many running requests."""
        return replace(self._options, max_running_requests=requests)

    @functools.cached_property
    def bounded_refusal(self) -> str | None:
        """Why the engine refuses every bounded draft pool for this pair, or `None`."""
        try:
            self._smallest_draft_kv_ratio(self.at(1))
        except Refused as refused:
            return str(refused)
        return None

    def smallest_ratio(self, options: EngineOptions) -> float | None:
        """Return the smallest ratio below 1 whose pool holds its request cap, `None` if there is none."""
        if self.knob == "swa_full_tokens_ratio":
            return _first(0.001, lambda ratio: self._holds_cap(options, ratio))
        return None if self.bounded_refusal else self._smallest_draft_kv_ratio(options)

    def _smallest_draft_kv_ratio(self, options: EngineOptions) -> float | None:
        return engine.smallest_draft_kv_ratio(options, self._memory)

    def _holds_cap(self, options: EngineOptions, ratio: float) -> bool:
        sizes = self.point(options, ratio).sizes
        return sizes is not None and sizes.window is not None and sizes.window.tokens >= sizes.window.request_cap_tokens

    def most_requests(self) -> tuple[EngineOptions, Point]:
        """Return the options with as many running requests as are wanted or fit, and the best ratio for them.

        Raises `Refused` when nothing starts, `UserError` when not even one request fits.
        """
        low, high = 0, self._workload.concurrency + 1
        fitting: dict[int, Point] = {}
        requests = self._workload.concurrency
        while high - low > 1:
            point = self.best(self.at(requests))
            if self.shortage(point, requests) is None:
                fitting[requests] = point
                low = requests
            else:
                high = requests
            requests = (low + high) // 2
        if low == 0:
            point = self.best(self.at(1))
            if point.sizes is None:
                raise Refused(point.refusal or "")
            raise UserError(f"not one request fits: {self.shortage(point, 1)}")
        return self.at(low), fitting[low]

    def shortage(self, point: Point, requests: int) -> str | None:
        """Return what keeps this many requests from running, `None` if nothing does."""
        if point.sizes is None:
            return point.refusal
        if not point.holds_its_requests:
            return f"the pool that ratio {point.ratio:g} bounds is {-(point.headroom_tokens or 0)} tokens short"
        needed = requests * self._workload.request_tokens
        if point.sizes.target_tokens < needed:
            return f"they need {needed} tokens, and the KV pool has {point.sizes.target_tokens}"
        if point.sizes.running_requests < requests:
            return f"the engine would run {point.sizes.running_requests}, which is what its state pool holds"
        return None

    def best(self, options: EngineOptions) -> Point:
        """Return the ratio at which most requests stay cached, of those the one with most tokens for the target.

        A larger ratio gives prefixes to the bounded pool and takes them from the target's, so that is the first ratio
        at which the bounded pool no longer is the shorter one.
        """
        if self.fixed_ratio is not None:
            return self.point(options, self.fixed_ratio)
        unbounded = self.point(options, 1.0)
        smallest = self.smallest_ratio(options)
        if smallest is None:
            return unbounded
        first = _first(0.01, lambda ratio: ratio >= smallest and self._is_balanced(self.point(options, ratio)))
        if first is None:
            return unbounded
        balanced = self.point(options, first)
        return unbounded if unbounded.cached_prefixes > balanced.cached_prefixes else balanced

    @staticmethod
    def _is_balanced(point: Point) -> bool:
        return point.holds_its_requests and point.limited_by != "window"

    def point(self, options: EngineOptions, ratio: float) -> Point:
        """Look at one ratio."""
        try:
            sizes = engine.size(options.with_ratio(self.knob, ratio), self._memory)
        except Refused as refused:
            return Point(ratio, None, str(refused))
        requests, request_tokens = options.max_running_requests, self._workload.request_tokens
        rooms: dict[Literal["target", "window", "state", ""], int] = {
            "target": (sizes.target_tokens - requests * request_tokens) // request_tokens
        }
        if sizes.state:
            rooms["state"] = sizes.state.slots - requests * sizes.state.slots_per_request
        headroom = None
        if sizes.window:
            retained = sizes.window.retained_tokens
            locked = min(retained, _aligned(self._workload.prompt_tokens, options.page_size))
            headroom = sizes.window.tokens - sizes.window.request_cap_tokens - requests * locked
            rooms["window"] = headroom // min(retained, _aligned(request_tokens, options.page_size))
        limited_by = min(rooms, key=lambda name: rooms[name])
        return Point(ratio, sizes, None, headroom, max(0, rooms[limited_by]), limited_by)


def _aligned(tokens: int, page_size: int) -> int:
    return math.ceil(tokens / page_size) * page_size


def _first(step: float, holds: Callable[[float], bool]) -> float | None:
    """Return the smallest multiple of `step` below 1 for which `holds`, which stays true once it is."""
    low, high = 0, round(1 / step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(round(middle * step, 3)) else (middle, high)
    ratio = round(high * step, 3)
    return ratio if ratio < 1 else None
