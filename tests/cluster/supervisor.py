"""Process 1 of a cluster: sets up its private namespaces, starts its components, and starts again those that die.

    python supervisor.py STATE PROGRAMS NODE CGROUP KIND

runs in new mount, network, process, IPC and host name namespaces (`cluster.Cluster.start` makes them), and everything
of the cluster below it, so that nothing is left once it is dead. STATE is the cluster's folder, PROGRAMS the folder
with the program ``components``, NODE the file tree that containerd and iptables come from, CGROUP the name of the
control groups that pods go to, and KIND ``kubelet`` or ``fake``: the latter runs the control plane alone.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ADDRESS = "10.250.0.1"
POD_NETWORK = "10.244.0.0/24"
SERVICE_NETWORK = "10.96.0.0/16"
TOKEN = "cluster-admin"  # nothing outside the private network can reach the API server
CONTAINERD = "unix:///run/containerd/containerd.sock"
PAUSE_IMAGE = "cluster.local/pause:1"
# What kubelet sets for the whole machine. It sees copies, so that the machine stays as it is.
SHIELDED = (
    *(f"kernel/{name}" for name in ("panic", "panic_on_oops", "keys/root_maxkeys", "keys/root_maxbytes")),
    *(f"vm/{name}" for name in ("overcommit_memory", "panic_on_oom")),
)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _set_up_mounts(node: Path) -> None:
    """Lay Debian's packages over /usr, give the components folders of their own, and shield the machine's settings."""
    _run("mount", "--make-rshared", "/")  # what kubelet mounts has to show in containers
    _run("mount", "-t", "proc", "proc", "/proc")
    _run("mount", "-t", "overlay", "overlay", "-o", f"ro,lowerdir={node}/usr:/usr", "/usr")
    for folder in ("/run", "/var/log"):
        _run("mount", "-t", "tmpfs", "tmpfs", folder)
    for folder in ("/run/upper", "/run/work"):
        Path(folder).mkdir()
    # kubelet has paths there that no option moves.
    _run(
        "mount", "-t", "overlay", "overlay", "-o", "lowerdir=/var/lib,upperdir=/run/upper,workdir=/run/work", "/var/lib"
    )
    copies = Path("/run/shielded")
    for name in SHIELDED:
        setting, copy = Path("/proc/sys") / name, copies / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(setting.read_text())
        _run("mount", "--bind", str(copy), str(setting))


def _set_up_network() -> None:
    """Give the node an address, routes to Services (kube-proxy sends them on), and pods a way through the bridge."""
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "link", "add", "node0", "type", "bridge")
    _run("ip", "address", "add", f"{ADDRESS}/24", "dev", "node0")
    _run("ip", "link", "set", "node0", "up")
    _run("ip", "route", "add", SERVICE_NETWORK, "dev", "node0", "src", ADDRESS)
    for name in ("ipv4/ip_forward", "bridge/bridge-nf-call-iptables"):
        (Path("/proc/sys/net") / name).write_text("1")
    _run("hostname", "node")


def _write_configuration(state: Path, programs: Path, cgroup: str) -> None:
    _run(str(programs / "components"), "certificate", str(state), ADDRESS)
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": "cluster",
                "cluster": {"server": f"https://{ADDRESS}:6443", "certificate-authority": f"{state}/cluster.crt"},
            }
        ],
        "users": [{"name": "admin", "user": {"token": TOKEN}}],
        "contexts": [{"name": "cluster", "context": {"cluster": "cluster", "user": "admin"}}],
        "current-context": "cluster",
    }
    kubelet = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": ADDRESS,
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "containerRuntimeEndpoint": CONTAINERD,
        "cgroupDriver": "cgroupfs",
        # The machine's own control groups stay as they are; pods go to a folder of their own.
        "cgroupRoot": f"/{cgroup}",
        "cgroupsPerQOS": False,
        "enforceNodeAllocatable": [],
        "failCgroupV1": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,
        "clusterDNS": [ADDRESS],
        "clusterDomain": "cluster.local",
        "resolvConf": f"{state}/resolv.conf",
        "podLogsDir": f"{state}/pods",
        "volumePluginDir": f"{state}/volume-plugins",
        # The machine's disk is not the cluster's business.
        "evictionHard": {"memory.available": "100Mi"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "syncFrequency": "10s",
        "fileCheckFrequency": "0s",
    }
    proxy = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "clusterCIDR": POD_NETWORK,
        "clientConnection": {"kubeconfig": f"{state}/kubeconfig"},
        "hostnameOverride": "node",
        "oomScoreAdj": 0,
        # Zero leaves the settings of the kernel's connection table alone: they are the machine's.
        "conntrack": {
            "maxPerCore": 0,
            "min": 0,
            "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s",
            "udpTimeout": "0s",
            "udpStreamTimeout": "0s",
        },
        "iptables": {"minSyncPeriod": "100ms", "syncPeriod": "30s"},
    }
    network = {
        "cniVersion": "0.4.0",
        "name": "cluster",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "cni0",
                "isGateway": True,
                "hairpinMode": True,
                "ipam": {
                    "type": "host-local",
                    "dataDir": "/run/cni",
                    "ranges": [[{"subnet": POD_NETWORK}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            }
        ],
    }
    for name, content in (("kubeconfig", kubeconfig), ("kubelet.yaml", kubelet), ("kube-proxy.yaml", proxy)):
        (state / name).write_text(json.dumps(content))  # JSON is YAML
    (state / "cni").mkdir()
    (state / "cni" / "cluster.conflist").write_text(json.dumps(network))
    (state / "tokens.csv").write_text(f"{TOKEN},admin,admin,system:masters\n")
    (state / "resolv.conf").write_text("")
    (state / "containerd.toml").write_text(
        f"""\
version = 2
disabled_plugins = ["io.containerd.internal.v1.opt"]
root = "{state}/containerd"
state = "/run/containerd"
[grpc]
address = "{CONTAINERD.removeprefix("unix://")}"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE_IMAGE}"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "{state}/cni"
"""
    )
    (state / "Corefile").write_text(
        f"""\
cluster.local in-addr.arpa {{
    bind {ADDRESS}
    errors
    kubernetes {{
        kubeconfig {state}/kubeconfig cluster
    }}
}}
"""
    )


def _commands(state: Path, programs: Path, kind: str) -> dict[str, list[str]]:
    """Return the command of each component, in the order of starting."""
    component = str(programs / "components")
    kubeconfig = f"--kubeconfig={state}/kubeconfig"
    certificate, key = f"{state}/cluster.crt", f"{state}/cluster.key"
    control_plane = {
        # Durable or not, it dies with the cluster.
        "etcd": [f"--data-dir={state}/etcd", "--unsafe-no-fsync", "--log-level=warn"],
        "kube-apiserver": [
            "--etcd-servers=http://127.0.0.1:2379",
            f"--advertise-address={ADDRESS}",
            f"--service-cluster-ip-range={SERVICE_NETWORK}",
            f"--tls-cert-file={certificate}",
            f"--tls-private-key-file={key}",
            f"--token-auth-file={state}/tokens.csv",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--kubelet-preferred-address-types=InternalIP",
        ],
        "kube-controller-manager": [
            kubeconfig,
            f"--service-account-private-key-file={key}",
            f"--root-ca-file={certificate}",
            "--leader-elect=false",
            # A restarted kubelet's pods are not to be thrown out, and replaced pods come at once.
            "--node-monitor-grace-period=60s",
        ],
        "kube-scheduler": [kubeconfig, "--leader-elect=false"],
    }
    node = {
        "containerd": [],
        "kubelet": [
            kubeconfig,
            f"--config={state}/kubelet.yaml",
            f"--root-dir={state}/kubelet",
            f"--node-ip={ADDRESS}",
            "--hostname-override=node",
        ],
        "kube-proxy": [f"--config={state}/kube-proxy.yaml"],
        "coredns": ["-conf", f"{state}/Corefile"],
    }
    commands = {name: [component, name, *options] for name, options in control_plane.items()}
    if kind == "kubelet":
        commands |= {name: [component, name, *options] for name, options in node.items()}
        commands["containerd"] = ["/usr/bin/containerd", "--config", f"{state}/containerd.toml"]
    return commands


def _ended() -> Iterator[int]:
    """Yield the processes that have ended, orphans of the whole cluster included."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid


def main(state: Path, programs: Path, node: Path, cgroup: str, kind: str) -> None:
    """Set up, then keep the components running until this process is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Its number as the machine knows it; the machine's /proc goes away next.
    pid = str(Path("/proc/self").readlink())
    _set_up_mounts(node)
    _set_up_network()
    _write_configuration(state, programs, cgroup)
    (state / "pid.new").write_text(pid)
    (state / "pid.new").rename(state / "pid")
    (state / "logs").mkdir()
    commands = _commands(state, programs, kind)
    environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/run"}
    running: dict[int, str] = {}
    missing = list(commands)
    while True:
        for name in missing:
            with (state / "logs" / name).open("ab") as log:
                process = subprocess.Popen(commands[name], stdout=log, stderr=log, env=environment, cwd="/")
            running[process.pid] = name
        # One that dies at once is not to take a core for its restarts.
        time.sleep(0.5)
        missing = [name for pid in _ended() if (name := running.pop(pid, None))]


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), *sys.argv[4:6])
