"""Rendered manifests: valid on each Kubernetes version, safe, consistent with each other, and as they were."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

import golden
from manifest_schemas import KUBERNETES, mistakes
from matrix import CASES, EVERYTHING, KEDA, TWO_NODES
from rendering import EXAMPLES, at, engine_yaml, find, manifests, merged, parsed, pod_specs, texts
from server_ext.drain import EXIT_SECONDS
from value_docs import CHART


@pytest.fixture(params=CASES)
def values(request: pytest.FixtureRequest) -> dict[str, Any]:
    return CASES[request.param]


@pytest.mark.parametrize("kubernetes", KUBERNETES)
def test_manifests_are_valid(values: dict[str, Any], kubernetes: str) -> None:
    objects = manifests(values)
    assert [line for item in objects for line in mistakes(item, kubernetes)] == []
    names = [(item["kind"], item["metadata"]["name"]) for item in objects]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("Deployment", {"spec": {"strategey": {}}}),
        ("Service", {"spec": {"ports": [{"port": "http"}]}}),
        ("PodMonitor", {"spec": {"endpoints": []}}),
        ("HTTPRoute", {"spec": {"rules": [{"matches": [{"path": {"type": "Prefix"}}]}]}}),
        ("ScaledObject", {"spec": {"scaleTargetRef": {"nam": "x"}}}),
        ("LeaderWorkerSet", {"spec": {"leaderWorkerTemplate": {"size": "two"}}}),
    ],
)
def test_the_judge_sees_mistakes(kind: str, change: dict[str, Any]) -> None:
    objects = manifests(EVERYTHING) + manifests(merged(TWO_NODES, KEDA))
    item = next(item for item in objects if item["kind"] == kind)
    assert mistakes(item, "1.31") == [] != mistakes(merged(item, change), "1.31")


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_render_as_before(example: str) -> None:
    assert golden.document(example) == (golden.FOLDER / f"{example}.yaml").read_text(), "run `make chart-golden`"


def test_no_example_is_forgotten() -> None:
    assert {path.stem for path in golden.FOLDER.glob("*.yaml")} == set(EXAMPLES)


# The profile "restricted" of the Pod Security Standards.
RESTRICTED_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected"}
RESTRICTED_VOLUMES |= {"secret"}


def insecurities(pod: dict[str, Any]) -> list[str]:
    """Return what of a pod the profile "restricted" refuses."""
    found = [key for key in ("hostNetwork", "hostPID", "hostIPC") if pod.get(key)]
    found += [f"volume {v['name']}" for v in pod.get("volumes", []) if not v.keys() - {"name"} <= RESTRICTED_VOLUMES]
    shared = pod.get("securityContext", {})
    for container in pod.get("initContainers", []) + pod["containers"]:
        own = container.get("securityContext", {})
        both = shared | own
        profile = both.get("seccompProfile", {}).get("type")
        wrong = {
            "privileged": own.get("privileged", False),
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is not False,
            "runAsNonRoot": both.get("runAsNonRoot") is not True,
            "runAsUser": both.get("runAsUser") == 0,
            "seccompProfile": profile not in ("RuntimeDefault", "Localhost"),
            "capabilities": "ALL" not in own.get("capabilities", {}).get("drop", [])
            or not set(own["capabilities"].get("add", [])) <= {"NET_BIND_SERVICE"},
            "hostPort": any("hostPort" in port for port in container.get("ports", [])),
        }
        found += [f"{container['name']}: {name}" for name, is_wrong in wrong.items() if is_wrong]
    return found


def test_pods_are_restricted(values: dict[str, Any]) -> None:
    pods = pod_specs(manifests(values))
    assert pods
    for pod in pods:
        assert insecurities(pod) == []
        assert pod["automountServiceAccountToken"] is False
        own = [container for container in pod["containers"] if container["name"] in ("engine", "smoke")]
        assert own and all(container["securityContext"]["readOnlyRootFilesystem"] for container in own)


def test_the_profile_sees_insecurities() -> None:
    (pod,) = pod_specs([item for item in manifests({}) if item["kind"] == "Deployment"])
    for change in (
        {"hostNetwork": True},
        {"volumes": [{"name": "x", "hostPath": {"path": "/"}}]},
        {"securityContext": {"runAsNonRoot": False}},
        {"containers": [{"name": "x", "securityContext": {"privileged": True}}]},
    ):
        assert insecurities(merged(pod, change)), change


def test_every_directory_that_is_written_to_is_a_volume(values: dict[str, Any]) -> None:
    for pod in pod_specs(manifests(values)):
        for container in pod["containers"]:
            if container["name"] != "engine":
                continue
            mounts = [mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")]
            names = {volume["name"] for volume in pod["volumes"]}
            assert {mount["name"] for mount in container["volumeMounts"]} <= names
            for variable in container["env"]:
                if re.search(r"^HOME$|_HOME$|_DIR$|CACHE|WORKSPACE", variable["name"]):
                    assert any(f"{variable['value']}/".startswith(f"{mount}/") for mount in mounts), variable
            assert "/dev/shm" in mounts
            (shm,) = [volume for volume in pod["volumes"] if volume["name"] == "shm"]
            assert shm["emptyDir"]["medium"] == "Memory" and shm["emptyDir"]["sizeLimit"]


def test_environment_names_are_unique(values: dict[str, Any]) -> None:
    for pod in pod_specs(manifests(values)):
        names = [variable["name"] for variable in pod["containers"][0].get("env", [])]
        assert len(names) == len(set(names))


def test_extra_environment_wins() -> None:
    (pod, *_) = pod_specs([item for item in manifests(EVERYTHING) if item["kind"] == "Deployment"])
    environment = {variable["name"]: variable.get("value") for variable in pod["containers"][0]["env"]}
    assert environment["HOME"] == "/more" and environment["HF_HOME"] == "/models"


def test_keys_come_by_reference_only() -> None:
    """Keys are files; the Hugging Face token is a reference; none of the Secrets is made by the chart."""
    objects = manifests(EVERYTHING)
    assert not [item for item in objects if item["kind"] == "Secret"]
    pod = find(objects, "Deployment")["spec"]["template"]["spec"]
    options = yaml.safe_load(engine_yaml(EVERYTHING))
    assert not {"api-key", "admin-api-key"} & options.keys()
    (mount,) = [mount for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == "keys"]
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "keys"]
    assert volume["projected"]["defaultMode"] == 0o440, "any user id reads them through fsGroup"
    sources = [source["secret"] for source in volume["projected"]["sources"]]
    paths = {f"{mount['mountPath']}/{source['items'][0]['path']}": source["name"] for source in sources}
    assert paths == {options["api-key-file"]: "keys", options["admin-api-key-file"]: "keys"}
    (token,) = [variable for variable in pod["containers"][0]["env"] if variable["name"] == "HF_TOKEN"]
    assert token["valueFrom"] == {"secretKeyRef": {"name": "hugging-face", "key": "token"}}
    for container in pod["containers"]:
        literal = [variable["name"] for variable in container["env"] if "value" in variable]
        assert not [name for name in literal if re.search(r"TOKEN|_KEY|SECRET|PASSWORD", name)]


def test_selectors_find_the_pods_they_are_for(values: dict[str, Any]) -> None:
    objects = manifests(values)
    service = find(objects, "Service")["spec"]["selector"]

    def matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
        return selector.items() <= labels.items()

    workloads = [item for item in objects if item["kind"] in ("Deployment", "LeaderWorkerSet")]
    assert len(workloads) == 1
    (workload,) = workloads
    if workload["kind"] == "Deployment":
        servers, others = [workload["spec"]["template"]], []
        assert workload["spec"]["selector"]["matchLabels"] == service
    else:
        template = workload["spec"]["leaderWorkerTemplate"]
        servers, others = [template["leaderTemplate"]], [template["workerTemplate"]]
    others += [item for item in objects if item["kind"] == "Pod"]
    for item in objects:
        selector = {
            "PodDisruptionBudget": lambda item: item["spec"]["selector"]["matchLabels"],
            "PodMonitor": lambda item: item["spec"]["selector"]["matchLabels"],
            "Service": lambda item: item["spec"]["selector"],
        }.get(item["kind"])
        if selector is not None:
            assert all(matches(selector(item), pod["metadata"]["labels"]) for pod in servers), item["kind"]
            assert not any(matches(selector(item), pod["metadata"]["labels"]) for pod in others), item["kind"]
        if item["kind"] == "NetworkPolicy":
            chosen = item["spec"]["podSelector"]["matchLabels"]
            assert all(matches(chosen, pod["metadata"]["labels"]) for pod in servers + others)
        if item["kind"] == "ServiceMonitor":
            labels = find(objects, "Service")["metadata"]["labels"]
            assert matches(item["spec"]["selector"]["matchLabels"], labels)
        if item["kind"] in ("HorizontalPodAutoscaler", "ScaledObject"):
            target = item["spec"]["scaleTargetRef"]
            assert target == {
                "apiVersion": workload["apiVersion"],
                "kind": workload["kind"],
                "name": workload["metadata"]["name"],
            }
            assert "replicas" not in workload["spec"]


def test_ports_are_named_and_lead_to_the_engine(values: dict[str, Any]) -> None:
    objects = manifests(values)
    port = yaml.safe_load(engine_yaml(values))["port"]
    for pod in pod_specs(objects):
        for container in pod["containers"]:
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                if probe in container:
                    assert container[probe]["httpGet"]["port"] == "http"
            if container["name"] == "engine":
                assert [(p["name"], p["containerPort"]) for p in container["ports"]] == [("http", port)]
    assert find(objects, "Service")["spec"]["ports"][0]["targetPort"] == "http"


@pytest.mark.parametrize("seconds", [1, 9, 10, 1795, 1800, 86400])
def test_the_start_may_take_as_long_as_told(seconds: int) -> None:
    deployment = find(manifests({"startupTimeoutSeconds": seconds}), "Deployment")["spec"]
    probe = deployment["template"]["spec"]["containers"][0]["startupProbe"]
    assert seconds <= probe["periodSeconds"] * probe["failureThreshold"] < seconds + 10
    assert deployment["progressDeadlineSeconds"] > seconds


def test_a_pod_is_killed_only_after_the_drain() -> None:
    for values in ({}, {"drainTimeoutSeconds": 600, "preStopSleepSeconds": 30}, {"preStopSleepSeconds": 0}):
        pod = find(manifests(values), "Deployment")["spec"]["template"]["spec"]
        drain = yaml.safe_load(engine_yaml(values))["drain-timeout-seconds"]
        lifecycle = pod["containers"][0].get("lifecycle")
        pause = int(lifecycle["preStop"]["exec"]["command"][1]) if lifecycle else 0
        assert pod["terminationGracePeriodSeconds"] > pause + drain + EXIT_SECONDS


def test_one_gpu_is_enough_to_update() -> None:
    strategy = find(manifests({}), "Deployment")["spec"]["strategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}


def test_spare_gpus_avoid_the_gap() -> None:
    rollout = {"maxSurge": "50%", "maxUnavailable": 0}
    assert find(manifests({"rollout": rollout}), "Deployment")["spec"]["strategy"]["rollingUpdate"] == rollout
    group = find(manifests(TWO_NODES | {"rollout": rollout}), "LeaderWorkerSet")["spec"]
    assert group["rolloutStrategy"]["rollingUpdateConfiguration"] == rollout


def test_a_claim_stays_when_told() -> None:
    objects = manifests({"jitCache": {"persistent": True}})
    assert find(objects, "PersistentVolumeClaim", "-models")["metadata"]["annotations"] == {
        "helm.sh/resource-policy": "keep"
    }
    assert "annotations" not in find(objects, "PersistentVolumeClaim", "-cache")["metadata"]


def test_only_the_api_is_published() -> None:
    objects = manifests(EVERYTHING)
    paths = [path["path"] for path in find(objects, "Ingress")["spec"]["rules"][0]["http"]["paths"]]
    matches = find(objects, "HTTPRoute")["spec"]["rules"][0]["matches"]
    assert paths == ["/v1"] == [match["path"]["value"] for match in matches]


def test_the_network_policy_lets_nobody_else_in() -> None:
    closed = find(manifests({"networkPolicy": {"enabled": True}}), "NetworkPolicy")["spec"]
    release = {"app.kubernetes.io/name": "sglang-dflash", "app.kubernetes.io/instance": "demo"}
    assert closed["policyTypes"] == ["Ingress"]
    assert closed["ingress"] == [{"from": [{"podSelector": {"matchLabels": release}}]}]

    opened = find(manifests(EVERYTHING), "NetworkPolicy")["spec"]
    assert opened["policyTypes"] == ["Ingress", "Egress"]
    ports = [{"port": "http", "protocol": "TCP"}]
    peers = EVERYTHING["networkPolicy"]["clients"] + EVERYTHING["networkPolicy"]["monitoring"]
    assert opened["ingress"] == [*closed["ingress"], {"ports": ports, "from": peers}]


def test_a_group_of_nodes_joins_at_its_leader() -> None:
    template = find(manifests(TWO_NODES), "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    assert template["size"] == 2
    for role in ("leaderTemplate", "workerTemplate"):
        arguments = template[role]["spec"]["containers"][0]["args"]
        assert arguments[2:] == [
            "--nnodes=$(LWS_GROUP_SIZE)",
            "--node-rank=$(LWS_WORKER_INDEX)",
            "--dist-init-addr=$(LWS_LEADER_ADDRESS):20000",
        ]
    assert "readinessProbe" not in template["workerTemplate"]["spec"]["containers"][0]


# Fields that the API server refuses to change.
def immutable(objects: list[dict[str, Any]]) -> dict[tuple[str, str], Any]:
    fields = {}
    for item in objects:
        key = (item["kind"], item["metadata"]["name"])
        if item["kind"] == "Deployment":
            fields[key] = item["spec"]["selector"]
        elif item["kind"] == "PersistentVolumeClaim":
            fields[key] = {name: value for name, value in item["spec"].items() if name != "resources"}
    return fields


UPGRADES = {
    "ratio and window": {"speculative": {"draftKvRatio": 0.5, "draftWindowSize": 1024}},
    "everything": merged(EVERYTHING, {"modelCache": {"storageClassName": "", "accessModes": ["ReadWriteOnce"]}}),
    "labels": {"commonLabels": {"a": "b"}, "podLabels": {"app.kubernetes.io/component": "mine"}},
    "sizes": {"modelCache": {"size": "400Gi"}, "replicas": 0},
    "tag": {"image": {"tag": "other"}},
}


@pytest.mark.parametrize("upgrade", UPGRADES)
def test_an_upgrade_changes_no_immutable_field(upgrade: str) -> None:
    before, after = immutable(manifests({})), immutable(manifests(UPGRADES[upgrade]))
    assert before.keys() <= after.keys()
    assert {key: after[key] for key in before} == before


def test_an_upgrade_of_the_chart_alone_changes_no_pod(tmp_path: Path) -> None:
    """A new chart version must not restart servers, nor touch what cannot change."""
    copy_of_chart = shutil.copytree(CHART, tmp_path / "chart")
    about = (copy_of_chart / "Chart.yaml").read_text()
    assert "\nversion: " in about
    (copy_of_chart / "Chart.yaml").write_text(re.sub(r"\nversion: .*", "\nversion: 99.0.0", about))
    newer = parsed(helm_python.Chart.load(copy_of_chart).render({}, name="demo", namespace="serving"))
    older = manifests({})
    assert find(newer, "Deployment")["metadata"] != find(older, "Deployment")["metadata"]
    assert find(newer, "Deployment")["spec"] == find(older, "Deployment")["spec"]
    assert immutable(newer) == immutable(older)


@pytest.mark.parametrize(
    ("change", "rolls"),
    [
        (at("speculative.draftKvRatio", 0.5), True),
        (at("engineConfig.page-size", 64), True),
        (at("replicas", 0), False),
        (at("monitoring.monitor.create", "always"), False),
        (at("service.port", 81), False),
        (at("commonLabels.x", "y"), True),
    ],
)
def test_pods_roll_when_the_engine_changes(change: dict[str, Any], rolls: bool) -> None:
    before, after = (find(manifests(values), "Deployment")["spec"]["template"] for values in ({}, change))
    assert (before != after) is rolls


def test_files_become_dashboards_and_rules(tmp_path: Path) -> None:

    chart = shutil.copytree(CHART, tmp_path / "chart")
    board = {"uid": "pools", "title": "{{ not a template }}", "panels": [{"legendFormat": "{{pod}}"}]}
    (chart / "dashboards" / "pools.json").write_text(json.dumps(board, indent=2))
    alert = {"alert": "A", "expr": "up == 0", "annotations": {"summary": "{{ $labels.pod }} is down"}}
    groups = {"groups": [{"name": "g", "rules": [alert]}]}
    (chart / "rules" / "pools.yaml").write_text("# comment\n" + yaml.safe_dump(groups))
    labels = {"monitoring": {"rules": {"create": "always", "labels": {"release": "stack"}}}}
    objects = parsed(helm_python.Chart.load(chart).render(labels, name="demo", namespace="serving"))
    assert [line for item in objects for line in mistakes(item, "1.34")] == []

    dashboard = find(objects, "ConfigMap", "-dashboard-pools")
    assert json.loads(dashboard["data"]["pools.json"]) == board
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    rule = find(objects, "PrometheusRule", "-pools")
    assert rule["spec"] == groups and rule["metadata"]["labels"]["release"] == "stack"


def test_notes_say_how_to_call_and_what_to_mind() -> None:
    def notes(values: dict[str, Any]) -> str:
        return texts(values)["sglang-dflash/templates/NOTES.txt"]

    assert "can hold 28809 of its tokens" in notes({})
    assert "no key" in notes({}) and "adminApiKey.existingSecret" in notes({})
    assert "no Prometheus operator" in notes({})
    assert "Updates stop the one server" in notes({})
    safe = notes(merged(EVERYTHING, {"rollout": {"maxSurge": 1}}))
    assert "WARNING" not in safe and "Updates stop" not in safe and "Authorization: Bearer $API_KEY" in safe
    assert "without a key" in notes({"service": {"type": "LoadBalancer"}})
    assert "tiny pair" in notes(EXAMPLES["cpu"]) and '"model": "qwen3"' in notes(EXAMPLES["cpu"])
    assert '"model": "qwen3.8-27b"' in notes(EXAMPLES["qwen3.8-27b-h200"])


def test_long_names_fit() -> None:
    for values in ({}, TWO_NODES):
        objects = manifests(values | {"nameOverride": "n" * 63}, release="r" * 53)
        for item in objects:
            # A StatefulSet's pods get its name and ten characters of a hash as a label.
            assert len(item["metadata"]["name"]) <= 63 - len("-0-") or item["kind"] in ("ConfigMap", "Pod")
            assert all(len(value) <= 63 for value in item["metadata"]["labels"].values())
