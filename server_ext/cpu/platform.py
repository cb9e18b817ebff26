"""The platform class that SGLang instantiates in each of its processes."""

from collections.abc import Callable
from typing import Any

import psutil
import torch
from sglang.srt.arg_groups.choices import add_attention_backend_choices, add_draft_attention_backend_choices
from sglang.srt.platforms.interface import PlatformEnum, SRTPlatform

from server_ext.cpu import PLATFORM
from server_ext.cpu.launches import assign_extend_cache_locs

_SPECULATIVE_ALGORITHMS = {"DFLASH"}


class CpuReferencePlatform(SRTPlatform):
    """Plain torch on the CPU, with the default (empty) capabilities: no Triton, no graph capture."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def __init__(self) -> None:
        # Here and not in init_backend(): the option parser checks the names before any worker starts.
        add_attention_backend_choices([PLATFORM])
        add_draft_attention_backend_choices([PLATFORM])

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Choose this platform's attention backend, and leave the processor to others while idle.

        The backends that SGLang chooses for any device of type "cpu" do not serve here: one needs AMX kernels, the
        other has no target verify.
        """
        server_args.sleep_on_idle = True
        if server_args.attention_backend in (None, "intel_amx", "torch_native"):
            server_args.attention_backend = PLATFORM

    def init_backend(self) -> None:
        """Register the attention backend; called once in each worker."""
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        from server_ext.cpu.attention import CpuReferenceAttnBackend

        register_attention_backend(PLATFORM)(CpuReferenceAttnBackend)
        # Tiny tensors: waiting for a second thread costs more than it computes, many times more on a busy machine.
        torch.set_num_threads(1)

    def get_default_attention_backend(self) -> str:
        """Return the name under which `init_backend` registers."""
        return PLATFORM

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        """Return the same backend for the draft: it serves every forward mode."""
        return PLATFORM

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """DFLASH only."""
        return algorithm in _SPECULATIVE_ALGORITHMS

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        """Only the backend of this platform."""
        return algorithm in _SPECULATIVE_ALGORITHMS and backend == PLATFORM

    def supports_speculative_draft_kv_ratio(self) -> bool:
        """The bounded draft pool needs no kernel: writes and reads go by translated slots (asked by our patch)."""
        return True

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        """Return the pool that moves rows natively; only the multi-head kind is served."""
        from server_ext.cpu.kv_pool import CpuMHATokenToKVPool

        return CpuMHATokenToKVPool if kind == "mha" else None

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        """Return the native gather of a verify block's cache locations."""
        return assign_extend_cache_locs

    def support_mamba_cache_extra_buffer(self) -> bool:
        """State snapshots are plain copies here."""
        return True

    def get_device_total_memory(self, device_id: int = 0) -> int:
        """Return the machine's memory in bytes."""
        return int(psutil.virtual_memory().total)

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        """Return the machine's memory in use, in bytes, so that total minus usage is what is free."""
        memory = psutil.virtual_memory()
        return float(memory.total - memory.available)

    def get_device(self, device_id: int = 0) -> str:
        """Return the one CPU device."""
        return "cpu"
