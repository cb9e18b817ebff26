"""KV pool without the Triton copy kernel.

SGLang's pool already reads and writes rows by plain indexing on a device it has no kernel for; only moving rows between
slots goes through a pointer-based Triton kernel, which the pool warms up when it is built.
"""

from typing import Any

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


class CpuMHATokenToKVPool(MHATokenToKVPool):
    """`MHATokenToKVPool` that moves rows with tensor indexing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **(kwargs | {"enable_kv_cache_copy": False}))
        self.use_native_move_kv_cache = True
