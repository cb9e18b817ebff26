"""Buildah, podman and podman-compose with a store and a configuration of their own."""

import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[3]
VERSION = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
# aardvark-dns and netavark: containers of a compose file find each other by name.
PACKAGES = ("buildah", "podman", "runc", "debootstrap", "netavark", "aardvark-dns")
PYTHON = "docker.io/library/python:3.11-slim"
# Limits that a sandbox within limits of its own can grant, too.
CONFIGURATION = """
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[network]
network_backend = "netavark"
"""


class Containers:
    """The tools on one store, which stays in the user's cache: the dependencies are 11 GB and four minutes."""

    def __init__(self, store: Path) -> None:
        (store / "containers.conf").write_text(CONFIGURATION)
        (store / "storage.conf").write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{store}/root"\nrunroot = "{store}/run"\n'
        )
        self.environment = os.environ | {
            "CONTAINERS_CONF": f"{store}/containers.conf",
            "CONTAINERS_STORAGE_CONF": f"{store}/storage.conf",
            "BUILDAH_ISOLATION": "chroot",
        }

    def run(self, *command: str | Path, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command that uses the store. Raises AssertionError with what it printed."""
        options = {"env": self.environment, "text": True, "capture_output": True} | options
        result = subprocess.run(command, **options)
        if check:
            assert result.returncode == 0, f"{command}\n{result.stdout[-3000:]}{result.stderr[-3000:]}"
        return result

    def build(
        self, target: str, tag: str, *arguments: str, context: Path = REPOSITORY
    ) -> subprocess.CompletedProcess[str]:
        """Build a target of the Dockerfile of `context`; the output says why when it fails."""
        command = ["buildah", "bud", "--layers", "--pull-never", "--secret", f"id=ca,src={CA_BUNDLE}"]
        command += ["--build-arg", f"BUILD_ID={time.time_ns()}", "--target", target, "--tag", tag, *arguments]
        return self.run(*command, str(context), check=False)

    def make(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run one of the repository's make targets."""
        command = ["env", "--unset=MAKEFLAGS", "--unset=MAKELEVEL", "make", f"CA_BUNDLE={CA_BUNDLE}", *words]
        return self.run(*command, cwd=REPOSITORY)

    def podman(self, *words: str) -> str:
        """Run podman and return what it prints."""
        result = self.run("podman", *words)
        return result.stdout + result.stderr


COMPOSE = Path(sys.executable).parent / "podman-compose"
