"""What process 1 of a container owes the others: it passes signals on and takes in orphans.

A process whose parent is gone becomes a child of process 1 and stays a zombie until that one waits for it. A launcher
that has processes of its own to wait for cannot do so for strangers, so it moves to a child.
"""

import os
import signal
from types import FrameType
from typing import NoReturn

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def leave_process_one() -> None:
    """Return in a child if this process has the id 1, which then ends as the child does; elsewhere do nothing."""
    if os.getpid() != 1:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    child = os.fork()
    if child == 0:
        os.setsid()  # a terminal would send Ctrl-C to both
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        return
    _attend(child)


def _attend(child: int) -> NoReturn:
    def forward(signum: int, _: FrameType | None) -> None:
        os.kill(child, signum)

    for signum in _FORWARDED:
        signal.signal(signum, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
