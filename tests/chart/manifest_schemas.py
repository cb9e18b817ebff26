"""Judges manifests as a Kubernetes API server of some version would: unknown fields are mistakes."""

import functools
from typing import Any

import jsonschema
from kubernetes_validate.utils import all_versions, major_minor, schema_contents
from referencing import Registry, Resource

from cached_tools import crds

KUBERNETES = ("1.28", "1.31", "1.34")


def _strict(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a CRD's structural schema as a JSON schema that refuses unknown fields."""
    strict = {key: value for key, value in schema.items() if not key.startswith("x-") and key != "format"}
    if schema.get("x-kubernetes-int-or-string"):
        strict.pop("type", None)
        strict["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if "properties" in schema:
        strict["properties"] = {name: _strict(child) for name, child in schema["properties"].items()}
        if "additionalProperties" not in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            strict["additionalProperties"] = False
    if isinstance(schema.get("additionalProperties"), dict):
        strict["additionalProperties"] = _strict(schema["additionalProperties"])
    if "items" in schema:
        strict["items"] = _strict(schema["items"])
    return strict


@functools.cache
def _custom() -> dict[tuple[str, str], jsonschema.Draft202012Validator]:
    validators = {}
    for crd in crds():
        group, kind = crd["spec"]["group"], crd["spec"]["names"]["kind"]
        for version in crd["spec"]["versions"]:
            schema = _strict(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}
            validator = jsonschema.Draft202012Validator(schema)
            validators[f"{group}/{version['name']}", kind] = validator
    return validators


@functools.cache
def _definitions(folder: str) -> Resource[Any]:
    return Resource.from_contents(schema_contents(f"kubernetes-json-schema/{folder}/_definitions.json", folder))


@functools.cache
def _built_in(api_version: str, kind: str, kubernetes: str) -> jsonschema.Draft202012Validator:
    """Return the validator that `kubernetes_validate.validate` makes anew each time, which takes it a while."""
    (release,) = [version for version in set(all_versions()) if major_minor(version) == kubernetes]
    folder = f"v{release}-local-strict"
    group, _, version = api_version.rpartition("/")
    name = "-".join(filter(None, [kind.lower(), group.partition(".")[0], version]))
    schema = schema_contents(f"kubernetes-json-schema/{folder}/{name}.json", kubernetes)
    registry: Registry[Any] = _definitions(folder) @ (Resource.from_contents(schema) @ Registry())
    return jsonschema.Draft202012Validator(schema, registry=registry)


def mistakes(manifest: dict[str, Any], kubernetes: str) -> list[str]:
    """Return what is wrong with a manifest in a Kubernetes version, one line each."""
    key = (manifest["apiVersion"], manifest["kind"])
    validator = _custom().get(key) or _built_in(*key, kubernetes)
    name = f"{manifest['kind']} {manifest['metadata']['name']}"
    return [f"{name} {error.json_path}: {error.message}" for error in validator.iter_errors(manifest)]
