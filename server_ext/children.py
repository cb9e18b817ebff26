"""Ties every process that an engine process spawns to its parent's life.

SGLang's workers ask the kernel to kill them when their parent dies, but only after an import of many seconds; a parent
that dies before that leaves them running. They also stand in the terminal's foreground group: Ctrl-C reaches them
directly and ends them in the middle of the requests that the parent still drains. Both are settled here before
anything is imported.
"""

import ctypes
import os
import signal

from server_ext.hooks import Hook

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def bind_to_parent(parent_pid: int) -> None:
    """Die with the process `parent_pid` and leave SIGINT and SIGTERM to it. Runs first thing in a spawned process."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _with_binding(command: list[str], **_: object) -> list[str]:
    """Put the call of `bind_to_parent` before the program in a ``python -c PROGRAM`` command line."""
    program = command.index("-c") + 1
    bound = f"from server_ext.children import bind_to_parent; bind_to_parent({os.getpid()}); {command[program]}"
    return [*command[:program], bound, *command[program + 1 :]]


HOOKS = (Hook("multiprocessing.spawn.get_command_line", _with_binding, "after"),)
"""Bind every process that this one spawns through `multiprocessing`."""
