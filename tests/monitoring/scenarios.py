"""Runs real servers through what the alerts are about, while a real Prometheus with the chart's rules looks on.

A stage is a stretch of time in which one thing is the matter. The rules are those of the chart with shorter windows.
"""

import contextlib
import functools
import itertools
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
from transformers import AutoTokenizer

import broken_eviction
from monitoring.__main__ import alert_settings, rules_text
from monitoring.alerts import Windows, rule_groups
from prometheus import PATIENCE_SECONDS, SCRAPE_SECONDS, Prometheus
from server import Server, free_port
from server_ext.tiny import corpus
from server_ext.tiny.build import ensure

WINDOWS = Windows(rate="8s", events="60s", horizon_seconds=20, past="20s", past_ends="8s")
ENVIRONMENT = {
    "SGLANG_SWA_EVICTION_INTERVAL": "8",  # small steps for small pools
    "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "100000",  # a request reserves room for all that it may generate
}
COMMON = ["--chunked-prefill-size", "256", "--max-running-requests", "4", "--decode-log-interval", "5"]
QWEN3 = ["--pair", "qwen3", "--speculative-draft-window-size", "64", *COMMON]
NORMAL = [*QWEN3, "--max-total-tokens", "16384", "--speculative-draft-kv-ratio", "0.5"]
EVICTION = ["--pair", "swa", *COMMON, "--max-total-tokens", "12288", "--swa-full-tokens-ratio", "0.125"]
TIGHT = [*QWEN3, "--max-total-tokens", "16384", "--speculative-draft-kv-ratio", "0.07"]
# A request that may end early is let in before there is room for all that it may generate.
FULL = [*QWEN3, "--max-total-tokens", "4096", "--speculative-draft-kv-ratio", "0.75"]
FULL += ["--schedule-conservativeness", "0.01"]

EXPECTED = {
    "normal": set(),
    "drift": {"SGLangAcceptLengthCollapsed"},
    "reserved": {"SGLangQueueStuck"},
    "stalled": {"SGLangNotServing"},
    "stopped": {"SGLangScrapeMissing"},
    "eviction": {
        "SGLangEvictionNotWorking",
        "SGLangPoolFilling",
        "SGLangRequestsRetracted",
        "SGLangRequestsAborted",
        "SGLangPrefixReuseLost",  # a pool that is full keeps no prefix
    },
    "tight": {"SGLangWindowPoolTight", "SGLangPrefixReuseLost"},
    "full": {"SGLangPoolFilling", "SGLangRequestsRetracted"},
    "unhooked": {"SGLangPluginInactive"},
}
"""The alerts that fire in each stage."""


@functools.cache
def story(seed: int, tokens: int) -> list[int]:
    """Token ids of the beginning of a diary that the pairs go on with for ever."""
    tokenizer = AutoTokenizer.from_pretrained(ensure("qwen3").target)
    wheels = corpus.random_wheels(random.Random(seed))
    text = corpus.diary_text(corpus.HEROES[seed % len(corpus.HEROES)], wheels, tokens)
    return tokenizer(text)["input_ids"][:tokens]


@dataclass(frozen=True)
class Answer:
    """What a client saw of one request."""

    prompt_tokens: int
    completion_tokens: int
    retractions: int
    aborted: bool


@dataclass
class Stage:
    """A stretch of the recording: its name, Prometheus's name of the server, Unix times, and what clients saw."""

    name: str
    service: str
    start: float
    end: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    exposition: str = ""


@dataclass(frozen=True)
class Recording:
    """All stages by name, and the Prometheus that still answers for them."""

    prometheus: Prometheus
    stages: Mapping[str, Stage]


def short_settings() -> dict[str, dict[str, Any]]:
    """Return the chart's own settings of the alerts, with times and counts in proportion to the short runs."""
    settings = {name: dict(setting) for name, setting in alert_settings().items()}
    for setting in settings.values():
        setting["for"] = "0s" if setting["for"] == "0m" else "4s"
    settings["SGLangEvictionNotWorking"]["for"] = "1s"
    settings["SGLangQueueStuck"]["for"] = "3s"
    settings["SGLangPoolFilling"] |= {"for": "0s", "threshold": 0.5}
    settings["SGLangRequestsRetracted"]["threshold"] = 0
    return settings


class Recorder:
    """Runs the stages one after the other."""

    def __init__(self, prometheus: Prometheus, folder: Path) -> None:
        self.prometheus = prometheus
        self.stages: dict[str, Stage] = {}
        self._folder = folder

    def server(self, name: str, options: list[str], **environment: str) -> Server:
        return Server(options, self._folder / f"{name}.log", environment=ENVIRONMENT | environment, strict=False)

    @contextlib.contextmanager
    def stage(self, name: str, service: str, url: str) -> Iterator[Stage]:
        stage = self.stages[name] = Stage(name, service, time.time())
        yield stage
        time.sleep(2 * SCRAPE_SECONDS)  # what happened last is in Prometheus, too
        stage.end = time.time()
        with contextlib.suppress(requests.ConnectionError):
            stage.exposition = requests.get(f"{url}/metrics", timeout=60).text

    def until_firing(self, stage: Stage, work: Callable[[], None] = lambda: time.sleep(0.5)) -> None:
        """Repeat the work until all alerts of the stage fire."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        missing = set(EXPECTED[stage.name])
        while missing:
            assert time.monotonic() < deadline, f"{stage.name}: {missing} do not fire"
            work()
            firing = self.prometheus.instant(f'ALERTS{{alertstate="firing",service="{stage.service}"}}')
            missing -= {series["metric"]["alertname"] for series in firing}


def generate(server: Server, token_ids: list[int], tokens: int, *, ignore_eos: bool = True) -> Answer:
    """Generate over HTTP, streaming as most clients do."""
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": ignore_eos}
    body = {"input_ids": token_ids, "sampling_params": sampling, "stream": True}
    with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=600) as response:
        events = [line.removeprefix(b"data: ") for line in response.iter_lines() if line.startswith(b"data: {")]
    last = json.loads(events[-1]) if response.ok else {"error": response.status_code}
    if "error" in last:
        return Answer(len(token_ids), 0, 0, aborted=True)
    about = last["meta_info"]
    aborted = about["finish_reason"]["type"] == "abort"
    return Answer(len(token_ids), about.get("completion_tokens", 0), about.get("num_retractions", 0), aborted)


def together(stage: Stage, *calls: Callable[[], Answer]) -> None:
    """Make requests at the same time, and keep their answers."""
    with ThreadPoolExecutor(len(calls)) as pool:
        stage.answers += [future.result() for future in [pool.submit(call) for call in calls]]


@contextlib.contextmanager
def given_up(server: Server, *, seed: int, tokens: int) -> Iterator[None]:
    """Keep two long requests running until the context ends; then their clients hang up at the next token."""
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    enough = threading.Event()

    def read(i: int) -> None:
        body = {"input_ids": story(seed + i, 150), "sampling_params": sampling, "stream": True}
        with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=600) as response:
            for _ in response.iter_lines():
                if enough.is_set():
                    return

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read, i) for i in range(2)]
        try:
            yield
        finally:
            enough.set()
    for reader in readers:
        reader.result()


def normal_and_after(recorder: Recorder) -> None:
    """Normal load, and on the same server one after the other what needs no other one.

    Text that the draft cannot guess; a request that reserves most of the pool and keeps another waiting; a scheduler
    that stands still; no server at all.
    """
    with recorder.server("normal", NORMAL).started() as server:
        with recorder.prometheus.scraping("normal", server.port):
            with recorder.stage("normal", "normal", server.url) as stage:
                began = time.monotonic()
                for i in itertools.count():
                    together(stage, *[lambda w=w: generate(server, story(w % 6, 150), 150) for w in range(i, i + 3)])
                    if time.monotonic() - began > 16 and i >= 4:
                        break
            with recorder.stage("drift", "normal", server.url) as stage:
                rng = random.Random(0)

                def unlike_anything() -> None:
                    prompts = [[rng.randrange(10, 300) for _ in range(60)] for _ in range(3)]
                    together(stage, *[lambda p=p: generate(server, p, 12) for p in prompts])

                recorder.until_firing(stage, unlike_anything)
        with (
            recorder.prometheus.scraping("reserved", server.port),
            given_up(server, seed=10, tokens=12_000),
            recorder.stage("reserved", "reserved", server.url) as stage,
        ):
            recorder.until_firing(stage)
        with recorder.prometheus.scraping("stalled", server.port), given_up(server, seed=20, tokens=6000):
            (scheduler,) = [process for process in server.processes() if "scheduler" in process.name()]
            recorder.prometheus.wait_for('sglang:num_running_reqs{service="stalled"} == 2')
            with recorder.stage("stalled", "stalled", server.url) as stage:
                scheduler.send_signal(signal.SIGSTOP)
                try:
                    recorder.until_firing(stage)
                finally:
                    scheduler.send_signal(signal.SIGCONT)
        with recorder.prometheus.scraping("stopped", server.port):
            assert server.stop() == 0, server.output()[-5000:]
            with recorder.stage("stopped", "stopped", server.url) as stage:
                recorder.until_firing(stage)


def eviction_disabled(recorder: Recorder, folder: Path) -> None:
    """Requests outgrow the window pool, together and alone, as nothing behind their windows is freed."""
    plugin = broken_eviction.installed(folder)
    with (
        recorder.server("eviction", EVICTION, **plugin).started() as server,
        recorder.prometheus.scraping("eviction", server.port),
        recorder.stage("eviction", "eviction", server.url) as stage,
    ):

        def outgrow() -> None:
            together(stage, *[lambda w=w: generate(server, story(w, 60), 700) for w in range(3)])
            together(stage, lambda: generate(server, story(3, 60), 2000))

        recorder.until_firing(stage, outgrow)


def draft_pool_tight(recorder: Recorder) -> None:
    """More prompts than the draft pool has room for come again and again; the full pool has them all."""
    with (
        recorder.server("tight", TIGHT).started() as server,
        recorder.prometheus.scraping("tight", server.port),
        recorder.stage("tight", "tight", server.url) as stage,
    ):

        def again() -> None:
            for i in range(24):
                together(stage, lambda i=i: generate(server, story(i, 150), 4))

        recorder.until_firing(stage, again)


def full_pool_exhausted(recorder: Recorder) -> None:
    """More is generated than the full pool holds."""
    with (
        recorder.server("full", FULL).started() as server,
        recorder.prometheus.scraping("full", server.port),
        recorder.stage("full", "full", server.url) as stage,
    ):
        seeds = itertools.count()

        def overfill() -> None:
            prompts = [story(next(seeds), 100) for _ in range(4)]
            together(stage, *[lambda p=p: generate(server, p, 1200, ignore_eos=False) for p in prompts])

        recorder.until_firing(stage, overfill)


@contextlib.contextmanager
def unhooked(recorder: Recorder, folder: Path) -> Iterator[None]:
    """Metrics of an engine without hooks, all the while."""
    folder.mkdir()
    port = free_port()
    process = subprocess.Popen([sys.executable, str(Path(__file__).with_name("unhooked.py")), str(port), str(folder)])
    try:
        with (
            recorder.prometheus.scraping("unhooked", port),
            recorder.stage("unhooked", "unhooked", f"http://127.0.0.1:{port}") as stage,
        ):
            recorder.until_firing(stage)
            yield
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def recorded(folder: Path) -> Iterator[Recording]:
    """Run all stages, and keep Prometheus for questions about them."""
    (folder / "prometheus").mkdir()
    rules = rules_text(rule_groups(short_settings(), WINDOWS))
    with Prometheus(folder / "prometheus", rules) as prometheus:
        recorder = Recorder(prometheus, folder)
        with unhooked(recorder, folder / "unhooked"):
            normal_and_after(recorder)
            eviction_disabled(recorder, folder / "plugins")
            draft_pool_tight(recorder)
            full_pool_exhausted(recorder)
        yield Recording(prometheus, recorder.stages)
