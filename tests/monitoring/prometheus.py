"""A real Prometheus for the tests, which says what it scrapes as the chart's monitors do."""

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import requests

import cached_tools
from server import free_port

NAMESPACE, RELEASE = "serving", "demo"
SCRAPE_SECONDS = 1
PATIENCE_SECONDS = 240.0

Series = dict[str, Any]


class Prometheus:
    """A Prometheus that loads one rule file and scrapes what it is told to.

    Each target has the labels that a scrape through the chart's monitors gives it; its service is its name here.
    """

    def __init__(self, folder: Path, rules: str) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self._folder = folder
        self._targets: dict[str, int] = {}
        (folder / "rules.yaml").write_text(rules)
        interval = f"{SCRAPE_SECONDS}s"
        discovery = {"files": [f"{folder}/targets.json"], "refresh_interval": "1s"}
        config = {
            "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": "1s"},
            "rule_files": [f"{folder}/rules.yaml"],
            "scrape_configs": [{"job_name": "engine", "file_sd_configs": [discovery]}],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        self._write_targets()

    def __enter__(self) -> Self:
        command = [cached_tools.prometheus() / "prometheus", f"--web.listen-address={self.url.removeprefix('http://')}"]
        command += [f"--config.file={self._folder}/prometheus.yml", f"--storage.tsdb.path={self._folder}/data"]
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen([str(word) for word in command], stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            with contextlib.suppress(requests.ConnectionError):
                if requests.get(f"{self.url}/-/ready", timeout=10).ok:
                    return self
            assert self._process.poll() is None and time.monotonic() < deadline, self.output()
            time.sleep(0.1)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()

    def output(self) -> str:
        """Return its log."""
        return (self._folder / "prometheus.log").read_text()

    @contextlib.contextmanager
    def scraping(self, service: str, port: int) -> Iterator[None]:
        """Scrape a server under a name; once a scrape has worked the context begins."""
        self._targets[service] = port
        self._write_targets()
        self.wait_for(f'up{{service="{service}"}} == 1')
        yield
        del self._targets[service]
        self._write_targets()

    def _write_targets(self) -> None:
        targets = [
            {
                "targets": [f"127.0.0.1:{port}"],
                "labels": {"namespace": NAMESPACE, "release": RELEASE, "service": service, "pod": f"{service}-0"},
            }
            for service, port in self._targets.items()
        ]
        new = self._folder / "targets.new"
        new.write_text(json.dumps(targets))
        new.rename(self._folder / "targets.json")

    def _get(self, path: str, **parameters: Any) -> list[Series]:
        answer = requests.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=60)
        assert answer.ok, f"{parameters.get('query')}: {answer.text}"
        data: list[Series] = answer.json()["data"]["result"]
        return data

    def instant(self, query: str, at: float | None = None) -> list[Series]:
        """Return the series of a query at a Unix time, or now. Raises AssertionError if Prometheus refuses it."""
        return self._get("query", query=query, **({} if at is None else {"time": at}))

    def over(self, query: str, start: float, end: float) -> list[Series]:
        """Return the series of a query between two Unix times, each second."""
        return self._get("query_range", query=query, start=start, end=end, step=1)

    def wait_for(self, query: str) -> None:
        """Wait until a query has a series."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.instant(query):
            assert time.monotonic() < deadline, f"no series: {query}\n{self.instant('ALERTS')}"
            time.sleep(0.2)
