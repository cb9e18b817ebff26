"""The values: documented, in the schema, used, and used only where they exist."""

import copy
import json
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import pytest
import yaml

from manifest_schemas import mistakes
from matrix import EVERYTHING, HPA, KEDA, TWO_NODES
from rendering import EXAMPLES, VALIDATION, VALUES, at, engine_yaml, manifests, merged, refusal, texts
from value_docs import CHART, described_schema, documented, documents, undocumented

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
TEXT = (CHART / "values.yaml").read_text()
DOCUMENTED = {".".join(value.path): value for value in documented(TEXT)}


def test_every_value_is_documented() -> None:
    assert undocumented(TEXT) == []


def test_a_value_without_a_description_is_seen() -> None:
    text = "# -- One\none: 1\nmap:\n  # -- Two\n  two: 2\n  # not a description\n  three: {a: 1}\n"
    assert undocumented(text) == ["map.three.a"]
    assert [value.path for value in documented(text)] == [("one",), ("map", "two")]


@pytest.mark.parametrize("path", [CHART / "README.md", CHART / "values.schema.json"], ids=lambda path: path.name)
def test_descriptions_are_carried_on(path: Path) -> None:
    assert documents(CHART)[path] == path.read_text(), "run `make chart-docs`"


def test_the_schema_has_every_value_and_no_other() -> None:
    described_schema(SCHEMA, list(DOCUMENTED.values()))  # raises for a value that it lacks

    def names(node: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[str]:
        for key, child in node.get("properties", {}).items():
            here = (*path, key)
            if ".".join(here) in DOCUMENTED:
                yield ".".join(here)
            else:
                assert "properties" in child or key == "global", here
                yield from names(child, here)

    assert set(names(SCHEMA)) == set(DOCUMENTED)


def test_the_defaults_are_what_the_schema_allows() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.Draft7Validator(SCHEMA).validate(VALUES)
    jsonschema.Draft202012Validator(SCHEMA).validate(VALUES)


def objects_of_the_schema(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each object whose names the chart defines, with its dotted path."""
    if "properties" in node:
        yield path, node
        for key, child in node["properties"].items():
            yield from objects_of_the_schema(child, f"{path}.{key}".strip("."))


@pytest.mark.parametrize("path", [path for path, _ in objects_of_the_schema(SCHEMA)])
def test_an_unknown_value_is_refused(path: str) -> None:
    message = refusal(at(f"{path}.nonsense".strip("."), 1))
    place = "/" + path.replace(".", "/") if path else ""
    assert f"at '{place}': additional properties 'nonsense' not allowed" in message


def resolved(node: dict[str, Any]) -> dict[str, Any]:
    """Return a node of the schema without `$ref`."""
    if "$ref" in node:
        return resolved(SCHEMA["definitions"][node["$ref"].rpartition("/")[2]])
    return node


def wrong_values(node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield values that a node of the schema must refuse, with a word of the message."""
    node = resolved(node)
    kinds = node.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds:
        yield "want", next(value for kind, value in WRONG_KIND if kind not in kinds)
    if "enum" in node:
        yield "value must be one of", "nonsense"
    if "anyOf" in node:
        yield "'anyOf' failed", {"a": 1}
        for branch in node["anyOf"]:
            yield from (("'anyOf' failed", value) for word, value in wrong_values(branch) if word != "want")
    step = 1 if "integer" in kinds else 0.5
    for keyword, value, word in (
        ("minimum", -step, "minimum"),
        ("exclusiveMinimum", 0, "exclusiveMinimum"),
        ("maximum", step, "maximum"),
        ("exclusiveMaximum", 0, "exclusiveMaximum"),
    ):
        if keyword in node:
            yield word, node[keyword] + value
    if "pattern" in node:
        yield "does not match pattern", " \t!"
    if "minItems" in node:
        yield "minItems", []
    if "maxItems" in node:
        yield "maxItems", ["/a"] * (node["maxItems"] + 1)
    for pattern, child in node.get("patternProperties", {}).items():
        yield "additional properties ' !' not allowed", {" !": "x"}
        assert re.search(pattern, "a")
        yield from ((word, {"a": value}) for word, value in wrong_values(child))
    if "items" in node:
        for word, value in wrong_values(node["items"]):
            yield word, [value]
    if "properties" in node:
        if node.get("additionalProperties") is False:
            yield "additional properties", {"nonsense": 1}
        for name in node.get("required", []):
            yield f"missing property '{name}'", {}
        complete = {name: "x" for name in node.get("required", [])}
        for name, child in node["properties"].items():
            yield from ((word, complete | {name: value}) for word, value in wrong_values(child))


WRONG_KIND = [("object", {}), ("array", []), ("string", "x"), ("boolean", True), ("integer", 7), ("number", 1.5)]


@pytest.mark.parametrize("path", DOCUMENTED)
def test_a_wrong_value_is_refused_by_name(path: str) -> None:
    node = SCHEMA
    for key in path.split("."):
        node = node["properties"][key]
    cases = list(wrong_values(node))
    assert cases
    for word, value in cases:
        message = refusal(at(path, value))
        assert "/" + path.replace(".", "/") in message and word in message, (value, message)


def test_a_value_may_be_left_to_the_engine() -> None:
    nullable = {path for path, value in DOCUMENTED.items() if "Null" in value.description}
    assert nullable == {
        "speculative.draftWindowSize",
        "speculative.blockSize",
        "swaFullTokensRatio",
        "memFractionStatic",
        "contextLength",
        "terminationGracePeriodSeconds",
    }
    base = {"speculative": {"draftKvRatio": 1}}
    for path in nullable:
        texts(merged(base, at(path, None)))


# Another value for each, where none can be guessed from the default.
OTHER: dict[str, Any] = {
    "device": "cpu",
    "model.tinyPair": "gdn",
    "speculative.draftKvRatio": 0.5,
    "speculative.draftWindowSize": 32,
    "swaFullTokensRatio": 0.5,
    "contextLength": 4096,
    "engineConfig": {"page-size": 64},
    "extraArgs": ["--random-seed=1"],
    "extraEnv": [{"name": "A", "value": "b"}],
    "extraEnvFrom": [{"secretRef": {"name": "a"}}],
    "image.digest": "sha256:" + "1" * 64,
    "image.pullPolicy": "Always",
    "imagePullSecrets": [{"name": "a"}],
    "command": ["a"],
    "gpu.resource": "amd.com/gpu",
    "resources": {"requests": {"cpu": 1}},
    "terminationGracePeriodSeconds": 900,
    "memFractionStatic": 0.7,
    "shmSize": "1Gi",
    "podSecurityContext": {"runAsUser": 1001},
    "securityContext": {"capabilities": {"drop": ["A"]}},
    "tolerations": [{"operator": "Exists"}],
    "affinity": {"podAffinity": {}},
    "topologySpreadConstraints": [{"maxSkew": 2, "topologyKey": "a", "whenUnsatisfiable": "DoNotSchedule"}],
    "initContainers": [{"name": "a", "image": "b"}],
    "extraVolumes": [{"name": "a", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "a", "mountPath": "/a"}],
    "service.type": "NodePort",
    "httpRoute.parentRefs": [{"name": "a"}],
    "networkPolicy.clients": [{"podSelector": {}}],
    "networkPolicy.monitoring": [{"podSelector": {}}],
    "networkPolicy.egress": [{}],
    "autoscaling.kind": "keda",
    "autoscaling.behavior": {"scaleUp": {"stabilizationWindowSeconds": 1}},
    "autoscaling.keda.serverAddress": "http://a",
    "monitoring.monitor.create": "never",
    "monitoring.monitor.kind": "ServiceMonitor",
    "monitoring.monitor.interval": "31s",
    "monitoring.monitor.scrapeTimeout": "11s",
    "monitoring.rules.create": "never",
    **{f"monitoring.rules.alerts.{name}": {"for": "9m"} for name in VALUES["monitoring"]["rules"]["alerts"]},
    "extraObjects": [{"kind": "A"}],
}
# What has to change with a value, because a rule ties the two together. Alone it does not make the difference.
TOGETHER: dict[str, dict[str, Any]] = {
    "tensorParallelSize": {"gpu": {"count": 2}},
    "gpu.count": {"tensorParallelSize": 2},
    "nodes": {"tensorParallelSize": 2},
    "device": {"speculative": {"draftWindowSize": 64}},
}
CPU = merged(EXAMPLES["cpu"], EVERYTHING, {"autoscaling": {"enabled": False}})
READY_FOR_KEDA = merged(EVERYTHING, HPA, {"autoscaling": {"keda": {"serverAddress": "http://prometheus"}}})
NO_ROUTE = merged(EVERYTHING, {"httpRoute": {"enabled": False}})
ONE_WRITER = merged(EVERYTHING, {"jitCache": {"accessModes": ["ReadWriteOnce"]}})
CONTEXTS = (
    {},
    EVERYTHING,
    merged(EVERYTHING, HPA),
    merged(EVERYTHING, KEDA),
    merged(EVERYTHING, TWO_NODES),
    CPU,
    READY_FOR_KEDA,
    NO_ROUTE,
    ONE_WRITER,
)


def changed(path: str, default: Any) -> Any:
    """Return another value than the default."""
    if path in OTHER:
        return OTHER[path]
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + 1
    if isinstance(default, str):
        return "1Ei" if path.endswith(".size") else "other"
    if isinstance(default, list):
        return ["/other"] if default == ["/v1"] else ["ReadWriteMany"] if default else ["other"]
    return {"other": "x"}


Render = Callable[[dict[str, Any]], dict[str, str] | None]


@pytest.fixture(scope="module")
def render_filled(tmp_path_factory: pytest.TempPathFactory) -> Render:
    """Render the chart with a dashboard and a rule, so that the values about them have an effect.

    None stands for values that a rule refuses, since they go with others.
    """
    folder = shutil.copytree(CHART, tmp_path_factory.mktemp("filled") / "chart")
    (folder / "dashboards" / "a.json").write_text("{}")
    (folder / "rules" / "a.yaml").write_text("groups: []\n")
    chart = helm_python.Chart.load(folder)

    def render(values: dict[str, Any]) -> dict[str, str] | None:
        try:
            return chart.render(values, name="demo", namespace="serving")
        except helm_python.HelmError as error:
            assert VALIDATION in str(error), error
            return None

    return render


@pytest.fixture(scope="module")
def without_change(render_filled: Render) -> list[dict[str, str] | None]:
    """What each context renders to."""
    return [render_filled(context) for context in CONTEXTS]


@pytest.mark.parametrize("path", DOCUMENTED)
def test_every_value_does_something(
    render_filled: Render, without_change: list[dict[str, str] | None], path: str
) -> None:
    change = merged(at(path, changed(path, DOCUMENTED[path].default)), TOGETHER.get(path, {}))
    for context, before in zip(CONTEXTS, without_change, strict=True):
        after = render_filled(merged(context, change))
        if None not in (before, after) and before != after:
            return
    pytest.fail(f"no difference: {change}")


# YAML takes these for a number and for truth, unless a template puts them between quotes.
LIKE_SOMETHING_ELSE = ("1e3", "true")


@pytest.mark.parametrize("path", [path for path, value in DOCUMENTED.items() if isinstance(value.default, str)])
def test_a_text_stays_a_text(path: str) -> None:
    for text in LIKE_SOMETHING_ELSE:
        change = at(path, text)
        if not jsonschema.Draft7Validator(SCHEMA).is_valid(merged(VALUES, change)):
            continue
        for context in (EVERYTHING, READY_FOR_KEDA, CPU):
            values = merged(context, change)
            wrong = [line for item in manifests(values) for line in mistakes(item, "1.34")]
            assert wrong == [], (text, wrong)
            options = yaml.safe_load(engine_yaml(values))
            assert all(isinstance(options[name], str) for name in TEXT_OPTIONS if name in options)


TEXT_OPTIONS = ("model-path", "revision", "served-model-name", "speculative-draft-model-path", "pair")
TEXT_OPTIONS += ("speculative-draft-model-revision",)


def used_values(source: str) -> Iterator[str]:
    """Yield the dotted paths of the values that a template names, also relative to a ``with``."""
    scopes: list[str | None] = [None]
    for action in re.findall(r"\{\{-?\s*(.*?)\s*-?\}\}", source, re.DOTALL):
        if action.startswith(("/*", '"')):
            continue
        inside = re.sub(r'"(?:\\.|[^"\\])*"', '""', action)
        yield from re.findall(r"(?:\$|\$root|\.root)?\.Values((?:\.\w+)+)", inside)
        yield from re.findall(r"\$v((?:\.\w+)+)", inside)
        if scopes[-1] is not None:
            yield from (f"{scopes[-1]}{name}" for name in re.findall(r"(?:^|[\s(])((?:\.\w+)+)", inside))
        keyword, _, expression = inside.partition(" ")
        if keyword in ("if", "define"):
            scopes.append(scopes[-1])
        elif keyword in ("with", "range"):
            exact = re.fullmatch(r"(?:\$v|\$?\.Values)((?:\.\w+)+)", expression.strip())
            scopes.append(exact[1] if exact and keyword == "with" else None)
        elif keyword == "end":
            scopes.pop()
        elif keyword == "else" and expression.startswith("with"):
            scopes[-1] = None


def exists(path: str) -> bool:
    node: Any = VALUES
    for key in path.strip(".").split("."):
        if not isinstance(node, dict) or key not in node:
            return False
        node = node[key]
    return True


def test_every_value_used_exists() -> None:
    templates = [path for path in (CHART / "templates").rglob("*") if path.is_file()]
    used = {(path.name, name) for path in templates for name in used_values(path.read_text())}
    assert len(used) > 150
    assert sorted((file, name) for file, name in used if not exists(name)) == []


def test_a_value_that_does_not_exist_is_seen() -> None:
    source = (
        '{{ with .Values.ingress }}{{ if .enabled }}{{ .clasName }}{{ end }}{{ end }}{{ $.Values.nodez }}{{ "$v.x" }}'
    )
    assert [name for name in used_values(source) if not exists(name)] == [".ingress.clasName", ".nodez"]


def test_a_parent_chart_may_share_values() -> None:
    assert texts({"global": {"imageRegistry": "x"}}) == texts({})


def test_values_are_not_changed_by_rendering() -> None:
    before = copy.deepcopy(EVERYTHING)
    assert texts(EVERYTHING) == texts(EVERYTHING)
    assert before == EVERYTHING


def test_the_chart_names_the_projects_version() -> None:
    project = tomllib.loads((CHART.parents[1] / "pyproject.toml").read_text())["project"]
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == project["version"]


def test_the_readme_lists_the_examples() -> None:
    assert set(re.findall(r"^\| `([\w.-]+)\.yaml` \|", (CHART / "README.md").read_text(), re.MULTILINE)) == set(
        EXAMPLES
    )
