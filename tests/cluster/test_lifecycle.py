"""The chart in a real cluster: install, serve, upgrade, break, roll back, uninstall.

The tests run in this order on one release; each leaves it serving.
"""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

import cached_tools
from boards import ELSEWHERE, queries
from cluster import STATE, Cluster, eventually
from load import KEY, Load, client, stream
from matrix import EVERYTHING, HPA, KEDA, TWO_NODES
from rendering import EXAMPLES, NAMESPACE, RELEASE, manifests, merged
from value_docs import CHART

pytestmark = pytest.mark.timeout(900)  # the first test waits for the cluster, which may have to be built

SERVICE = f"{RELEASE}-sglang-dflash"
SERVER = f"--selector=app.kubernetes.io/instance={RELEASE},app.kubernetes.io/component=server"
TIMEOUT = "--timeout=300s"
CHOICES: dict[str, Any] = {
    "apiKey": {"existingSecret": "keys"},
    "rollout": {"maxSurge": 1, "maxUnavailable": 0},
    "modelCache": {"persistent": True, "retain": True},
    "jitCache": {"persistent": True, "retain": False},
    # Long enough on two cores that another suite uses, too.
    "drainTimeoutSeconds": 120,
    "monitoring": {"monitor": {"interval": "2s", "scrapeTimeout": "2s"}},
    "resources": {"requests": {"cpu": "100m", "memory": "1Gi"}},
}
CHANGED = ("--set=speculative.draftKvRatio=0.5", "--set=speculative.draftWindowSize=32")


class Release:
    """The release under test and what it shows of itself."""

    def __init__(self, cluster: Cluster, values: Path) -> None:
        self.cluster = cluster
        self._values = values

    def helm(self, action: str, *arguments: str) -> list[str]:
        return ["helm", action, RELEASE, str(CHART), f"--namespace={NAMESPACE}", f"--values={self._values}", *arguments]

    def get(self, *arguments: str) -> Any:
        return self.cluster.get(*arguments, f"--namespace={NAMESPACE}")

    def pods(self) -> list[dict[str, Any]]:
        """Return the servers that are not on their way out."""
        pods: list[dict[str, Any]] = self.get("pods", SERVER)["items"]
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def pod(self) -> dict[str, Any]:
        (pod,) = self.pods()
        return pod

    def revision(self) -> int:
        """Return how often the Deployment has changed its pods."""
        annotations = self.get("deployment", SERVICE)["metadata"]["annotations"]
        return int(annotations["deployment.kubernetes.io/revision"])

    def url(self) -> str:
        return f"http://{self.get('service', SERVICE)['spec']['clusterIP']}"

    def metric(self, name: str) -> float:
        with self.cluster.entered():
            text = httpx.get(f"{self.url()}/metrics", timeout=60).text
        (value,) = re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE)
        return float(value)

    def draft(self) -> tuple[float, float]:
        """Return ratio and window as the metrics have them."""
        return self.metric("sglang_dflash_draft_kv_ratio"), self.metric("sglang_dflash_draft_window_tokens")

    def answers(self) -> bool:
        with self.cluster.entered():
            return stream(self.url(), 8).kind == "finished"


@pytest.fixture(scope="module")
def needs_pods(cluster: Cluster) -> None:
    """For tests that make no sense where pods only look as if they ran."""
    if not cluster.kubelet:
        pytest.skip("CLUSTER_NODE=fake: no pod runs")


@pytest.fixture(scope="module")
def prepared(cluster: Cluster) -> set[str]:
    """What is there before the release: namespace, keys, volumes, the APIs of operators. Returns the objects' names."""
    cluster.apply(*cached_tools.crds())
    # The API server says where pods fall short of the strictest standard.
    labels = {"pod-security.kubernetes.io/warn": "restricted"}
    key = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys", "namespace": NAMESPACE}}
    objects: list[Any] = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}},
        key | {"stringData": {"api-key": KEY}},
        # What pods of other cases name; the API server looks it up.
        *(
            {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}, "value": 1}
            for name in ("high", "inference")
        ),
        {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "nvidia"}, "handler": "nvidia"},
        key | {"kind": "ServiceAccount", "metadata": {"name": "accepted-sglang-dflash", "namespace": NAMESPACE}},
    ]
    for name, size in (("models", "1Gi"), ("cache", "2Gi")):
        folder = STATE / "volumes" / name
        folder.mkdir(parents=True)
        folder.chmod(0o777)
        spec = {"capacity": {"storage": size}, "accessModes": ["ReadWriteOnce"], "hostPath": {"path": str(folder)}}
        spec["claimRef"] = {"namespace": NAMESPACE, "name": f"{SERVICE}-{name}"}
        objects.append({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec})
    cluster.apply(*objects)
    eventually(
        lambda: cluster.kubectl("get", "configmap/kube-root-ca.crt", f"--namespace={NAMESPACE}", check=False).stdout,
        "the namespace has what controllers put there",
    )
    return names(cluster)


def names(cluster: Cluster) -> set[str]:
    """Return kind and name of every object in the namespace but for events."""
    printed = cluster.kubectl("api-resources", "--verbs=list", "--namespaced", "--output=name").stdout
    kinds = ",".join(kind for kind in printed.split() if not kind.startswith("events"))
    return set(cluster.kubectl("get", kinds, f"--namespace={NAMESPACE}", "--output=name").stdout.split())


@pytest.fixture(scope="module")
def release(cluster: Cluster, prepared: set[str], tmp_path_factory: pytest.TempPathFactory) -> Release:
    """The CPU example, installed with ``helm install --wait``."""
    values = tmp_path_factory.mktemp("release") / "values.yaml"
    values.write_text(yaml.safe_dump(merged(EXAMPLES["cpu"], CHOICES, cluster.values())))
    release = Release(cluster, values)
    if cluster.kubelet:
        cluster.run(*release.helm("install", "--wait", TIMEOUT))
    else:
        cluster.run(*release.helm("install"))
        eventually(lambda: release.pods(), "a pod")
        cluster.mark_running(release.pod())
    return release


@pytest.fixture(scope="module")
def in_network(cluster: Cluster) -> Iterator[None]:
    with cluster.entered():
        yield


def test_install_becomes_ready(release: Release, record_property: Callable[[str, object], None]) -> None:
    cluster = release.cluster
    record_property(
        "cluster", f"kubelet, {cluster.image} image" if cluster.kubelet else "control plane with a fake node"
    )
    assert release.get("deployment", SERVICE)["status"]["readyReplicas"] == 1
    assert release.revision() == 1


# What no workload makes is accepted as well; the release itself uses about half of it.
ACCEPTED = {
    **EXAMPLES,
    "everything": EVERYTHING,
    "hpa": merged(HPA, {"monitoring": {"monitor": {"create": "always", "kind": "ServiceMonitor"}}}),
    "keda": KEDA,
    "two-nodes": TWO_NODES,
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_the_api_server_accepts_what_the_chart_makes(cluster: Cluster, prepared: set[str], case: str) -> None:
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests(ACCEPTED[case], "accepted")})
    arguments = ("apply", "--server-side", "--dry-run=server", "--filename=-", f"--namespace={NAMESPACE}")
    result = cluster.kubectl(*arguments, input=text)
    made = [line for line in result.stdout.splitlines() if line.endswith("serverside-applied (server dry run)")]
    assert len(made) == len(manifests(ACCEPTED[case], "accepted"))
    assert "Warning" not in result.stderr, result.stderr


def test_no_kind_of_the_chart_is_left_out() -> None:
    kinds = {item["kind"] for case in ACCEPTED.values() for item in manifests(case, "accepted")}
    assert kinds >= {
        *("Deployment", "LeaderWorkerSet", "Service", "Ingress", "HTTPRoute", "NetworkPolicy", "PodDisruptionBudget"),
        *("HorizontalPodAutoscaler", "ScaledObject", "PodMonitor", "ServiceMonitor", "PrometheusRule"),
        *("PersistentVolumeClaim", "ConfigMap", "ServiceAccount", "Pod"),
    }


def test_an_upgrade_from_the_version_before_changes_no_immutable_field(
    cluster: Cluster, prepared: set[str], tmp_path: Path
) -> None:
    """No version was released yet, so the one before is this chart under other numbers: they are in labels, names and
    tags, which is how an upgrade most often meets an immutable field."""
    before = tmp_path / "chart"
    shutil.copytree(CHART, before)
    text = (before / "Chart.yaml").read_text()
    text, count = re.subn(r"^(version|appVersion): .*$", r"\1: 0.0.9", text, flags=re.MULTILINE)
    assert count == 2
    (before / "Chart.yaml").write_text(text)
    values = tmp_path / "values.yaml"
    values.write_text(
        yaml.safe_dump(
            merged(
                EXAMPLES["cpu"],
                {
                    "fullnameOverride": "fixed",
                    "nodeSelector": {"nowhere": "here"},  # no pod is to run
                    "jitCache": {"persistent": True, "accessModes": ["ReadWriteMany"]},
                    "modelCache": {"persistent": True, "accessModes": ["ReadWriteMany"]},
                    "ingress": {"enabled": True},
                    "networkPolicy": {"enabled": True},
                    "autoscaling": {"enabled": True},
                },
            )
        )
    )
    options = (f"--values={values}", "--namespace=before", "--create-namespace")
    cluster.helm("install", "before", str(before), *options)
    cluster.helm("upgrade", "before", str(CHART), *options)
    # What the test would see if a field had changed.
    result = cluster.helm("upgrade", "before", str(CHART), *options, "--set=nameOverride=another", check=False)
    assert result.returncode != 0 and "field is immutable" in result.stderr
    cluster.helm("uninstall", "before", "--namespace=before")
    cluster.kubectl("delete", "namespace", "before", "--wait=false")


@pytest.mark.usefixtures("needs_pods")
def test_helm_test_passes(release: Release) -> None:
    printed = release.cluster.helm("test", RELEASE, f"--namespace={NAMESPACE}", TIMEOUT).stdout
    assert "Phase:          Succeeded" in printed


@pytest.mark.usefixtures("needs_pods")
def test_a_streamed_chat_answer_through_the_service(release: Release, in_network: None) -> None:
    name = f"{SERVICE}.{NAMESPACE}.svc.cluster.local"
    asked = client(release.url()).chat.completions.create(
        model="qwen3", messages=[{"role": "user", "content": "Hello"}], max_tokens=16, stream=True
    )
    chunks = [chunk for chunk in asked if chunk.choices]
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    # And pods find it by its name.
    script = f"import urllib.request; print(urllib.request.urlopen('http://{name}/health').status)"
    pod = release.pod()["metadata"]["name"]
    printed = release.cluster.kubectl("exec", pod, f"--namespace={NAMESPACE}", "--", "python3", "-c", script).stdout
    assert printed == "200\n"


@pytest.mark.usefixtures("needs_pods")
def test_the_key_is_enforced(release: Release, in_network: None) -> None:
    for wrong in ("another", "none"):
        with pytest.raises(openai.AuthenticationError):
            client(release.url(), wrong).models.list()
    assert [model.id for model in client(release.url()).models.list()] == ["qwen3"]


def discovered(pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return pods as targets, which Prometheus's discovery makes of them; Debian builds it without that."""
    targets = []
    for pod in pods:
        labels = {"namespace": pod["metadata"]["namespace"], "pod_name": pod["metadata"]["name"]}
        labels |= {
            f"pod_label_{re.sub('[^a-z]', '_', name)}": value for name, value in pod["metadata"]["labels"].items()
        }
        for container in pod["spec"]["containers"]:
            for port in container.get("ports", []):
                labels["pod_container_port_name"] = port["name"]
                address = f"{pod['status']['podIP']}:{port['containerPort']}"
                named = {f"__meta_kubernetes_{name}": value for name, value in labels.items()}
                targets.append({"targets": [address], "labels": named})
    return targets


def scrape_config(monitor: dict[str, Any], targets: Path) -> dict[str, Any]:
    """Return the configuration that the operator makes of a PodMonitor, as far as the chart's goes."""
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    relabelings = [
        {
            "source_labels": [f"__meta_kubernetes_pod_label_{re.sub('[^a-z]', '_', name)}"],
            "regex": value,
            "action": "keep",
        }
        for name, value in monitor["spec"]["selector"]["matchLabels"].items()
    ]
    port = "__meta_kubernetes_pod_container_port_name"
    relabelings.append({"source_labels": [port], "regex": endpoint["port"], "action": "keep"})
    for label in ("namespace", "pod_name"):
        source = [f"__meta_kubernetes_{label}"]
        relabelings.append({"source_labels": source, "target_label": label.removesuffix("_name")})
    relabelings += [
        {"action": step["action"], "target_label": step["targetLabel"], "replacement": step["replacement"]}
        for step in endpoint["relabelings"]
    ]
    job = {
        "job_name": "engine",
        "metrics_path": endpoint["path"],
        "scrape_interval": endpoint["interval"],
        "scrape_timeout": endpoint["scrapeTimeout"],
        "file_sd_configs": [{"files": [str(targets)]}],
        "relabel_configs": relabelings,
    }
    return {"scrape_configs": [job]}


@pytest.mark.usefixtures("needs_pods")
def test_prometheus_scrapes_what_the_monitor_names_and_the_pools_dashboard_shows_it(
    release: Release, in_network: None, tmp_path: Path
) -> None:
    monitor = release.get("podmonitor", SERVICE)
    targets = tmp_path / "targets.json"
    targets.write_text(json.dumps(discovered(release.get("pods", "--field-selector=status.phase=Running")["items"])))
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(scrape_config(monitor, targets)))
    url = "http://127.0.0.1:9090"
    command = [str(cached_tools.prometheus() / "prometheus"), f"--config.file={tmp_path}/prometheus.yml"]
    command += [f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address={url.removeprefix('http://')}"]
    asked = [query for query in queries() if query.board == "pools" and query.name not in ELSEWHERE]
    assert len(asked) > 5

    def instant(query: str) -> list[dict[str, Any]]:
        assert process.poll() is None, (tmp_path / "log").read_text()
        try:
            answer = httpx.get(f"{url}/api/v1/query", params={"query": query}, timeout=60)
        except httpx.ConnectError:
            return []
        found: list[dict[str, Any]] = answer.json()["data"]["result"] if answer.status_code == 200 else []
        return found

    def empty() -> list[str]:
        selected = {"namespace": NAMESPACE, "release": RELEASE}
        return [q.name for q in asked if not instant(q.asked(selected, rate_interval="20s", range_="60s"))]

    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(release.cluster.command(*command), stdout=log, stderr=log)
        try:
            with Load(release.url(), threads=2, tokens=500).running():
                (up,) = eventually(lambda: instant("up == 1"), "a scrape works")
                labels = up["metric"]
                pod = release.pod()["metadata"]["name"]
                assert (labels["pod"], labels["service"], labels["release"]) == (pod, SERVICE, RELEASE)
                eventually(lambda: not empty(), "every query has data")
        finally:
            process.terminate()
            process.wait()


@pytest.mark.usefixtures("needs_pods")
def test_an_upgrade_rolls_once_and_finishes_running_streams(release: Release, in_network: None) -> None:
    assert release.draft() == (0.25, 64)
    old = release.pod()
    address = f"http://{old['status']['podIP']}:30000"
    through_service, to_old_pod = Load(release.url(), 1, 1000), Load(address, 2, 2000)
    command = release.cluster.command(*release.helm("upgrade", "--wait", TIMEOUT, *CHANGED))

    def leaving() -> bool:
        return old["metadata"]["uid"] not in {pod["metadata"]["uid"] for pod in release.pods()}

    with through_service.running(), to_old_pod.running():
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as helm:
            eventually(leaving, "the old pod is told to go")
            told = time.time()
            printed, _ = helm.communicate()
        assert helm.returncode == 0, printed
        eventually(lambda: to_old_pod.kinds()["refused"], "the old pod takes no more requests")
    assert any(outcome.kind == "finished" and outcome.ended > told for outcome in to_old_pod.outcomes)
    assert to_old_pod.kinds().keys() == {"finished", "refused"}, to_old_pod.outcomes
    assert through_service.kinds().keys() == {"finished"}, through_service.outcomes
    assert release.revision() == 2 and len(release.get("replicasets", SERVER)["items"]) == 2
    assert release.pod()["metadata"]["uid"] != old["metadata"]["uid"]
    assert release.draft() == (0.5, 32)


def test_a_bad_value_is_refused_before_anything_changes(release: Release) -> None:
    def state() -> tuple[Any, ...]:
        objects = release.get("deployment,service,configmap,podmonitor")["items"]
        secrets = release.get("secrets", "--field-selector=type=helm.sh/release.v1")["items"]
        versions = {item["metadata"]["uid"]: item["metadata"].get("generation") for item in objects}
        return versions, [item["metadata"]["name"] for item in secrets]

    before = state()
    for value in ("1.5", "0"):
        bad = f"--set=speculative.draftKvRatio={value}"
        result = release.cluster.run(*release.helm("upgrade", "--wait", bad), check=False)
        assert result.returncode != 0 and "draftKvRatio" in result.stderr, result.stdout
    assert state() == before


@pytest.mark.usefixtures("needs_pods")
def test_a_value_that_the_engine_refuses_fails_the_rollout_and_rolls_back(release: Release, in_network: None) -> None:
    old = release.pod()
    load = Load(release.url(), 1, 500)
    small = ("--set=speculative.draftKvRatio=0.01", "--set=speculative.draftWindowSize=32")

    def message() -> str:
        for pod in release.pods():
            for status in pod["status"].get("containerStatuses", []):
                ended = status["state"].get("terminated") or status["lastState"].get("terminated") or {}
                if pod["metadata"]["uid"] != old["metadata"]["uid"] and ended:
                    return f"{ended['exitCode']}: {ended.get('message')}"
        return ""

    with load.running():
        result = release.cluster.run(*release.helm("upgrade", "--wait", "--timeout=45s", *small), check=False)
        assert result.returncode != 0 and "not ready" in result.stderr, result.stdout
        reason = eventually(message, "the engine ends")
        history = release.cluster.helm("history", RELEASE, f"--namespace={NAMESPACE}", "--output=json")
        *_, good, failed = json.loads(history.stdout)
        assert (good["status"], failed["status"]) == ("deployed", "failed")
        rollback = ("rollback", RELEASE, str(good["revision"]), f"--namespace={NAMESPACE}", "--wait", TIMEOUT)
        release.cluster.helm(*rollback)
        eventually(lambda: len(release.pods()) == 1, "the failed pod is gone")
    refused = "--speculative-draft-kv-ratio 0.01 gives the draft a KV pool of"
    assert refused in reason and "Use --speculative-draft-kv-ratio 0." in reason.splitlines()[-1], reason
    assert release.pod()["metadata"]["uid"] == old["metadata"]["uid"]
    assert load.kinds().keys() == {"finished"}, load.outcomes
    assert release.draft() == (0.5, 32)


def restarts(pod: dict[str, Any]) -> int:
    return int(pod["status"]["containerStatuses"][0]["restartCount"])


def under_load(release: Release, break_it: Callable[[], None], comes_back: Callable[[], bool]) -> Load:
    """Break something while requests run, and wait until the service answers again."""
    load = Load(release.url(), 2, 1000)
    with load.running():
        eventually(lambda: release.metric("sglang:num_running_reqs") > 0, "requests run")
        break_it()
        eventually(comes_back, "what was broken is back")
        eventually(release.answers, "the service answers")
    assert load.kinds()["hung"] == 0, load.outcomes
    assert load.kinds()["finished"] > 0, load.outcomes
    return load


@pytest.mark.usefixtures("needs_pods")
def test_a_killed_engine_process_comes_back(release: Release, in_network: None) -> None:
    before = release.pod()

    def kill() -> None:
        processes = release.cluster.processes(before["metadata"]["name"], NAMESPACE)
        (scheduler,) = [process for process in processes if "scheduler" in " ".join(process.cmdline())]
        scheduler.kill()

    def back() -> bool:
        status = release.pod()["status"]["containerStatuses"][0]
        return restarts(release.pod()) > restarts(before) and bool(status["ready"])

    load = under_load(release, kill, back)
    assert release.pod()["metadata"]["uid"] == before["metadata"]["uid"]
    assert restarts(release.pod()) == restarts(before) + 1
    assert load.kinds()["broken"] > 0, load.outcomes


@pytest.mark.usefixtures("needs_pods")
def test_a_killed_pod_is_replaced(release: Release, in_network: None) -> None:
    before = release.pod()

    def kill() -> None:
        name = before["metadata"]["name"]
        release.cluster.kubectl("delete", "pod", name, f"--namespace={NAMESPACE}", "--grace-period=0", "--force")

    def back() -> bool:
        return any(
            status["ready"] and pod["metadata"]["uid"] != before["metadata"]["uid"]
            for pod in release.pods()
            for status in pod["status"].get("containerStatuses", [])
        )

    under_load(release, kill, back)


@pytest.mark.usefixtures("needs_pods")
def test_a_killed_kubelet_disturbs_no_request(release: Release, in_network: None) -> None:
    before = release.pod()
    name = before["metadata"]["name"]

    def kill() -> None:
        release.cluster.kill("kubelet")

    def back() -> bool:
        arguments = ("exec", name, f"--namespace={NAMESPACE}", "--", "sleep", "0")
        return release.cluster.kubectl(*arguments, check=False).returncode == 0

    load = under_load(release, kill, back)
    assert load.kinds().keys() == {"finished"}, load.outcomes
    assert release.pod()["metadata"]["uid"] == before["metadata"]["uid"]
    assert restarts(release.pod()) == restarts(before)


def test_uninstall_leaves_only_the_volume_that_was_to_stay(release: Release, prepared: set[str]) -> None:
    release.cluster.helm("uninstall", RELEASE, f"--namespace={NAMESPACE}", "--wait", TIMEOUT)
    stays = f"persistentvolumeclaim/{SERVICE}-models"

    # Pods and what controllers made for them follow a moment later.
    eventually(lambda: len(names(release.cluster) - prepared) <= 1, "all else is gone")
    assert names(release.cluster) - prepared == {stays}
