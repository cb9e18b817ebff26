"""A Kubernetes cluster of one node on this machine, in namespaces of its own.

    python tests/cluster/cluster.py up | down | shell

Nothing of it listens on the machine's own network, and it ends with its first process (`supervisor`). Needs root, as
containers do.
"""

import contextlib
import ctypes
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil

import cached_tools
import oci_image
import supervisor
from server import Server
from server_ext.tiny import build

ROOT = Path(__file__).parents[2]
COMPONENTS = Path(__file__).parent / "components"
STATE = ROOT / "build" / "cluster"
SLIM_IMAGE = "cluster.local/slim:1"
CPU_IMAGE = "cluster.local/sglang-dflash:cpu"
PATIENCE_SECONDS = 240.0

T = TypeVar("T")
_libc = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET = 0x40000000


def settings_of_the_machine() -> dict[str, str]:
    """Return the kernel's settings that components of Kubernetes change."""
    names = [*supervisor.SHIELDED, "net/ipv4/ip_forward", "net/ipv4/conf/all/route_localnet"]
    names.append("net/netfilter/nf_conntrack_max")
    return {name: path.read_text() for name in names if (path := Path("/proc/sys") / name).exists()}


def eventually(ask: Callable[[], T], what: str, seconds: float = PATIENCE_SECONDS) -> T:
    """Return the first answer that is true. Raises AssertionError with the last one when none is."""
    deadline = time.monotonic() + seconds
    while not (answer := ask()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s; the last answer was {answer!r}"
        time.sleep(0.2)
    return answer


class Cluster:
    """The cluster of this clone, running or not.

    `kubelet` says whether pods run. Without it there are a control plane and a node object, and pods only look as if
    they ran. `image` is ``slim`` (this Python; the engine's environment is mounted) or ``cpu``, an image of the
    engine from an OCI archive.
    """

    def __init__(self, *, kubelet: bool = True, image: str = "slim", archive: Path | None = None) -> None:
        self.kubelet = kubelet
        self.image = image
        self.kubeconfig = STATE / "kubeconfig"
        self._archive = archive
        self._cgroup = f"sglang-dflash-{hashlib.sha256(str(ROOT).encode()).hexdigest()[:8]}"
        self._programs = Path(cached_tools.helm("4.3")).parent

    @classmethod
    def from_environment(cls) -> Self:
        """Return what CLUSTER_NODE, CLUSTER_IMAGE and CLUSTER_IMAGE_ARCHIVE ask for."""
        node, image = os.environ.get("CLUSTER_NODE", "kubelet"), os.environ.get("CLUSTER_IMAGE", "slim")
        archive = os.environ.get("CLUSTER_IMAGE_ARCHIVE")
        if node not in ("kubelet", "fake") or image not in ("slim", "cpu") or (image == "cpu") != bool(archive):
            raise SystemExit(
                "CLUSTER_NODE is kubelet (default) or fake; CLUSTER_IMAGE is slim (default) or cpu, and cpu needs "
                "CLUSTER_IMAGE_ARCHIVE=/path/to/oci.tar"
            )
        return cls(kubelet=node == "kubelet", image=image, archive=Path(archive) if archive else None)

    def values(self) -> dict[str, Any]:
        """Return the chart's values that make a pod run the engine here, to lay over an example's."""
        if self.image == "cpu":
            repository, _, tag = CPU_IMAGE.rpartition(":")
            return {"image": {"repository": repository, "tag": tag, "pullPolicy": "Never"}}
        repository, _, tag = SLIM_IMAGE.rpartition(":")
        # The engine's environment has its own path in its scripts, so it is mounted where it is.
        mounted = {"venv": sys.prefix, "extension": f"{ROOT}/server_ext", "patches": f"{ROOT}/image"}
        paths = {name: (path, path) for name, path in mounted.items()} | {
            "tiny-pairs": (str(tiny_pairs()), "/cache/xdg/sglang-dflash/tiny")
        }
        return {
            "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"},
            "command": [f"{sys.prefix}/bin/sglang-dflash", "serve"],
            "extraVolumes": [
                {"name": name, "hostPath": {"path": path, "type": "Directory"}} for name, (path, _) in paths.items()
            ],
            "extraVolumeMounts": [
                {"name": name, "mountPath": path, "readOnly": True} for name, (_, path) in paths.items()
            ],
        }

    # Life

    def start(self) -> Self:
        """Start it and wait until the node is ready; an earlier one of this clone ends first."""
        self.stop()
        if self.kubelet and self.image == "slim":
            warm_up()
        components, node = cached_tools.go_programs(COMPONENTS), cached_tools.node()
        STATE.mkdir(parents=True)
        (STATE / "settings.json").write_text(json.dumps(settings_of_the_machine()))
        for hierarchy in control_groups():
            (hierarchy / self._cgroup).mkdir(exist_ok=True)
        script = [sys.executable, supervisor.__file__, STATE, components, node, self._cgroup]
        script.append("kubelet" if self.kubelet else "fake")
        private = ["unshare", "--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child"]
        with (STATE / "supervisor.log").open("wb") as log:
            process = subprocess.Popen(
                [*map(str, [*private, *script])],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

        def answers(*arguments: str) -> Callable[[], bool]:
            def ask() -> bool:
                assert process.poll() is None, (STATE / "supervisor.log").read_text()
                return self.pid is not None and self.kubectl(*arguments, check=False).returncode == 0

            return ask

        eventually(answers("get", "--raw", "/readyz"), "the API server is ready")
        if self.kubelet:
            self._import_images()
        else:
            self._make_fake_node()
        ready = "--for=condition=Ready"
        eventually(answers("wait", ready, "node/node", "--timeout=10s"), "the node is ready")
        # Made by a controller; no pod starts before.
        eventually(answers("get", "serviceaccount", "default"), "the default service account")
        return self

    def stop(self) -> None:
        """End it. Raises AssertionError if anything of it is left: process, mount, control group, setting."""
        settings = STATE / "settings.json"
        before = json.loads(settings.read_text()) if settings.exists() else settings_of_the_machine()
        if (pid := self.pid) is not None:
            namespaces = _namespaces(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            # A shell in the cluster is nobody's but its user's: it is named, not killed.
            eventually(
                lambda: not processes_in(namespaces), f"all that runs in it ends: {processes_in(namespaces)}", 30
            )
        with contextlib.suppress(ChildProcessError):  # when this very process started it
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        for hierarchy in control_groups():
            for folder, _, _ in os.walk(hierarchy / self._cgroup, topdown=False):
                # Empty, but the kernel takes a moment to see that.
                eventually(lambda folder=folder: _remove(Path(folder)), f"{folder} goes away", 30)
        if STATE.exists():
            shutil.rmtree(STATE)
        mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(STATE) in line]
        assert not mounts, mounts
        now = settings_of_the_machine()
        changed = {name: (value, now.get(name)) for name, value in before.items() if now.get(name) != value}
        assert not changed, f"settings of the machine before and after: {changed}"

    @property
    def pid(self) -> int | None:
        """The supervisor, if the cluster runs."""
        file = STATE / "pid"
        if not file.exists():
            return None
        pid = int(file.read_text())
        # The number may be another process's by now.
        with contextlib.suppress(psutil.NoSuchProcess):
            if supervisor.__file__ in psutil.Process(pid).cmdline():
                return pid
        return None

    def _running(self) -> int:
        pid = self.pid
        assert pid is not None, f"no cluster runs; its logs: {STATE}/logs"
        return pid

    def _import_images(self) -> None:
        images = {supervisor.PAUSE_IMAGE: ({"/pause": cached_tools.go_programs(COMPONENTS) / "pause"}, ["/pause"])}
        if self.image == "slim":
            images[SLIM_IMAGE] = (oci_image.python_files(), ["python3"])
        archives = []
        for number, (name, (files, command)) in enumerate(images.items()):
            archives.append(STATE / f"image-{number}.tar")
            oci_image.write(archives[-1], name, files, command)
        imported = ["ctr", "--namespace=k8s.io", "images", "import"]
        ready = ["ctr", "version"]
        eventually(lambda: self.run(*ready, check=False).returncode == 0, "containerd answers")
        for archive in archives:
            self.run(*imported, str(archive))
            archive.unlink()
        if self._archive:
            # The archive names the image as its builder did.
            printed = self.run(*imported, str(self._archive)).stdout
            (name,) = re.findall(r"unpacking (\S+)", printed)
            self.run("ctr", "--namespace=k8s.io", "images", "tag", name, CPU_IMAGE)

    def _make_fake_node(self) -> None:
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node"}}
        self.apply(node)
        capacity = {"cpu": "8", "memory": "64Gi", "pods": "100", "ephemeral-storage": "100Gi"}
        conditions = [{"type": "Ready", "status": "True", "reason": "Fake"}]
        status = {"status": {"capacity": capacity, "allocatable": capacity, "conditions": conditions}}
        self.kubectl("patch", "node", "node", "--subresource=status", "--type=merge", f"--patch={json.dumps(status)}")

    def mark_running(self, pod: dict[str, Any]) -> None:
        """Say of a pod on the fake node that it runs and is ready."""
        assert not self.kubelet
        conditions = [{"type": name, "status": "True"} for name in ("PodScheduled", "ContainersReady", "Ready")]
        status = json.dumps({"status": {"phase": "Running", "conditions": conditions}})
        name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        patch = ("patch", "pod", name, f"--namespace={namespace}", "--subresource=status", "--type=merge")
        self.kubectl(*patch, f"--patch={status}")
        self.kubectl("wait", "--for=condition=Ready", f"pod/{name}", f"--namespace={namespace}")

    # Use

    def command(self, *command: str) -> list[str]:
        """Return a command that runs another in the cluster's namespaces for mounts and network."""
        environment = [f"KUBECONFIG={self.kubeconfig}", f"HOME={STATE}/home"]
        environment.append(f"PATH={self._programs}:{os.environ['PATH']}")
        return ["nsenter", f"--target={self._running()}", "--mount", "--net", "env", *environment, *command]

    def run(self, *command: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command in the cluster's namespaces. Raises AssertionError with what it printed."""
        result = subprocess.run(self.command(*command), capture_output=True, text=True, **options)
        if check:
            assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}{result.stderr}"
        return result

    def kubectl(self, *arguments: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run kubectl."""
        return self.run("kubectl", *arguments, check=check, **options)

    def helm(self, *arguments: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run Helm."""
        return self.run("helm", *arguments, check=check, **options)

    def get(self, *arguments: str) -> Any:
        """Return what ``kubectl get`` says, parsed."""
        return json.loads(self.kubectl("get", *arguments, "--output=json").stdout)

    def apply(self, *objects: Any, **options: Any) -> None:
        """Apply objects as ``kubectl apply --server-side`` does."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        self.kubectl("apply", "--server-side", "--filename=-", input=text, **options)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Put this thread, and those that it starts, into the cluster's network."""
        with in_network_of(self._running()):
            yield

    def kill(self, component: str) -> None:
        """Kill a component; the supervisor starts it again."""
        program = "/usr/bin/containerd" if component == "containerd" else component
        killed = [p for p in processes_in(_namespaces(self._running())) if program in p.cmdline()[:2]]
        assert len(killed) == 1, killed
        killed[0].kill()

    def processes(self, pod: str, namespace: str = "default") -> list[psutil.Process]:
        """Return the processes in the first container of a pod."""
        status = self.get("pod", pod, f"--namespace={namespace}")["status"]
        container = status["containerStatuses"][0]["containerID"].removeprefix("containerd://")
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                if container in Path(f"/proc/{process.pid}/cgroup").read_text():
                    found.append(process)
        return found


def _namespaces(pid: int) -> dict[str, str]:
    return {kind: str(Path(f"/proc/{pid}/ns/{kind}").readlink()) for kind in ("pid", "mnt", "net")}


def processes_in(namespaces: dict[str, str]) -> list[psutil.Process]:
    """Return the processes in any of the namespaces: the cluster's own and who entered it, not those of pods."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if _namespaces(process.pid).items() & namespaces.items():
                found.append(process)
    return found


@contextlib.contextmanager
def in_network_of(pid: int) -> Iterator[None]:
    """Put this thread, and those that it starts, into the network of a process."""

    def enter(namespace: int) -> None:
        if _libc.setns(namespace, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")

    with Path("/proc/thread-self/ns/net").open() as own, Path(f"/proc/{pid}/ns/net").open() as other:
        enter(other.fileno())
        try:
            yield
        finally:
            enter(own.fileno())


def _remove(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        folder.rmdir()
    return not folder.exists()


def control_groups() -> list[Path]:
    """Return the hierarchies of control groups: one a controller, or one for all."""
    lines = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [Path(path) for _, path, kind, *_ in lines if kind in ("cgroup", "cgroup2")]


def tiny_pairs() -> Path:
    """Return the folder where the tiny pairs are."""
    return build.cache_folder()


def warm_up() -> None:
    """Start the engine once if it never ran: the pair gets trained, and Python's compiled files written.

    Pods see both read-only and would make them anew at each start.
    """
    (packages,) = Path(sys.prefix).glob("lib/python3*/site-packages")
    compiled = packages / "sglang" / "srt" / "managers" / "__pycache__"
    if not compiled.exists() or not any(tiny_pairs().glob("qwen3-*")):
        print("starting the engine once, outside the cluster, for its compiled files and the pair", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder, Server(["--pair", "qwen3"], Path(folder) / "log").started():
            pass


def main(action: str) -> None:
    """Start or stop the cluster, or run a shell in it."""
    cluster = Cluster.from_environment()
    if action == "up":
        cluster.start()
        runs = f"kubelet, pods from the {cluster.image} image" if cluster.kubelet else "control plane with a fake node"
        print(f"cluster ready: {runs}; `make cluster-shell` for kubectl and helm, logs in {STATE}/logs")
    elif action == "down":
        cluster.stop()
        print("cluster down: no process, mount, control group or setting of it is left")
    elif action == "shell":
        os.execvp("nsenter", cluster.command(os.environ.get("SHELL", "/bin/sh"), *sys.argv[2:]))


if __name__ == "__main__":
    main(sys.argv[1])
