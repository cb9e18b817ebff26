"""The dashboards as files: up to date, complete, and as Grafana's schema has them."""

import json
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from enum import EnumType
from pathlib import Path
from typing import Any, Literal, Union

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import dashboard as models

from boards import BOARDS, panels, queries
from monitoring import promql
from monitoring.__main__ import CHART
from monitoring.panels import TAG, WIDTH

REPOSITORY = Path(__file__).parents[2]


def test_the_files_are_what_the_code_makes() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "monitoring", "--check"], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_a_stale_file_is_told(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys; from monitoring import __main__ as main; "
        "main.documents = lambda: {main.CHART / 'dashboards' / 'overview.json': 'old', "
        "main.CHART / 'dashboards' / 'new.json': 'x'}; sys.argv = ['x', '--check']; sys.exit(main.main())"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    named = [Path(line.split(" is stale")[0]).name for line in result.stderr.splitlines()]
    assert result.returncode == 1 and named == [
        "new.json",
        "overview.json",
        "pools.json",
        "speculation.json",
        "alerts.yaml",
    ]


def mistyped(value: Any, hint: Any, place: str) -> Iterator[str]:
    """Yield where a model of Grafana's SDK holds something else than its annotations say."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Union and len(arguments) == 2 and arguments[1] is type(None):
        if value is not None:
            yield from mistyped(value, arguments[0], place)
    elif origin is Union:
        if all(list(mistyped(value, argument, place)) for argument in arguments):
            yield f"{place}: {value!r} is no {hint}"
    elif origin is Literal or isinstance(hint, EnumType):
        if value not in (arguments or [member.value for member in hint]):
            yield f"{place}: {value!r} is no {hint}"
    elif origin is list and isinstance(value, list):
        for i, item in enumerate(value):
            yield from mistyped(item, arguments[0], f"{place}[{i}]")
    elif origin is dict and isinstance(value, dict):
        for key, item in value.items():
            yield from mistyped(item, arguments[1], f"{place}.{key}")
    elif not isinstance(value, (int, float) if hint is float else origin or hint):
        yield f"{place}: {value!r} is no {hint}"
    elif hasattr(value, "to_json"):
        for name, annotation in typing.get_type_hints(type(value)).items():
            yield from mistyped(getattr(value, name), annotation, f"{place}.{name}")


def test_a_wrong_type_is_seen() -> None:
    board = json.loads(json.dumps(BOARDS["pools"]))
    board["panels"][1]["gridPos"]["w"] = "6"
    board["panels"][1]["targets"][0]["range"] = "yes"
    register_default_plugins()
    found = list(mistyped(models.Dashboard.from_json(board), models.Dashboard, "pools"))
    assert len(found) == 1 and found[0].startswith("pools.panels[1]: ")


@pytest.mark.parametrize("name", BOARDS)
def test_grafanas_types_read_it_whole(name: str) -> None:
    """Grafana 11.6's own schema, as its SDK has it: reading and writing again loses and changes nothing."""
    register_default_plugins()
    model = models.Dashboard.from_json(BOARDS[name])
    assert json.loads(json.dumps(model, cls=JSONEncoder)) == BOARDS[name]
    assert list(mistyped(model, models.Dashboard, name)) == []
    assert model.schema_version == 41
    for panel in model.panels or []:
        if isinstance(panel, models.Panel):
            assert type(panel.options).__module__.endswith((".timeseries", ".stat"))
            assert {type(target).__module__.rpartition(".")[2] for target in panel.targets or []} == {"prometheus"}


@pytest.mark.parametrize("name", BOARDS)
def test_a_dashboard_is_complete(name: str) -> None:
    board = BOARDS[name]
    assert board["uid"] == f"sglang-dflash-{name}" and len(board["uid"]) <= 40
    assert TAG in board["tags"]
    (link,) = board["links"]
    assert (link["type"], link["tags"], link["keepTime"], link["includeVars"]) == ("dashboards", [TAG], True, True)
    variables = [variable["name"] for variable in board["templating"]["list"]]
    assert variables[:5] == ["datasource", "namespace", "release", "model", "pod"]
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(board))) - {"__rate_interval", "__range", "__all"}
    assert used <= set(variables)
    for variable in board["templating"]["list"][1:]:
        if variable["type"] == "query":
            assert variable["includeAll"] and variable["multi"] and variable["allValue"] == ".*"
            assert promql.selectors(re.sub(r"label_values\((.*), \w+\)", r"\1", variable["query"]["query"]))


@pytest.mark.parametrize("name", BOARDS)
def test_no_data_source_is_hard_coded(name: str) -> None:
    def sources(node: Any) -> list[Any]:
        children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else []
        own = [node["datasource"]] if isinstance(node, dict) and "datasource" in node else []
        return own + [source for child in children for source in sources(child)]

    found = sources({**BOARDS[name], "annotations": {}})
    assert len(found) > 10 and all(source == {"type": "prometheus", "uid": "${datasource}"} for source in found)
    assert "annotations" not in BOARDS[name] or BOARDS[name]["annotations"] in ({}, {"list": []})


@pytest.mark.parametrize("name", BOARDS)
def test_a_panel_says_what_it_shows_and_what_to_do(name: str) -> None:
    titles = [panel["title"] for panel in panels(name)]
    assert len(titles) == len(set(titles)) >= 12
    ids = [panel["id"] for panel in BOARDS[name]["panels"] if "id" in panel]
    assert len(ids) == len(set(ids))
    for panel in panels(name):
        means, do, metrics = panel["description"].split("\n\n")
        assert means and do, panel["title"]
        for target in panel["targets"]:
            assert all(f"`{metric}`" in metrics for metric in promql.metrics(target["expr"])), panel["title"]
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"] and defaults["noValue"], panel["title"]


@pytest.mark.parametrize("name", BOARDS)
def test_panels_fill_the_width_and_do_not_overlap(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARDS[name]["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= WIDTH, panel["title"]
        taken |= cells


def test_every_query_is_promql() -> None:
    assert len(queries()) > 60
    for query in queries():
        asked = query.asked({}, rate_interval="1m", range_="1h")
        assert "$" not in asked, query.name
        assert promql.selectors(asked), query.name


def test_every_query_selects_by_the_variables() -> None:
    """Also by the release: a dashboard shows what the chart's monitors scrape and nothing else of the same name."""
    for query in queries():
        plain = query.asked(
            {name: f"<{name}>" for name in ("namespace", "release", "pod", "model")}, rate_interval="1m", range_="1h"
        )
        for selector in promql.selectors(plain):
            if selector.name == "ALERTS":
                continue
            matched = {matcher.value for matcher in selector.matchers.matchers}
            assert matched >= {"<namespace>", "<release>", "<pod>"}, query.name


def test_rules_files_and_dashboards_are_in_the_chart() -> None:
    assert sorted(path.name for path in (CHART / "dashboards").iterdir()) == sorted(f"{name}.json" for name in BOARDS)
    assert [path.name for path in (CHART / "rules").iterdir()] == ["alerts.yaml"]
