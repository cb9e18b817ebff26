"""Fixtures that share running engines: a start takes half a minute, and two at once do not fit a small machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from server import Server


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


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Shared servers by their options."""
    shared = Servers(tmp_path_factory.mktemp("servers"))
    yield shared
    shared.close()


@pytest.fixture
def server(servers: Servers) -> Server:
    """The server most tests want: the tiny pair ``qwen3`` with DFLASH, all else at its defaults."""
    return servers.get("--pair", "qwen3")


@pytest.fixture
def alone(servers: Servers) -> None:
    """For a test that runs an engine of its own: no shared one beside it."""
    servers.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests recorded with `record_property`."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{report.nodeid}: {name}: {value}")
