"""Options that SGLang refuses: one line that says why, whichever process finds out, and exit status 2.

Much is checked only in the scheduler's process, above all the sizes of pools, which depend on the weights and on free
memory. SGLang logs a stack trace there and kills its parent, whose exit status then says nothing.
"""

import logging
import sys
from collections.abc import Callable
from typing import Any

from server_ext.errors import UserError
from server_ext.hooks import Hook

logger = logging.getLogger(__name__)

PROGRAM = "sglang-dflash serve"
EXIT_STATUS = 2


def refused(error: Exception) -> UserError:
    """Return what SGLang raised about its options as one line; at log level debug the stack trace is logged too."""
    logger.debug("SGLang refused the options", exc_info=error)
    lines = str(error).strip().splitlines() or [repr(error)]
    return UserError(f"SGLang refuses these options: {lines[0]}")


def report(error: UserError) -> None:
    """Print the line."""
    print(f"{PROGRAM}: error: {error}", file=sys.stderr, flush=True)


def _build(init: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    try:
        init(*args, **kwargs)
    except ValueError as error:
        report(refused(error))
        raise SystemExit(EXIT_STATUS) from error


def _follow(died: Callable[..., RuntimeError], rank: int, process: Any) -> RuntimeError:
    process.join(timeout=10)
    if process.exitcode == EXIT_STATUS:
        raise SystemExit(EXIT_STATUS)
    return died(rank, process)


WORKER_HOOKS = (Hook("sglang.srt.managers.scheduler.Scheduler.__init__", _build, "around"),)
"""For the scheduler's process: leave with `EXIT_STATUS` instead of a stack trace."""

LAUNCHER_HOOKS = (Hook("sglang.srt.entrypoints.engine._scheduler_died_error", _follow, "around"),)
"""For the launcher: leave with the same status when a worker has said why."""
