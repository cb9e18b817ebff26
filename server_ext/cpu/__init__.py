"""CPU reference platform for SGLang: the real engine on a machine without a GPU.

For development, tests and demonstration: it runs SGLang's scheduler, memory pools, prefix cache and speculative workers
unchanged and replaces only what needs a GPU kernel, in plain torch. It is written to be read and to be right (greedy
text equals Hugging Face), not to be fast.

What it does not cover: more than one rank, CUDA graphs, quantised weights or KV, MLA, mixture of experts, LoRA,
multimodal inputs, and any attention with sinks or a soft cap.
"""

import os

PLATFORM = "cpu_reference"
_PLATFORM_CLASS = "server_ext.cpu.platform.CpuReferencePlatform"


def activate() -> str | None:
    """Entry point ``sglang.srt.platforms``: the platform's class path, or None beside a CUDA device.

    A CUDA device always wins unless ``SGLANG_PLATFORM=cpu_reference`` asks for this platform by name.
    """
    if os.environ.get("SGLANG_PLATFORM") == PLATFORM:
        return _PLATFORM_CLASS
    import torch

    return None if torch.cuda.is_available() else _PLATFORM_CLASS
