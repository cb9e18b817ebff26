"""Random values that the schema allows: the chart takes them or refuses them with its own words, nothing else.

What it takes has to be a valid manifest on every Kubernetes version, and an engine file that YAML reads back.
"""

import json
from typing import Any

import helm_python
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manifest_schemas import KUBERNETES, mistakes
from matrix import CASES
from rendering import VALIDATION, at, merged, parsed, texts
from value_docs import CHART, documented

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())

# Pieces of Kubernetes' own objects, which the schema leaves to Kubernetes. Random ones would test the generator only.
PIECES: dict[str, list[Any]] = {
    "extraEnv": [
        [{"name": "A_1", "value": "x: {{ y }}"}],
        [{"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}],
    ],
    "extraEnvFrom": [[{"secretRef": {"name": "a"}}]],
    "imagePullSecrets": [[{"name": "a"}, {"name": "b"}]],
    "resources": [{"requests": {"cpu": 1, "memory": "1Gi"}}, {"limits": {"memory": "64Gi", "rdma/hca": 1}}],
    "podSecurityContext": [{"runAsUser": None, "fsGroup": None}, {"supplementalGroups": [5]}],
    "securityContext": [{"capabilities": {"add": ["IPC_LOCK"]}}, {"readOnlyRootFilesystem": False}],
    "tolerations": [[{"operator": "Exists"}]],
    "affinity": [{"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}],
    "topologySpreadConstraints": [[{"maxSkew": 1, "topologyKey": "a", "whenUnsatisfiable": "DoNotSchedule"}]],
    "initContainers": [[{"name": "a", "image": "b", "command": ["c", "-d"]}]],
    "extraVolumes": [[{"name": "a", "emptyDir": {}}]],
    "extraVolumeMounts": [[{"name": "a", "mountPath": "/a"}]],
    "httpRoute.parentRefs": [[{"name": "a"}], [{"name": "a", "namespace": "b", "sectionName": "c"}]],
    "networkPolicy.clients": [[{"podSelector": {}}], [{"ipBlock": {"cidr": "10.0.0.0/8"}}]],
    "networkPolicy.monitoring": [[{"namespaceSelector": {}}]],
    "networkPolicy.egress": [[{}], [{"ports": [{"port": 53, "protocol": "UDP"}]}]],
    "autoscaling.behavior": [{}, {"scaleUp": {"stabilizationWindowSeconds": 0}}],
    "extraObjects": [["apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: a\n"]],
}
OPTIONS = [
    {"page-size": 64},
    {"max-total-tokens": 60_000, "chunked_prefill_size": 2048},
    {"enable_hierarchical_cache": True},
    {"dp-size": 2, "enable-dp-attention": True},
    {"model-loader-extra-config": {"a": ["{{ b }}", None, 1.5, "yes"]}, "served-model-name": "- x: #y"},
    {"port": 1},
    {"speculative-algorithm": "EAGLE", "max_running_requests": None},
]


def allowed(node: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Return values that a node of the schema allows; the keywords are those that the schema uses."""
    if "$ref" in node:
        return allowed(SCHEMA["definitions"][node["$ref"].rpartition("/")[2]])
    if "enum" in node:
        return st.sampled_from(node["enum"])
    if "anyOf" in node:
        return st.one_of([allowed(branch) for branch in node["anyOf"]])
    kinds = [node["type"]] if isinstance(node["type"], str) else node["type"]
    return st.one_of([allowed_kind(kind, node) for kind in kinds])


def from_pattern(pattern: str) -> st.SearchStrategy[str]:
    """Return texts that match a pattern to the last character: `$` would take a line feed behind it."""
    return st.from_regex(pattern.replace("$", r"\Z"), alphabet=st.characters(codec="ascii"))


def allowed_kind(kind: str, node: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Return values of one JSON type."""
    least, most = node.get("minimum"), node.get("maximum")
    if kind == "integer":
        return st.integers(least, most)
    if kind == "number":
        low, high = node.get("exclusiveMinimum", least), node.get("exclusiveMaximum", most)
        return st.floats(low, high, exclude_min=least is None, exclude_max=most is None)
    if kind == "string":
        pattern = node.get("pattern")
        return st.text() if pattern is None else from_pattern(pattern)
    if kind == "array":
        items = allowed(node["items"])
        return st.lists(items, min_size=node.get("minItems", 0), max_size=node.get("maxItems", 4), unique_by=repr)
    if kind == "object" and "properties" in node:
        optional = {name: allowed(child) for name, child in node["properties"].items()}
        return st.fixed_dictionaries({}, optional=optional)
    if kind == "object":
        ((names, child),) = node["patternProperties"].items()
        return st.dictionaries(from_pattern(names), allowed(child), max_size=3)
    return {"boolean": st.booleans(), "null": st.none()}[kind]


def strategy(path: str) -> st.SearchStrategy[Any]:
    """Return values for one place of the values file."""
    if path in PIECES:
        return st.sampled_from(PIECES[path])
    if path == "engineConfig":
        return st.sampled_from(OPTIONS)
    node = SCHEMA
    for key in path.split("."):
        node = node["properties"][key]
    return allowed(node)


PATHS = [".".join(value.path) for value in documented((CHART / "values.yaml").read_text())]
CHANGES = st.sampled_from(PATHS).flatmap(lambda path: strategy(path).map(lambda value: at(path, value)))


@st.composite
def values_of_the_chart(draw: st.DrawFn) -> dict[str, Any]:
    """Some case of the tests with up to six random changes."""
    case = CASES[draw(st.sampled_from(sorted(CASES)))]
    return merged(case, *draw(st.lists(CHANGES, max_size=6)))


def test_random_values() -> None:
    refused = taken = 0

    @settings(max_examples=150, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(values_of_the_chart())
    def render(values: dict[str, Any]) -> None:
        nonlocal refused, taken
        try:
            rendered = texts(values)
        except helm_python.HelmError as error:
            first, *lines = str(error).splitlines()
            assert first.startswith(f"execution error at ({VALIDATION}:"), (values, str(error))
            assert lines and all(": " in line for line in lines), (values, str(error))
            refused += 1
            return
        taken += 1
        objects = parsed(rendered)
        for kubernetes in KUBERNETES:
            assert [line for item in objects for line in mistakes(item, kubernetes)] == [], values
        (text,) = [item["data"]["engine.yaml"] for item in objects if "engine.yaml" in item.get("data", {})]
        assert isinstance(yaml.safe_load(text), dict)

    render()
    assert taken > 50 and refused > 10, (taken, refused)
