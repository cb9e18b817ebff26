"""Entry point ``sglang.srt.plugins``: called once in each engine process, before the engine starts."""

import logging
import os
import sys

logger = logging.getLogger(__name__)

BEST_EFFORT_VARIABLE = "SGLANG_DFLASH_METRICS_BEST_EFFORT"
"""Set to 1 to serve without pool metrics when their hooks do not fit the installed SGLang."""

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

    from server_ext import children, hooks, refusal
    from server_ext.cpu.platform import CpuReferencePlatform

    hooks.apply(children.HOOKS)
    if isinstance(current_platform, CpuReferencePlatform):
        from server_ext.cpu import gdn_launches, launches, model_rules, seeds, substitutes  # noqa: F401

        hooks.apply(substitutes.HOOKS)
    # In the scheduler's process, where this is called from that module; others would only pay for the import.
    if "sglang.srt.managers.scheduler" in sys.modules:
        hooks.apply(refusal.WORKER_HOOKS)
        _watch_pools()


def _watch_pools() -> None:
    from server_ext import hooks, metrics
    from server_ext.watch import Watch

    watch = Watch()
    try:
        hooks.apply(watch.hooks())
    except RuntimeError as error:
        if os.environ.get(BEST_EFFORT_VARIABLE) != "1":
            raise
        logger.error("no pool metrics: %s", error)
        watch.stop()
        metrics.report_down()
