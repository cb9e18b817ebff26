"""Runs ``sglang-dflash serve`` for tests: starts it, waits until it is ready, stops it, and sees that nothing is left.

    with Server(["--pair", "qwen3", "--page-size", "64"], tmp_path / "log").started() as server:
        server.client().models.list()

Each server runs in a session of its own, as from a terminal of its own, so that a process it leaves behind can be told
from everything else on the machine. Tests share them: use the fixtures of ``conftest.py``.
"""

import contextlib
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import openai
import psutil

COMMAND = (str(Path(sys.executable).parent / "sglang-dflash"), "serve")
READY = "Ready after"
# SGLang counts every slot of every pool, while it works and when it is idle, and ends if the books do not balance.
STRICT_CHECKS = {
    "SGLANG_INVARIANT_CHECK": "2",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK": "1",
}
START_TIMEOUT_SECONDS = 420.0
STOP_TIMEOUT_SECONDS = 120.0
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_PORTS = itertools.count(10000 + 4000 * _WORKER + random.SystemRandom().randrange(2000))


def free_port() -> int:
    """Return a port of 127.0.0.1 that nothing listens on, and that nothing takes before an engine does, 20 s later.

    It is below those the system gives to outgoing connections, and apart from those of the other test processes; the
    gap between two processes has room for the port up to 1000 higher at which an engine meets its peers.
    """
    for port in _PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no end of ports")


class Server:
    """One ``serve`` process and everything it starts.

    `arguments` are its options without ``--port``. `environment` is laid over this process's own. `command` is what
    runs instead of this environment's ``sglang-dflash serve``, with the port as `port_option` has it. `key` is what
    `client` and `headers` send. With `strict` the engine checks its memory pools at every step.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] = COMMAND,
        port_option: str = "--port={}",
        key: str | None = None,
        strict: bool = True,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self.key = key
        self._command = [*command, *arguments, port_option.format(self.port)]
        self._environment = {**os.environ, **(STRICT_CHECKS if strict else {}), **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The launcher."""
        assert self._process is not None, "start() first"
        return self._process

    def start(self) -> Self:
        """Start the launcher without waiting."""
        assert self._process is None
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self._environment,
                start_new_session=True,
            )
        return self

    def output(self) -> str:
        """Return what the server has printed and logged so far."""
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str, timeout_seconds: float = START_TIMEOUT_SECONDS) -> None:
        """Wait until the output holds `text`; fail with the end of the output if the launcher dies or is too slow."""
        deadline = time.monotonic() + timeout_seconds
        while text not in self.output():
            if self.process.poll() is not None:
                raise AssertionError(f"exit status {self.process.returncode} before {text!r}:\n{self.output()[-5000:]}")
            if time.monotonic() > deadline:
                raise AssertionError(f"no {text!r} within {timeout_seconds:g} s:\n{self.output()[-5000:]}")
            time.sleep(0.1)

    def wait_until_ready(self) -> Self:
        """Wait for the announcement that the server takes requests."""
        self.wait_for(READY)
        return self

    def processes(self) -> list[psutil.Process]:
        """Return the launcher and all it has started that still run, orphans included."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def signal(self, signum: int, *, group: bool = False) -> None:
        """Send a signal to the launcher, or with `group` to all its processes as a terminal does on Ctrl-C."""
        (os.killpg if group else os.kill)(self.process.pid, signum)

    def wait(self) -> int:
        """Wait for the launcher to exit, see that no process is left, and return the exit status."""
        status = self.process.wait(STOP_TIMEOUT_SECONDS)
        deadline = time.monotonic() + 10  # the kernel takes a moment to end killed processes
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, f"still running after the launcher's exit with status {status}: {left}"
        return status

    def stop(self) -> int:
        """Stop the server with SIGTERM and return its exit status."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """End every process of the server, whatever state it is in."""
        for process in self.processes() if self._process else []:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def client(self) -> openai.OpenAI:
        """Return OpenAI's client for this server, without retries so that each error shows."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key or "none", max_retries=0)

    @property
    def headers(self) -> dict[str, str]:
        """The headers that raw requests need."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    @contextlib.contextmanager
    def started(self) -> Iterator[Self]:
        """Start, wait until ready, and at the end stop with status 0; a failure inside ends all processes at once."""
        with self:
            yield self.wait_until_ready()
            assert self.stop() == 0, self.output()[-5000:]

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()


class Servers:
    """Keeps the server that was asked for last; the next request with other options stops it first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started = 0
        self._current: tuple[tuple[str, ...], Server] | None = None

    def get(self, *arguments: str) -> Server:
        """Return a ready server with these options, the running one if its options are the same and it still runs."""
        if self._current is not None:
            running_arguments, server = self._current
            if running_arguments == arguments and server.process.poll() is None:
                return server
            self.close()
        self._started += 1
        server = Server(arguments, self._folder / f"server-{self._started}.log")
        self._current = (arguments, server.start())
        return server.wait_until_ready()

    def close(self) -> None:
        """Stop the running server, if there is one. Call this before a test that runs an engine of its own."""
        if self._current is None:
            return
        _, server = self._current
        self._current = None
        try:
            assert server.stop() == 0, server.output()[-5000:]
        finally:
            server.kill()
