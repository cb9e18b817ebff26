"""Buildah and podman with a store of their own, and Python's slim image made from Debian's packages."""

import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[3]
CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
TOOLS = ("buildah", "podman", "runc", "debootstrap")
PYTHON = "docker.io/library/python:3.11-slim"


class Containers:
    """The tools on one store, which stays in the user's cache: the dependencies are 11 GB and four minutes."""

    def __init__(self, store: Path) -> None:
        self._store = ["--root", str(store / "root"), "--runroot", str(store / "run"), "--storage-driver", "overlay"]

    def buildah(self, *words: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        command = ["buildah", *self._store, *words]
        return subprocess.run(command, check=check, capture_output=True, text=True, **options)

    def build(
        self, target: str, tag: str, *arguments: str, context: Path = REPOSITORY
    ) -> subprocess.CompletedProcess[str]:
        """Build a target of the Dockerfile of `context`; the output says why when it fails."""
        command = ["bud", "--layers", "--isolation", "chroot", "--network", "host", "--pull-never"]
        command += ["--secret", f"id=ca,src={CA_BUNDLE}", "--build-arg", f"BUILD_ID={time.time_ns()}"]
        return self.buildah(*command, "--target", target, "--tag", tag, *arguments, str(context), check=False)

    def podman(self, *words: str, check: bool = True) -> str:
        command = ["podman", *self._store, "--runtime", "runc", "--cgroup-manager", "cgroupfs", *words]
        result = subprocess.run(command, capture_output=True, text=True)
        assert not check or result.returncode == 0, result.stderr
        return result.stdout + result.stderr


@pytest.fixture(scope="session")
def containers(tmp_path_factory: pytest.TempPathFactory) -> Containers:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    assert not missing, f"{', '.join(missing)} not found: apt-get install --no-install-recommends {' '.join(TOOLS)}"
    store = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sglang-dflash" / "images"
    store.mkdir(parents=True, exist_ok=True)
    made = Containers(store)
    if made.buildah("inspect", "--type", "image", PYTHON, check=False).returncode != 0:
        base = tmp_path_factory.mktemp("debian")
        include = "--include=python3,python3-pip,ca-certificates"
        subprocess.run(["debootstrap", "--variant=minbase", include, "bookworm", str(base)], check=True)
        container = made.buildah("from", "scratch").stdout.strip()
        made.buildah("add", "--quiet", container, str(base), "/")
        made.buildah("commit", "--quiet", container, PYTHON)
        made.buildah("rm", container)
    return made
