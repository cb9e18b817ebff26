"""The tools, Python's slim image made from Debian's packages, since no registry is needed, and the CPU image."""

import os
from pathlib import Path

import pytest
from container_tools import PACKAGES, PYTHON, VERSION, Containers


@pytest.fixture(scope="session")
def containers(tmp_path_factory: pytest.TempPathFactory) -> Containers:
    missing = [package for package in PACKAGES if not Path(f"/usr/share/doc/{package}").exists()]
    assert not missing, f"{', '.join(missing)} not found: apt-get install --no-install-recommends {' '.join(PACKAGES)}"
    store = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sglang-dflash" / "images"
    store.mkdir(parents=True, exist_ok=True)
    made = Containers(store)
    if made.run("buildah", "inspect", "--type=image", PYTHON, check=False).returncode != 0:
        base = tmp_path_factory.mktemp("debian")
        include = "--include=python3,python3-pip,ca-certificates"
        made.run("debootstrap", "--variant=minbase", include, "bookworm", str(base))
        container = made.run("buildah", "from", "scratch").stdout.strip()
        made.run("buildah", "add", "--quiet", container, str(base), "/")
        made.run("buildah", "commit", "--quiet", container, PYTHON)
        made.run("buildah", "rm", container)
    return made


@pytest.fixture(scope="session")
def cpu(containers: Containers) -> str:
    """The image of ``make image-cpu``."""
    containers.make("image-cpu", "CONTAINER_TOOL=buildah")
    return f"localhost/sglang-dflash:{VERSION}-cpu"
