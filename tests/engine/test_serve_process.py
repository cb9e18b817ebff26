"""The life of a ``serve`` process: its keys stay hidden, and every way to end it leaves nothing behind."""

import contextlib
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from server import Server

pytestmark = pytest.mark.usefixtures("alone")

PAIR = ["--pair", "qwen3"]
KEY = "sk-user-5f0c7a"
ADMIN_KEY = "sk-admin-91be44"
REPOSITORY = Path(__file__).parents[2]


def stream(server: Server, tokens: int) -> Iterator[Any]:
    """Start a stream of exactly `tokens` tokens and return its chunks; the first one has arrived."""
    chunks = server.client().completions.create(
        model="qwen3",
        prompt="The river",
        max_tokens=tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    next(chunks)
    return chunks


def finish_reasons(chunks: Iterable[Any]) -> list[str]:
    return [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.02)


def check_keys_are_hidden(server: Server) -> None:
    """Look for the keys wherever they could show: each page, the log, command lines and environments of processes."""
    places = {"the log": server.output()}
    admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
    described = requests.get(f"{server.url}/openapi.json", headers=server.headers, timeout=60).json()["paths"]
    # What takes POST as well acts on the engine.
    pages = [path for path, methods in described.items() if methods.keys() == {"get"} and "{" not in path]
    assert {"/server_info", "/get_server_info", "/model_info", "/v1/loads"} <= set(pages)
    for page in [*pages, "/metrics"]:
        for headers in (server.headers, admin):
            answer = requests.get(server.url + page, headers=headers, timeout=120)
            places[f"{page} {answer.status_code}"] = f"{answer.headers}{answer.text}"
    for process in server.processes():
        places[f"the command line of {process.pid}"] = " ".join(process.cmdline())
        if process.pid != server.process.pid:  # its own environment is the launcher's to know
            places[f"the environment of {process.pid}"] = Path(f"/proc/{process.pid}/environ").read_text(
                errors="replace"
            )
    assert len([place for place in places if place.startswith("the environment")]) >= 2
    for place, content in places.items():
        assert KEY not in content and ADMIN_KEY not in content, f"a key shows in {place}"


def check_keys_are_asked_for(server: Server) -> None:
    body = {"model": "qwen3", "prompt": "The", "max_tokens": 1}
    for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": b"Bearer \xfc"}):
        refused = requests.post(f"{server.url}/v1/completions", json=body, headers=header, timeout=60)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
    assert server.client().completions.create(**body).usage.completion_tokens == 1
    as_user = requests.post(f"{server.url}/flush_cache", headers=server.headers, timeout=60)
    as_admin = requests.post(f"{server.url}/flush_cache", headers={"Authorization": f"Bearer {ADMIN_KEY}"}, timeout=60)
    assert (as_user.status_code, as_admin.status_code) == (401, 200)


def test_keys_and_drain(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text(KEY + "\n")
    config = tmp_path / "engine.yaml"
    config.write_text(f"max-running-requests: 4\napi-key-file: {key_file}\ndrain-timeout-seconds: 110\n")
    # With no time for a health check each one fails; SGLang then drops its requests on SIGTERM.
    environment = {"SGLANG_ADMIN_API_KEY": ADMIN_KEY, "SGLANG_HEALTH_CHECK_TIMEOUT": "0"}
    options = [*PAIR, "--config", str(config)]
    with Server(options, tmp_path / "log", environment=environment, key=KEY) as server:
        server.wait_until_ready()
        info = requests.get(f"{server.url}/server_info", headers=server.headers, timeout=60).json()
        assert (info["max_running_requests"], info["api_key"], info["admin_api_key"]) == (4, None, None)
        check_keys_are_asked_for(server)
        check_keys_are_hidden(server)

        assert requests.get(f"{server.url}/health", timeout=60).status_code == 503
        running = stream(server, tokens=3000)
        server.signal(signal.SIGTERM)
        wait_until(lambda: requests.get(f"{server.url}/ready", timeout=60).status_code == 503, "not ready")
        refused = requests.post(f"{server.url}/v1/completions", json={}, headers=server.headers, timeout=60)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1" and refused.headers["connection"] == "close"
        assert refused.json()["error"]["code"] == "service_unavailable"
        assert requests.get(f"{server.url}/metrics", timeout=60).status_code == 200
        chunks = list(running)
        assert chunks[-1].usage.completion_tokens == 3000
        assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == [
            "length"
        ]
        assert server.wait() == 0
        assert KEY not in server.output() and ADMIN_KEY not in server.output()


def test_server_that_never_had_a_request(tmp_path: Path) -> None:
    with Server([*PAIR, "--skip-server-warmup"], tmp_path / "log").started():
        pass


def test_deadline_after_ctrl_c(tmp_path: Path) -> None:
    """Ctrl-C reaches every process of the group; the workers must not mind, and the deadline ends a long request."""
    with Server([*PAIR, "--drain-timeout-seconds=2"], tmp_path / "log") as server:
        server.wait_until_ready()
        running = stream(server, tokens=12_000)
        server.signal(signal.SIGINT, group=True)
        assert finish_reasons(running) == ["abort"]
        assert server.wait() == 0
        assert "drain deadline" in server.output() and "Traceback" not in server.output()


def test_second_signal_stops_at_once(tmp_path: Path) -> None:
    with Server([*PAIR, "--drain-timeout-seconds=600"], tmp_path / "log") as server:
        server.wait_until_ready()
        running = stream(server, tokens=12_000)
        server.signal(signal.SIGTERM)
        server.wait_for("finishing 1 running requests")
        server.signal(signal.SIGTERM)
        assert server.wait() == 128 + signal.SIGTERM
        running.close()


def test_killed_launcher_takes_its_workers_along(tmp_path: Path) -> None:
    with Server(PAIR, tmp_path / "log") as server:
        server.wait_until_ready()
        assert len(server.processes()) >= 3
        server.signal(signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_signal_while_workers_start(signum: int, status: int, tmp_path: Path) -> None:
    """The workers are still importing: SGLang itself binds them to their parent only later."""

    def importing() -> bool:
        for process in server.processes():
            with contextlib.suppress(OSError, psutil.Error):
                command, libraries = " ".join(process.cmdline()), Path(f"/proc/{process.pid}/maps").read_text()
                if "spawn_main" in command and "libtorch_cpu" in libraries:
                    return True
        return False

    with Server(PAIR, tmp_path / "log") as server:
        server.wait_for("server_args=")
        wait_until(importing, "a worker that imports")
        server.signal(signum)
        assert server.wait() == status
        assert "Traceback" not in server.output()


def test_signal_before_the_engine_is_imported(tmp_path: Path) -> None:
    with Server(PAIR, tmp_path / "log") as server:
        server.wait_for("loading the engine")
        server.signal(signal.SIGTERM)
        assert server.wait() == 143


def test_port_taken_while_the_model_loads(tmp_path: Path) -> None:
    with Server(PAIR, tmp_path / "log") as server, socket.socket() as other:
        server.wait_for("server_args=")
        other.bind(("127.0.0.1", server.port))
        other.listen()
        assert server.wait() == 2
        assert f"error: port {server.port} on 127.0.0.1 is in use" in server.output().splitlines()[-1]


def test_make_serve(tmp_path: Path) -> None:
    """``make serve`` shows its stages, says what to try, and Ctrl-C leaves no process."""
    command = ["env", "--unset=MAKEFLAGS", "--unset=MAKELEVEL", "make", "--directory", str(REPOSITORY), "serve"]
    arguments = ["PAIR=qwen3", "ARGS=--max-running-requests 3"]
    with Server(arguments, tmp_path / "log", command=command, port_option="PORT={}") as server:
        server.wait_until_ready()
        output = server.output()
        assert f"== [4/4] model pair qwen3 and server on port {server.port}" in output
        tried = [
            line.split(maxsplit=1)[1] for line in output.splitlines() if line.startswith(("  chat ", "  metrics "))
        ]
        answers = [
            subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=True).stdout
            for command in tried
        ]
        assert '"role":"assistant"' in answers[0] and "sglang:" in answers[1]
        assert requests.get(f"{server.url}/server_info", timeout=60).json()["max_running_requests"] == 3
        server.signal(signal.SIGINT, group=True)
        server.wait()
        assert "Traceback" not in server.output()
