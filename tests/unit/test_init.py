"""Process 1 of a container, in a process namespace of its own."""

import subprocess
import sys

import psutil
import pytest

# The launcher's place: says that it runs, leaves an orphan behind that ends, then waits for a signal.
_PROGRAM = """
import os, signal, sys, time
from server_ext import init
if sys.argv[1] == "with":
    init.leave_process_one()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
if os.fork() == 0:
    if os.fork() == 0:
        time.sleep(0.2)
        os._exit(0)
    os._exit(0)
os.wait()
time.sleep(1)
processes = [name for name in os.listdir("/proc") if name.isdecimal()]
states = [open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[0] for name in processes]
print("zombies", states.count("Z"), flush=True)
time.sleep(60)
"""


def launched(how: str) -> subprocess.Popen[str]:
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"]
    return subprocess.Popen(
        [*command, sys.executable, "-c", _PROGRAM, how], stdout=subprocess.PIPE, text=True, start_new_session=True
    )


@pytest.mark.parametrize(("how", "zombies"), [("with", 0), ("without", 1)])
def test_orphans_are_taken_in(how: str, zombies: int) -> None:
    with launched(how) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"zombies {zombies}\n"
        process.kill()


def test_a_signal_reaches_the_launcher_whose_status_is_the_containers() -> None:
    with launched("with") as process:
        assert process.stdout is not None
        process.stdout.readline()
        (first,) = psutil.Process(process.pid).children()
        first.terminate()
        assert process.wait(30) == 7
