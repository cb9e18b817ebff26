"""The chart's engine file served for real: the smoke test, probes under load, and the scaling queries on Prometheus."""

import contextlib
import math
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from cached_tools import prometheus
from matrix import HPA, KEDA
from rendering import EXAMPLES, NAMESPACE, engine_yaml, find, manifests, merged, texts
from server import Server, Servers, free_port

RUNNING = EXAMPLES["cpu"]["maxRunningRequests"]
WAITING = 3
SERVICE = "demo-sglang-dflash"
PODS = [("serving", SERVICE, "a"), ("serving", SERVICE, "b"), ("serving", "another", "c"), ("elsewhere", SERVICE, "d")]
PATIENCE_SECONDS = 240.0


@pytest.fixture(scope="module")
def server(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The CPU example, with a key, in the environment that the chart gives the container."""
    servers.close()
    folder = tmp_path_factory.mktemp("served")
    (folder / "engine.yaml").write_text(engine_yaml(EXAMPLES["cpu"]))
    (folder / "key").write_text("the-key\n")
    (container,) = find(manifests(EXAMPLES["cpu"]), "Deployment")["spec"]["template"]["spec"]["containers"]
    environment = {v["name"]: v["value"] for v in container["env"] if v["name"].startswith("SGLANG_")}
    environment = {name: value for name, value in environment.items() if not value.startswith("/")}
    assert environment.keys() == {"SGLANG_PLATFORM", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"}
    server = Server(
        ["--config", str(folder / "engine.yaml"), "--api-key-file", str(folder / "key")],
        folder / "log",
        environment=environment,
        key="the-key",
    )
    with server.started():
        yield server


def scrape_config(server: Server) -> dict[str, Any]:
    """The configuration of Prometheus for one server behind four pods, labelled as the monitor does it."""
    monitor = find(manifests(merged(KEDA, {"monitoring": {"monitor": {"create": "always"}}})), "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    relabelings = [
        {"action": step["action"], "target_label": step["targetLabel"], "replacement": step["replacement"]}
        for step in endpoint["relabelings"]
    ]
    jobs = []
    for namespace, service, pod in PODS:
        target = {"targets": [f"127.0.0.1:{server.port}"], "labels": {"namespace": namespace, "pod": pod}}
        other = {"target_label": "service", "replacement": service}
        steps = relabelings if service == SERVICE else [*relabelings, other]
        jobs.append(
            {
                "job_name": f"{namespace}-{pod}",
                "metrics_path": endpoint["path"],
                "scrape_interval": "1s",
                "static_configs": [target],
                "relabel_configs": steps,
            }
        )
    return {"scrape_configs": jobs}


@pytest.fixture(scope="module")
def prometheus_url(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prometheus that scrapes the server."""
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    (folder / "prometheus.yml").write_text(yaml.safe_dump(scrape_config(server)))
    command = [
        prometheus() / "prometheus",
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/db",
    ]
    command += [f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def load(server: Server) -> Iterator[None]:
    """More long requests than may run at a time, until the last test is done."""
    done = threading.Event()

    # All that run fit the pool together, or the engine would take some of them out again.
    sampling = {"max_new_tokens": 6000, "ignore_eos": True}

    def ask(number: int) -> None:
        body = {"text": f"{number} The river", "sampling_params": sampling, "stream": True}
        url, headers = f"{server.url}/generate", server.headers
        while not done.is_set():
            with (
                contextlib.suppress(requests.RequestException),
                requests.post(url, json=body, headers=headers, stream=True, timeout=600) as answer,
            ):
                for _ in answer.iter_lines():
                    if done.is_set():
                        return

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(RUNNING + WAITING)]
    for thread in threads:
        thread.start()
    yield
    done.set()
    for thread in threads:
        thread.join()


def value(url: str, query: str) -> float:
    """Return the one value of an instant query; NaN while Prometheus or the series are not there yet."""
    try:
        answer = requests.get(f"{url}/api/v1/query", params={"query": query}, timeout=30)
    except requests.ConnectionError:
        return math.nan
    if answer.status_code == 503:
        return math.nan
    assert answer.status_code == 200, answer.text
    results = answer.json()["data"]["result"]
    assert len(results) <= 1, results
    return float(results[0]["value"][1]) if results else math.nan


def settled(url: str, query: str, expected: float) -> float:
    """Return the query's value as soon as it is as expected, or its last one."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (seen := value(url, query)) != expected and time.monotonic() < deadline:
        time.sleep(0.5)
    return seen


def keda_query() -> str:
    (trigger,) = find(manifests(KEDA), "ScaledObject")["spec"]["triggers"]
    return str(trigger["metadata"]["query"])


def adapter_rule() -> dict[str, Any]:
    text = find(manifests(HPA), "ConfigMap", "-prometheus-adapter")["data"]["external-rules.yaml"]
    (rule,) = yaml.safe_load(text)
    return rule


def hpa_query() -> str:
    """The query that prometheus-adapter makes of its rule for the metric and selector of the HPA."""
    rule, autoscaler = adapter_rule(), find(manifests(HPA), "HorizontalPodAutoscaler")
    (metric,) = autoscaler["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] == rule["name"]["as"]
    labels = {"namespace": NAMESPACE} | metric["external"]["metric"]["selector"]["matchLabels"]
    matchers = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return str(rule["metricsQuery"]).replace("<<.LabelMatchers>>", matchers)


def smoke(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run what the pod of `helm test` runs."""
    (container,) = find(manifests(EXAMPLES["cpu"]), "Pod")["spec"]["containers"]
    command, (script, address, *more) = container["command"], container["args"]
    assert command == ["python3", "-c"] and address == f"http://{SERVICE}:80"
    arguments = (sys.executable, "-c", script, url, *more, *arguments)
    return subprocess.run(arguments, capture_output=True, text=True, timeout=300)


def test_the_engine_says_the_request_cap_of_the_notes(server: Server) -> None:
    (line,) = re.findall(
        r"DFLASH draft KV pool: window=64, ratio=0.25, tokens=(\d+) \(request cap (\d+),", server.output()
    )
    assert f"can hold {line[1]} of its tokens" in texts(EXAMPLES["cpu"])["sglang-dflash/templates/NOTES.txt"]
    assert int(line[0]) >= int(line[1])


def test_helm_test_passes(server: Server, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("the-key\n")
    result = smoke(server.url, f"--api-key-file={key}")
    assert result.returncode == 0, result.stdout + result.stderr
    assert [line.partition(":")[0] for line in result.stdout.splitlines()] == [
        "models",
        "completion",
        "stream",
        "metrics",
    ]


def test_helm_test_fails_with_one_line(server: Server) -> None:
    result = smoke(server.url)
    assert result.returncode == 1 and "/v1/models: HTTP Error 401" in result.stderr and result.stderr.count("\n") == 1
    result = smoke(f"http://127.0.0.1:{free_port()}")
    assert result.returncode == 1 and "Connection refused" in result.stderr and result.stderr.count("\n") == 1


# What Prometheus 2 and 3 ask for, and what curl does.
ACCEPTED = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,*/*;q=0.1",
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.2",
    "*/*",
)


@pytest.mark.parametrize("accept", ACCEPTED)
def test_metrics_have_one_name_whoever_asks(server: Server, accept: str) -> None:
    answer = requests.get(f"{server.url}/metrics", headers={"Accept": accept}, timeout=60)
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert "\nsglang:num_running_reqs{" in answer.text


def test_scaling_queries_count_running_and_waiting_requests(server: Server, prometheus_url: str, load: None) -> None:
    """Both pods of the service, once each, and nobody else's."""
    each = RUNNING + WAITING
    assert settled(prometheus_url, "sum(sglang:num_running_reqs + sglang:num_queue_reqs)", each * len(PODS)) > 0
    assert settled(prometheus_url, keda_query(), 2 * each) == 2 * each
    assert settled(prometheus_url, hpa_query(), 2 * each) == 2 * each
    assert settled(prometheus_url, 'sum(max by (pod) (sglang:num_queue_reqs{pod="a"}))', WAITING) == WAITING


def test_the_adapter_finds_its_series(server: Server, prometheus_url: str) -> None:
    assert settled(prometheus_url, f"count({keda_query()})", 1) == 1
    found = requests.get(
        f"{prometheus_url}/api/v1/series", params={"match[]": adapter_rule()["seriesQuery"]}, timeout=30
    ).json()["data"]
    assert {(s["namespace"], s["service"], s["pod"], s["release"]) for s in found} == {(*pod, "demo") for pod in PODS}


def test_probes_pass_while_the_engine_is_busy(server: Server, load: None) -> None:
    (container,) = find(manifests(EXAMPLES["cpu"]), "Deployment")["spec"]["template"]["spec"]["containers"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        for _ in range(3):
            get = container[probe]["httpGet"]
            timeout = container[probe]["timeoutSeconds"]
            assert requests.get(f"{server.url}{get['path']}", timeout=timeout).status_code == 200, probe


def test_ranks_and_priorities_count_once(tmp_path: Path) -> None:
    """What one CPU server cannot show: tensor-parallel ranks that repeat a figure, data-parallel ranks, priorities."""

    def series(metric: str, number: int, **labels: str) -> dict[str, str]:
        labels = {"namespace": NAMESPACE, "service": SERVICE, "pod": "a", "tp_rank": "0"} | labels
        text = ",".join(f'{name}="{value}"' for name, value in labels.items())
        return {"series": f"sglang:{metric}{{{text}}}", "values": str(number)}

    given = [
        series("num_running_reqs", 5),
        series("num_running_reqs", 5, tp_rank="1"),
        series("num_running_reqs", 3, priority="1"),
        series("num_running_reqs", 100, service="another"),
        series("num_running_reqs", 1, pod="b", dp_rank="0"),
        series("num_running_reqs", 2, pod="b", dp_rank="1"),
        series("num_queue_reqs", 7),
        series("num_queue_reqs", 7, tp_rank="1"),
        series("num_queue_reqs", 0, pod="b", dp_rank="0"),
        series("num_queue_reqs", 4, pod="b", dp_rank="1"),
    ]
    right = [{"labels": "{}", "value": 5 + 1 + 2 + 7 + 0 + 4}]
    tests = [{"expr": query, "eval_time": "0s", "exp_samples": right} for query in (keda_query(), hpa_query())]
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"tests": [{"interval": "1m", "input_series": given, "promql_expr_test": tests}]}))
    result = subprocess.run([prometheus() / "promtool", "test", "rules", file], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
