"""What a plan starts from: the GPU, the engine's options, the requests that are expected."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from server_ext.errors import UserError

# Of H200s, `nvidia-smi` shows 140.4 GiB each; a process of eight saw 139.3 when it started, and 137.3 once the ranks
# were connected: https://github.com/sgl-project/sglang/pull/11716
_CONTEXT_GIB = 1.1
_CONNECTED_RANKS_GIB = 2.0


@dataclass(frozen=True)
class Gpu:
    """A GPU by what `nvidia-smi` shows as its memory, in MiB."""

    name: str
    memory_mib: int

    def free_gib(self, tensor_parallel_size: int) -> float:
        """Return what a rank has before it loads weights, an estimate: SGLang's log has it as ``avail mem``."""
        ranks_gib = _CONNECTED_RANKS_GIB if tensor_parallel_size > 1 else 0
        return self.memory_mib / 1024 - _CONTEXT_GIB - ranks_gib

    @property
    def chunked_prefill_size(self) -> int:
        """SGLang's default, by memory (`arg_groups/memory_hook.py`)."""
        steps = ((20, 2048), (60, 4096), (160, 8192))
        return next((tokens for gib, tokens in steps if self.memory_mib < gib * 1024), 16384)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100-40", 40960),
        Gpu("A100-80", 81920),
        Gpu("H100", 81559),
        Gpu("H200", 143771),
        Gpu("B200", 183359),
        Gpu("L40S", 46068),
        Gpu("RTX-PRO-6000", 97887),
    )
}
"""The GPUs known by name."""


Knob = Literal["draft_kv_ratio", "swa_full_tokens_ratio"]
"""The ratio that can be chosen: of the draft's pool, or of the sliding layers of a target that has some."""


@dataclass(frozen=True)
class EngineOptions:
    """Options of SGLang that decide about pools, under its names, shortened. `None` leaves the engine's default."""

    target: str
    draft: str
    max_running_requests: int
    draft_kv_ratio: float | None = None
    draft_window_size: int | None = None
    page_size: int = 1
    chunked_prefill_size: int = 8192
    mem_fraction_static: float = 0.8
    tensor_parallel_size: int = 1
    context_length: int | None = None
    kv_cache_dtype: str = "auto"
    swa_full_tokens_ratio: float | None = None
    max_mamba_cache_size: int | None = None
    mamba_full_memory_ratio: float | None = None
    max_total_tokens: int | None = None

    def with_ratio(self, knob: Knob, ratio: float) -> EngineOptions:
        """Return the options with another value of a knob."""
        if knob == "draft_kv_ratio":
            return replace(self, draft_kv_ratio=ratio)
        return replace(self, swa_full_tokens_ratio=ratio)


@dataclass(frozen=True)
class Memory:
    """Memory of one GPU in GiB: free before the weights are loaded, and what target and draft weights then take."""

    free_gib: float
    weights_gib: float


@dataclass(frozen=True)
class Workload:
    """The requests that are expected: tokens of prompt and answer, and how many run at the same time."""

    prompt_tokens: int
    output_tokens: int
    concurrency: int

    @property
    def request_tokens(self) -> int:
        """Tokens of one request at its end."""
        return self.prompt_tokens + self.output_tokens


def check_number(option: str, value: float | None, low: float, high: float = math.inf, *, bounds: str = "[]") -> None:
    """Raise `UserError` for a number out of its range; a bracket of `bounds` that is round excludes its end."""
    excluded = [end for end, bracket in zip((low, high), bounds, strict=True) if bracket in "()"]
    if value is None or (low <= value <= high and value not in excluded):
        return
    least = f"at least {low:g}" if bounds[0] == "[" else f"greater than {low:g}"
    most = f"at most {high:g}" if bounds[1] == "]" else f"less than {high:g}"
    raise UserError(f"{option} {value:g}: must be {least}" + ("" if high == math.inf else f" and {most}"))
