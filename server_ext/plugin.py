"""Entry point ``sglang.srt.plugins``: called once in each engine process, before the engine starts."""

loaded = False
"""Whether `load` has run through in this process; SGLang only logs a plugin that fails."""


def load() -> None:
    """Apply the hooks of this package through SGLang's `HookRegistry`."""
    global loaded

    from sglang.srt.platforms import current_platform

    from server_ext import children, hooks
    from server_ext.cpu.platform import CpuReferencePlatform

    hooks.apply(children.HOOKS)
    if isinstance(current_platform, CpuReferencePlatform):
        from server_ext.cpu import gdn_launches, launches, model_rules, substitutes  # noqa: F401

        hooks.apply(substitutes.HOOKS)
    loaded = True
