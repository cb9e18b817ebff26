"""Metrics, ``/pools`` and ``status`` of a served pair: what a person, Prometheus and its tools get to see."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import requests
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from cached_tools import prometheus
from server import Server, Servers, free_port
from server_ext import metrics
from server_ext.pools import Config, Pool, PoolConfig, Snapshot
from server_ext.watch import EXPORT_SECONDS
from test_draft_kv_ratio import diary

KEY = "secret-of-this-test"
SCRAPES = 60


@pytest.fixture(scope="module")
def server(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    servers.close()
    options = ["--pair", "qwen3", "--speculative-draft-kv-ratio", "0.25"]
    log = tmp_path_factory.mktemp("metrics") / "log"
    with Server(options, log, environment={"SGLANG_API_KEY": KEY}, key=KEY, strict=False).started() as server:
        generate(server, 0, 64)
        yield server


def generate(server: Server, writer: int, tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": diary(writer, 40), "rid": f"request-of-{writer}-{time.time()}", "sampling_params": sampling}
    answer = requests.post(f"{server.url}/generate", json=body, headers=server.headers, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json()


def scraped(server: Server) -> dict[str, Metric]:
    text = requests.get(f"{server.url}/metrics", timeout=60).text
    return {family.name: family for family in text_string_to_metric_families(text)}


def get(server: Server, path: str) -> dict[str, Any]:
    answer = requests.get(server.url + path, headers=server.headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_table_is_what_a_server_exports(server: Server) -> None:
    expected = {metric.name.removesuffix("_total") for metric in metrics.METRICS}
    deadline = time.monotonic() + 60  # what the last request did is written at the next turn
    while not (families := scraped(server)).keys() >= expected and time.monotonic() < deadline:
        time.sleep(0.1)
    (of_sglang,) = families["sglang:max_total_num_tokens"].samples

    assert {name for name in families if name.startswith(metrics.PREFIX)} == expected
    for metric in metrics.METRICS:
        family = families[metric.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind, metric.text)
        for sample in family.samples:
            own = {label: value for label, value in sample.labels.items() if label != "le"}
            assert own.keys() == of_sglang.labels.keys() | set(metric.labels)
            assert own.items() >= of_sglang.labels.items(), "labels of SGLang's own values"
            assert "request-of" not in str(own), "no label may carry what a client sends"


def test_promtool_finds_nothing_but_sglangs_colons(server: Server, record_property: Any) -> None:
    text = requests.get(f"{server.url}/metrics", timeout=60).content
    result = subprocess.run(
        [prometheus() / "promtool", "check", "metrics"], input=text, capture_output=True, timeout=60
    )
    complaints = (result.stdout + result.stderr).decode().splitlines()

    record_property("complaints_about_sglang", len(complaints))
    assert complaints and [line for line in complaints if not line.startswith("sglang:")] == []


def test_quiet_metrics_are_the_snapshot(server: Server) -> None:
    generate(server, 1, 200)
    snapshot = get(server, "/pools")["schedulers"][0]
    update_time = f"{metrics.PREFIX}update_timestamp_seconds"
    while (families := scraped(server))[update_time].samples[0].value <= snapshot["unix_time_seconds"]:
        time.sleep(EXPORT_SECONDS / 10)

    found = [sample for family in families.values() for sample in family.samples]
    exported = {(sample.name, sample.labels.get("pool")): sample.value for sample in found}
    for pool in snapshot["pools"]:
        assert pool["used_slots"] + pool["evictable_slots"] + pool["free_slots"] == pool["size_slots"]
        for figure in ("size", "used", "evictable", "free", "high_water"):
            assert exported[f"{metrics.PREFIX}pool_{figure}_slots", pool["name"]] == pool[f"{figure}_slots"]
    speculation = snapshot["speculation"]
    assert exported[f"{metrics.PREFIX}verify_steps_total", None] == speculation["verify_steps_total"]
    assert exported["sglang:spec_verify_calls_total", None] == speculation["verify_steps_total"]


def test_pools_and_their_configuration(server: Server) -> None:
    (snapshot,), (config,) = (get(server, path)["schedulers"] for path in ("/pools", "/pools/config"))
    (line,) = re.findall(r"DFLASH draft KV pool: .*", server.output())
    tokens, cap, prefixes = map(int, re.findall(r"tokens=(\d+) \(request cap (\d+), (\d+) cached", line)[0])

    assert [pool["name"] for pool in snapshot["pools"]] == ["full", "draft"]
    full, draft = config["pools"]
    assert (full["size_slots"], draft["size_slots"]) == (65536, 16384) == (65536, tokens)
    assert (draft["request_cap_slots"], draft["cacheable_prefixes"]) == (cap, prefixes)
    assert draft["headroom_slots"] == tokens - cap
    total_gib = scraped(server)["sglang:kv_cache_memory_usage_gb"].samples[0].value
    assert full["size_bytes"] + draft["size_bytes"] == pytest.approx(total_gib * 2**30)
    keys = ("draft_kv_ratio", "draft_window_tokens", "block_size_tokens", "page_size_tokens", "max_running_requests")
    assert [config[key] for key in keys] == [0.25, 64, 8, 1, 8]
    assert re.fullmatch(r"[0-9a-f]{64}", config["patch_series"])


def test_the_schema_names_every_field(server: Server) -> None:
    schema = get(server, "/openapi.json")
    for path, model in (("/pools", "Pools"), ("/pools/config", "Configs")):
        content = schema["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]
        assert content["schema"] == {"$ref": f"#/components/schemas/{model}"}
    for model in (Snapshot, Pool, Config, PoolConfig):
        properties = schema["components"]["schemas"][model.__name__]["properties"]
        assert list(properties) == [field.name for field in fields(model)]


@pytest.mark.parametrize("path", ["/pools", "/pools/config"])
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}], ids=["no key", "wrong key"])
def test_the_pools_are_behind_the_key(server: Server, path: str, headers: dict[str, str]) -> None:
    assert requests.get(server.url + path, headers=headers, timeout=60).status_code == 401


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/pools?dp_rank=one", 400),
        ("GET", "/pools?dp_rank=-1", 400),
        ("GET", "/pools?dp_rank=1", 404),
        ("GET", "/pools/config?dp_rank=7", 404),
        ("GET", "/pools/draft", 404),
        ("POST", "/pools", 405),
        ("DELETE", "/pools/config", 405),
    ],
)
def test_bad_requests(server: Server, method: str, path: str, status: int) -> None:
    answer = requests.request(method, server.url + path, headers=server.headers, timeout=60)
    assert answer.status_code == status
    assert "Traceback" not in answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


COMMAND = (str(Path(sys.executable).parent / "sglang-dflash"), "status")


def environment(key: str) -> dict[str, str]:
    return os.environ | {"SGLANG_API_KEY": key, "COLUMNS": "100", "TERM": "xterm"}


def status(*arguments: str, key: str = KEY) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, env=environment(key), timeout=120)


def test_status_prints_a_table_or_json(server: Server) -> None:
    table, as_json = status(server.url), status(server.url, "--json")

    assert table.returncode == as_json.returncode == 0, table.stderr + as_json.stderr
    assert re.search(r"^slots +full +draft$", table.stdout, re.MULTILINE)
    assert re.search(r"^size +65,536 +16,384$", table.stdout, re.MULTILINE)
    assert "\x1b" not in table.stdout, "colours only where a terminal has them"
    answers = json.loads(as_json.stdout)
    assert answers["config"] == get(server, "/pools/config")
    assert [pool["size_slots"] for pool in answers["pools"]["schedulers"][0]["pools"]] == [65536, 16384]


def test_status_refreshes_in_a_terminal_until_interrupted(server: Server) -> None:
    terminal, inside = pty.openpty()
    command = [*COMMAND, server.url, "--interval-seconds", "0.1"]
    with subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, env=environment(KEY)) as process:
        os.close(inside)
        shown = b""
        while shown.count(b"requests aborted") < 3:
            shown += os.read(terminal, 65536)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # the other end is closed
            while os.read(terminal, 65536):
                pass
    os.close(terminal)
    assert process.returncode == 130
    assert b"\x1b[32m" in shown, "green while there is room"


def test_status_says_in_one_line_what_is_wrong(server: Server) -> None:
    wrong_key = status(server.url, key="wrong")
    assert wrong_key.returncode == 2 and wrong_key.stderr.count("\n") == 1
    assert "the key is missing or wrong; give --api-key-file FILE or set SGLANG_API_KEY" in wrong_key.stderr


def test_a_real_prometheus_scrapes_it_for_a_minute(server: Server, tmp_path: Path, record_property: Any) -> None:
    port = free_port()
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "scrape_configs": [{"job_name": "engine", "static_configs": [{"targets": [f"127.0.0.1:{server.port}"]}]}],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    command = [prometheus() / "prometheus", f"--web.listen-address=127.0.0.1:{port}"]
    command += [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]

    def query(expression: str) -> list[dict[str, Any]]:
        answer = requests.get(f"http://127.0.0.1:{port}/api/v1/query", params={"query": expression}, timeout=60).json()
        return answer["data"]["result"]

    def value(expression: str) -> float:
        (series,) = query(expression)
        return float(series["value"][1])

    with (tmp_path / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 300
        while True:
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "prometheus.log").read_text()
            try:
                if query("up") and value("count_over_time(sglang_dflash_up[10m])") >= SCRAPES:
                    break
            except requests.ConnectionError:
                time.sleep(0.1)
                continue
            with ThreadPoolExecutor(3) as clients:  # load between the looks
                list(clients.map(lambda writer: generate(server, writer, 100), range(3)))
        assert value("min_over_time(sglang_dflash_up[10m])") == 1
        held = {series["metric"]["__name__"] for series in query('{__name__=~"sglang_dflash_.*"}')}
        histogram = {f"{metrics.ACCEPT_LENGTH.name}_{part}" for part in ("bucket", "count", "sum")}
        assert held == {metric.name for metric in metrics.METRICS} - {metrics.ACCEPT_LENGTH.name} | histogram
        assert value("increase(sglang_dflash_verify_steps_total[10m])") > 0
        assert value('max_over_time(sglang_dflash_pool_used_slots{pool="full"}[10m])') > 0
        assert value("resets(sglang_dflash_verify_steps_total[10m])") == 0
        record_property("scrapes", value("count_over_time(sglang_dflash_up[10m])"))
        stale = "max_over_time((timestamp(sglang_dflash_up) - sglang_dflash_update_timestamp_seconds)[10m:1s])"
        record_property("most_stale_seconds", round(value(stale), 2))
    finally:
        process.terminate()
        process.wait(30)
