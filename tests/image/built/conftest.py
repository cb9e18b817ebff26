"""Python's slim image, made from Debian's packages: no registry is needed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from container_tools import PYTHON, TOOLS, Containers


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
