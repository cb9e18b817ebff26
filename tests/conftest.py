"""Fixtures of all suites. Running servers are shared: a start takes half a minute."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from server import Server, Servers


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the acceptance suite, which ``make accept`` passes, and of the monitoring suite."""
    group = parser.getgroup("acceptance suite (tests/accept)")
    group.addoption("--url", help="a running server; without it the suite launches tiny pairs")
    group.addoption("--min-accept-length", type=float, default=2.0, help="tokens a verify step (default: 2)")
    group.addoption("--min-gsm8k", type=float, help="share of right answers; without it GSM8K is left out")
    group.addoption("--gsm8k-questions", type=int, default=200, help="how many questions (default: 200)")
    group.addoption("--gsm8k-data", type=Path, help="the test set as JSON lines; downloaded if not given")
    monitoring = parser.getgroup("monitoring suite (tests/monitoring)")
    monitoring.addoption("--pictures", type=Path, help="where to draw the dashboards; without it they do not last")


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
