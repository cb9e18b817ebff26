"""Buildah and podman with a store of their own."""

import subprocess
import time
from pathlib import Path
from typing import Any

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

    def podman_command(self, *words: str) -> list[str]:
        return ["podman", *self._store, "--runtime", "runc", "--cgroup-manager", "cgroupfs", *words]

    def podman(self, *words: str) -> str:
        result = subprocess.run(self.podman_command(*words), capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stdout + result.stderr
