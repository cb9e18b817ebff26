"""Entry point ``sglang.srt.plugins``: called once in each engine process, before the engine starts."""

import logging

logger = logging.getLogger(__name__)

loaded = False
"""Whether `load` has run in this process; ``SGLANG_PLUGINS`` can leave it out."""


def load() -> None:
    """Apply the hooks of this package, or end the process: SGLang would log the failure and serve without them."""
    global loaded
    try:
        _apply_hooks()
    except Exception as error:
        logger.exception("the plugin sglang_dflash failed")
        raise SystemExit(f"the plugin sglang_dflash failed: {error}") from error
    loaded = True


def _apply_hooks() -> None:
    from sglang.srt.platforms import current_platform

    from server_ext import children, hooks
    from server_ext.cpu.platform import CpuReferencePlatform

    hooks.apply(children.HOOKS)
    if isinstance(current_platform, CpuReferencePlatform):
        from server_ext.cpu import gdn_launches, launches, model_rules, seeds, substitutes  # noqa: F401

        hooks.apply(substitutes.HOOKS)
