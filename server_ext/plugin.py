"""Entry point ``sglang.srt.plugins``: called once in each engine process, before the engine starts."""


def load() -> None:
    """Register the hooks of this package with SGLang's `HookRegistry`."""
    from sglang.srt.platforms import current_platform

    from server_ext.cpu.platform import CpuReferencePlatform

    if isinstance(current_platform, CpuReferencePlatform):
        from server_ext.cpu import launches

        launches.register()
