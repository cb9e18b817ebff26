"""Renders the chart in this process."""

import functools
import json
from typing import Any

import helm_python
import yaml

from value_docs import CHART

RELEASE, NAMESPACE = "demo", "serving"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
EXAMPLES = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((CHART / "examples").glob("*.yaml"))}
VALIDATION = "sglang-dflash/templates/validate.yaml"


@functools.cache
def _chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


def texts(values: dict[str, Any], release: str = RELEASE) -> dict[str, str]:
    """Return the rendered templates that are not empty, by path. Raises `helm_python.HelmError`."""
    rendered = _chart().render(values, name=release, namespace=NAMESPACE)
    return {path: text for path, text in sorted(rendered.items()) if text.strip()}


def manifests(values: dict[str, Any], release: str = RELEASE) -> list[dict[str, Any]]:
    """Return the rendered objects, to be read only: they are kept for the next test that asks for them."""
    return _manifests(json.dumps(values), release)


@functools.cache
def _manifests(values_json: str, release: str) -> list[dict[str, Any]]:
    return parsed(texts(json.loads(values_json), release))


def parsed(rendered: dict[str, str]) -> list[dict[str, Any]]:
    """Return the objects in rendered templates."""
    texts_of_objects = [text for path, text in rendered.items() if path.endswith(".yaml")]
    return [item for text in texts_of_objects for item in yaml.load_all(text, yaml.CSafeLoader) if item]


def find(objects: list[dict[str, Any]], kind: str, suffix: str = "") -> dict[str, Any]:
    """Return the one object of a kind whose name ends with `suffix`."""
    (found,) = [item for item in objects if item["kind"] == kind and item["metadata"]["name"].endswith(suffix)]
    return found


def pod_specs(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the pod specs of all workloads."""
    specs = []
    for item in objects:
        if item["kind"] == "Deployment":
            specs.append(item["spec"]["template"]["spec"])
        elif item["kind"] == "LeaderWorkerSet":
            template = item["spec"]["leaderWorkerTemplate"]
            specs += [template["leaderTemplate"]["spec"], template["workerTemplate"]["spec"]]
        elif item["kind"] == "Pod":
            specs.append(item["spec"])
    return specs


def engine_yaml(values: dict[str, Any]) -> str:
    """Return the engine's configuration file."""
    config_maps = [item for item in manifests(values) if item["kind"] == "ConfigMap"]
    (text,) = [item["data"]["engine.yaml"] for item in config_maps if "engine.yaml" in item.get("data", {})]
    return str(text)


def refusal(values: dict[str, Any]) -> str:
    """Return the message with which the chart refuses `values`; fails if it takes them."""
    try:
        texts(values)
    except helm_python.HelmError as error:
        return str(error)
    raise AssertionError(f"the chart takes {values}")


def merged(*layers: dict[str, Any]) -> dict[str, Any]:
    """Return values laid over each other as Helm does: mappings merge, everything else is replaced."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else value
    return result


def at(path: str, value: Any) -> dict[str, Any]:
    """Return values with one value at a dotted path."""
    first, _, rest = path.partition(".")
    return {first: at(rest, value) if rest else value}
