"""What a person types: real Helm 4 and 3 lint the chart, render it as the tests do, and refuse what they must."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cached_tools import HELM, helm
from rendering import EXAMPLES, NAMESPACE, RELEASE, manifests, refusal
from value_docs import CHART

RunHelm = Callable[..., str]
MONITORING = [f"monitoring.coreos.com/v1/{kind}" for kind in ("PodMonitor", "ServiceMonitor", "PrometheusRule")]


@pytest.fixture(params=HELM)
def run_helm(request: pytest.FixtureRequest, tmp_path: Path) -> RunHelm:
    def run(*arguments: str, status: int = 0) -> str:
        environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
        result = subprocess.run(
            [helm(request.param), *arguments], capture_output=True, text=True, env=environment, cwd=CHART, timeout=60
        )
        assert result.returncode == status, result.stdout + result.stderr
        return result.stdout + result.stderr

    return run


def test_it_is_the_version_it_is_taken_for(run_helm: RunHelm, request: pytest.FixtureRequest) -> None:
    assert run_helm("version", "--short").startswith(f"v{request.node.callspec.params['run_helm']}.")


def test_lint(run_helm: RunHelm) -> None:
    examples = [f"--values=examples/{example}.yaml" for example in EXAMPLES]
    for values in ([], *([example] for example in examples)):
        printed = run_helm("lint", ".", "--strict", *values)
        assert "0 chart(s) failed" in printed and "WARNING" not in printed


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_render_alike(run_helm: RunHelm, example: str) -> None:
    printed = run_helm("template", RELEASE, ".", f"--namespace={NAMESPACE}", f"--values=examples/{example}.yaml")
    rendered = [item for item in yaml.load_all(printed, yaml.CSafeLoader) if item]

    def by_name(objects: list[Any]) -> dict[tuple[str, str], Any]:
        return {(item["kind"], item["metadata"]["name"]): item for item in objects}

    assert by_name(rendered) == by_name(manifests(EXAMPLES[example]))


def test_monitors_follow_the_apis_of_the_cluster(run_helm: RunHelm) -> None:
    def kinds(*arguments: str) -> set[str]:
        printed = run_helm("template", RELEASE, ".", *arguments)
        return {item["kind"] for item in yaml.load_all(printed, yaml.CSafeLoader) if item}

    apis = [f"--api-versions={api}" for api in MONITORING]
    assert "PodMonitor" not in kinds()
    assert "PodMonitor" in kinds(*apis)
    assert "ServiceMonitor" in kinds(*apis, "--set=monitoring.monitor.kind=ServiceMonitor")
    assert "PodMonitor" not in kinds(*apis, "--set=monitoring.monitor.create=never")
    assert "PodMonitor" in kinds("--set=monitoring.monitor.create=always")


def test_an_old_cluster_is_refused(run_helm: RunHelm) -> None:
    printed = run_helm("template", RELEASE, ".", "--kube-version=1.27.9", status=1)
    assert "which is incompatible with Kubernetes" in printed


def test_values_from_the_command_line(run_helm: RunHelm) -> None:
    """Numbers given with ``--set`` are of another kind than those from a file, with which a template may stumble."""
    settings = ["speculative.draftKvRatio=0.5", "speculative.draftWindowSize=1048576", "maxRunningRequests=16"]
    printed = run_helm("template", RELEASE, ".", *(f"--set={setting}" for setting in settings))
    (text,) = [
        item["data"]["engine.yaml"]
        for item in yaml.load_all(printed, yaml.CSafeLoader)
        if item and "engine.yaml" in item.get("data", {})
    ]
    options = yaml.safe_load(text)
    assert options["speculative-draft-kv-ratio"] == 0.5
    assert (options["speculative-draft-window-size"], options["max-running-requests"]) == (1048576, 16)


def test_null_takes_a_default_away(run_helm: RunHelm) -> None:
    printed = run_helm("template", RELEASE, ".", "--set=memFractionStatic=null")
    assert "max-running-requests: 8" in printed and "mem-fraction-static" not in printed


def test_a_rule_refuses(run_helm: RunHelm) -> None:
    printed = run_helm("template", RELEASE, ".", "--set=device=cpu", status=1)
    assert refusal({"device": "cpu"}).splitlines()[1] in printed


def test_the_schema_refuses(run_helm: RunHelm) -> None:
    printed = run_helm("template", RELEASE, ".", "--set=speculative.draftKvRatio=1.5", status=1)
    assert "draftKvRatio" in printed and "1" in printed
    printed = run_helm("template", RELEASE, ".", "--set=speculative.draftKvratio=0.5", status=1)
    assert "draftKvratio" in printed


def test_a_package_holds_what_it_needs(run_helm: RunHelm, tmp_path: Path) -> None:
    run_helm("package", ".", f"--destination={tmp_path}")
    (archive,) = tmp_path.glob("sglang-dflash-*.tgz")
    printed = run_helm("template", RELEASE, str(archive), "--values=examples/cpu.yaml")
    assert "What `helm test` asks a server" in printed
