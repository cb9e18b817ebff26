"""compose.yaml under podman-compose, with the real engine and a real Prometheus.

The images of Prometheus and Grafana cannot be had here. In their place stand Debian's Prometheus, started as its image
does it, and for Grafana a container that looks at what Grafana would find: sources, dashboards, and answers to queries.
"""

import contextlib
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml
from container_tools import COMPOSE, PYTHON, REPOSITORY, Containers

import cached_tools
from boards import BOARDS, ELSEWHERE, queries
from cluster import eventually, in_network_of

SERVICES: dict[str, Any] = yaml.safe_load((REPOSITORY / "compose.yaml").read_text())["services"]
# As the images of the two have it: entry point, arguments, user.
STAND_INS = {
    "prometheus": [
        "COPY prometheus /bin/prometheus",
        "RUN mkdir /prometheus && chown 65534 /prometheus",
        "USER 65534",
        'ENTRYPOINT ["/bin/prometheus"]',
        'CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]',
    ],
    "grafana": ["USER 472", 'ENTRYPOINT ["sleep", "infinity"]'],
}
LABELS = {"namespace": "compose", "release": "laptop"}


@pytest.fixture(scope="module")
def grafana(containers: Containers, cpu: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """The project, up in a network namespace of its own, where this thread is, too: the machine's has no part in it.

    Returns what runs a command in Grafana's container.
    """
    for service, lines in STAND_INS.items():
        folder = tmp_path_factory.mktemp(service)
        shutil.copy2(cached_tools.prometheus() / "prometheus", folder / "prometheus")
        (folder / "Dockerfile").write_text("\n".join([f"FROM {PYTHON} AS made", *lines]) + "\n")
        result = containers.build("made", SERVICES[service]["image"], context=folder)
        assert result.returncode == 0, result.stderr
    with subprocess.Popen(["unshare", "--net", "sleep", "infinity"]) as holder:
        try:
            eventually(lambda: Path(f"/proc/{holder.pid}/comm").read_text() == "sleep\n", "a network namespace", 10)
            with in_network_of(holder.pid):
                containers.run("ip", "link", "set", "lo", "up")
                try:
                    containers.run(COMPOSE, "up", "--detach", cwd=REPOSITORY)
                    yield lambda *command: containers.podman("exec", "sglang-dflash_grafana_1", *command)
                finally:
                    containers.run(COMPOSE, "down", "--volumes", cwd=REPOSITORY)
        finally:
            holder.kill()


def asked(path: str, **parameters: str) -> Any:
    """Return what Prometheus answers, None while it does not."""
    with contextlib.suppress(httpx.TransportError):
        answer = httpx.get(f"http://127.0.0.1:9090/api/v1/{path}", params=parameters, timeout=60)
        return answer.json()["data"] if answer.status_code == 200 else None


def test_the_engine_answers_and_the_dashboards_have_its_figures(grafana: Callable[..., str]) -> None:
    def ready() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get("http://127.0.0.1:30000/ready").status_code == 200
        return False

    eventually(ready, "the engine is ready")
    wanted = [query for query in queries() if query.board == "pools" and query.name not in ELSEWHERE]
    client = openai.OpenAI(base_url="http://127.0.0.1:30000/v1", api_key="none")

    def empty() -> list[str]:
        answer = client.chat.completions.create(
            model="qwen3", messages=[{"role": "user", "content": "Tell me about the river."}], max_tokens=400
        )
        assert answer.choices[0].message.content
        asking = {query.name: query.asked(LABELS, rate_interval="20s", range_="60s") for query in wanted}
        return [name for name, query in asking.items() if not (asked("query", query=query) or {}).get("result")]

    eventually(lambda: not empty(), "every query of the pools dashboard has data")


def test_prometheus_has_the_chart_s_rules(grafana: Callable[..., str]) -> None:
    rules = yaml.safe_load((REPOSITORY / "charts/sglang-dflash/rules/alerts.yaml").read_text())
    expected = {rule.get("alert") or rule["record"] for group in rules["groups"] for rule in group["rules"]}
    loaded = eventually(lambda: asked("rules"), "Prometheus answers")
    assert {rule["name"] for group in loaded["groups"] for rule in group["rules"]} == expected


def test_grafana_finds_its_source_and_the_dashboards(grafana: Callable[..., str]) -> None:
    provisioning = "/etc/grafana/provisioning"
    (source,) = yaml.safe_load(grafana("cat", f"{provisioning}/datasources/prometheus.yaml"))["datasources"]
    script = f"import urllib.request as r; print(r.urlopen('{source['url']}/-/ready').status)"
    assert (source["type"], grafana("python3", "-c", script)) == ("prometheus", "200\n")
    (provider,) = yaml.safe_load(grafana("cat", f"{provisioning}/dashboards/chart.yaml"))["providers"]
    folder = provider["options"]["path"]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert json.loads(grafana("cat", home)) == BOARDS["overview"]
    assert set(grafana("ls", folder).split()) == {f"{board}.json" for board in BOARDS}


def test_only_this_machine_reaches_it() -> None:
    published = [port for service in SERVICES.values() for port in service["ports"]]
    assert published and all(port.startswith("127.0.0.1:") for port in published)
