"""Fixtures of all suites. Running servers are shared: a start takes half a minute."""

from collections.abc import Iterator

import pytest

from server import Server, Servers


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
