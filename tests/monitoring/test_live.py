"""Dashboards and alerts on what a real Prometheus scraped from real servers under load."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from boards import BOARDS, ELSEWHERE, PanelQuery, queries
from monitoring import promql
from monitoring.alerts import Windows, recording_rules
from pictures import draw
from prometheus import Series
from scenarios import EXPECTED, Recording, Stage, recorded
from server import Servers
from test_alerts import ALERTS, RULES

pytestmark = pytest.mark.timeout(1800)  # the first test waits for the whole recording: four servers, eight stages

OF_SCRAPE = {"namespace", "release", "service", "pod", "instance", "job"}
# SGLang adds it with --enable-priority-scheduling; a matcher for "" is true without it, too.
OPTIONAL_LABELS = {"priority"}
RANKS = set(re.findall(r"\w+_rank", promql.RANKS))
OF_PROMETHEUS = {"up", "ALERTS"}


@pytest.fixture(scope="module")
def recording(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recording]:
    """All stages, run once."""
    servers.close()
    with recorded(tmp_path_factory.mktemp("recording")) as recording:
        yield recording


@pytest.fixture
def pictures(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Where pictures go: ``--pictures``, or nowhere that lasts."""
    folder = Path(request.config.getoption("--pictures") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def asked(query: PanelQuery, stage: Stage) -> str:
    selected = {"namespace": "serving", "release": "demo", "pod": f"{stage.service}-0"}
    return query.asked(selected, rate_interval="8s", range_=f"{max(8, int(stage.end - stage.start))}s")


def answers(recording: Recording, query: PanelQuery, stage: str) -> list[Series]:
    found = recording.stages[stage]
    return recording.prometheus.over(asked(query, found), found.start, found.end)


@pytest.mark.parametrize("stage", EXPECTED)
def test_the_alerts_of_a_stage_fire_and_no_others(recording: Recording, stage: str) -> None:
    found = recording.stages[stage]
    firing = recording.prometheus.over(
        f'ALERTS{{alertstate="firing",service="{found.service}"}}', found.start, found.end
    )
    assert {series["metric"]["alertname"] for series in firing} == EXPECTED[stage]


def test_every_alert_has_a_stage() -> None:
    assert set.union(*EXPECTED.values()) == set(ALERTS)


def test_alerts_name_the_pool(recording: Recording) -> None:
    def labels(stage: str, alert: str, label: str) -> set[str]:
        found = recording.stages[stage]
        query = f'ALERTS{{alertstate="firing",alertname="{alert}",service="{found.service}"}}'
        return {series["metric"][label] for series in recording.prometheus.over(query, found.start, found.end)}

    assert labels("eviction", "SGLangEvictionNotWorking", "pool") == {"swa"}
    assert labels("eviction", "SGLangPoolFilling", "pool") == {"swa"}
    assert labels("eviction", "SGLangRequestsRetracted", "cause") == {"swa"}
    assert labels("eviction", "SGLangRequestsAborted", "cause") == {"swa"}
    assert labels("tight", "SGLangWindowPoolTight", "pool") == {"draft"}
    assert labels("full", "SGLangRequestsRetracted", "cause") == {"full"}


@pytest.mark.parametrize("query", queries(), ids=lambda query: query.name)
def test_a_panel_shows_something_and_never_not_a_number(recording: Recording, query: PanelQuery) -> None:
    for stage in recording.stages:
        for series in answers(recording, query, stage):
            values = [float(value) for _, value in series["values"]]
            assert not any(math.isnan(value) for value in values), f"{stage}: {series['metric']}"
    assert answers(recording, query, ELSEWHERE.get(query.name, "normal"))


def exported(recording: Recording) -> dict[str, set[str]]:
    """Return the labels of each sample that any server exported."""
    labels: dict[str, set[str]] = defaultdict(set)
    for stage in recording.stages.values():
        for family in text_string_to_metric_families(stage.exposition):
            for sample in family.samples:
                labels[sample.name] |= sample.labels.keys() | OF_SCRAPE
    return labels


def grouped(node: Any) -> set[str]:
    """Return the labels that a query groups or matches by."""
    found: set[str] = set()

    def visit(part: Any) -> None:
        modifier = getattr(part, "modifier", None)
        matching = getattr(modifier, "matching", modifier)
        found.update(getattr(matching, "labels", None) or ())

    promql.promql_parser.walk(node, visit)
    return found


def test_every_metric_and_label_is_exported(recording: Recording) -> None:
    labels = exported(recording)
    assert set.union(*labels.values()) >= RANKS  # not all have them, and to go without them costs nothing
    known = labels | {name: OF_SCRAPE | {"alertname", "alertstate"} for name in OF_PROMETHEUS}
    plain = [(query.name, query.asked({}, rate_interval="1m", range_="1h"), query.legend) for query in queries()]
    recorded = recording_rules(Windows())
    plain += [(name, rule["expr"], str(rule.get("annotations", ""))) for name, rule in RULES.items()]
    for name, expr, text in plain:
        of_query: set[str] = set()
        for selector in promql.selectors(expr):
            if selector.name in recorded:
                made_of = promql.selectors(recorded[str(selector.name)])
                of_query |= set.union(*(known[str(part.name)] for part in made_of))
                continue
            assert selector.name in known, f"{name}: no server exports {selector.name}"
            matched = {matcher.name for matcher in selector.matchers.matchers}
            assert matched <= known[selector.name] | OPTIONAL_LABELS, f"{name}: {selector.name}"
            of_query |= known[selector.name]
        assert grouped(promql.promql_parser.parse(expr)) - RANKS <= of_query, name
        named = {legend or label for legend, label in re.findall(r"\{\{(\w+)\}\}|\$labels\.(\w+)", text)}
        assert named <= of_query, name


# -- what panels show is what happened


def value(recording: Recording, stage: str, expr: str) -> float:
    found = recording.stages[stage]
    (series,) = recording.prometheus.instant(expr.replace("$pod", f"{found.service}-0"), found.end)
    return float(series["value"][1])


def increase(recording: Recording, stage: str, metric: str) -> float:
    """Return how much a counter grew in a stage, from two samples: Prometheus's own function would extrapolate."""
    found = recording.stages[stage]
    query = f'sum({metric}{{pod="{found.service}-0"}}) or vector(0)'
    before, after = (recording.prometheus.instant(query, at)[0]["value"][1] for at in (found.start, found.end))
    return float(after) - float(before)


def test_panels_show_the_configured_pools(recording: Recording) -> None:
    size = 'sum(sglang_dflash_pool_size_slots{pod="$pod",pool="%s"})'
    assert value(recording, "normal", size % "full") == 16384
    assert value(recording, "normal", size % "draft") == 8192
    assert value(recording, "eviction", size % "swa") == 1536
    assert value(recording, "full", size % "full") == 4096
    ratio = next(query for query in queries() if query.name == "speculation: Slots for each of the target's: A")
    (series,) = answers(recording, ratio, "normal")
    assert {float(value) for _, value in series["values"]} == {0.5}


def test_panels_count_what_clients_saw(recording: Recording) -> None:
    for stage in ("eviction", "full"):
        seen = recording.stages[stage].answers
        retracted = increase(recording, stage, "sglang_dflash_retracted_requests_total")
        assert retracted >= sum(answer.retractions for answer in seen) > 0
        aborted = increase(recording, stage, "sglang_dflash_retraction_aborted_requests_total")
        assert aborted == len([answer for answer in seen if answer.aborted])
    normal = recording.stages["normal"].answers
    assert increase(recording, "normal", "sglang:num_requests_total") == len(normal)
    for kind, tokens in (
        ("prompt", sum(answer.prompt_tokens for answer in normal)),
        ("generation", sum(answer.completion_tokens for answer in normal)),
    ):
        assert increase(recording, "normal", f"sglang:{kind}_tokens_total") == tokens > 0
    assert increase(recording, "normal", "sglang_dflash_retracted_requests_total") == 0
    assert not [answer for answer in normal if answer.aborted]
    most = next(query for query in queries() if query.name == "overview: Running and waiting: A")
    (series,) = answers(recording, most, "normal")
    assert 1 <= max(float(value) for _, value in series["values"]) <= 3


def test_pictures(recording: Recording, pictures: Path) -> None:
    for board, stage in {"overview": "normal", "pools": "eviction", "speculation": "normal"}.items():
        found = recording.stages[stage]
        end = recording.stages["drift"].end if stage == "normal" else found.end
        selected = {"namespace": "serving", "release": "demo", "pod": f"{found.service}-0"}
        draw(board, recording.prometheus, selected, found.start, end, pictures / f"{board}.png")
    sizes = [file.stat().st_size for file in pictures.glob("*.png")]
    assert len(sizes) == len(BOARDS) and min(sizes) > 10_000 and sum(sizes) < 300_000
