"""The wheels of older releases, as pinned in ``upstream.toml``."""

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from server_ext.image.series import upstream

RELEASES: dict[str, Any] = upstream()["releases"]


def unpacked(version: str) -> Path:
    """The release without its dependencies, from the user's cache; pip takes only a wheel whose sha256 is pinned."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sglang-dflash" / "releases"
    root.mkdir(parents=True, exist_ok=True)
    folder = root / f"{version}-{sys.implementation.cache_tag}"
    with (root / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test processes side by side
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=root) as scratch:
                hashes = " ".join(f"--hash=sha256:{sha256}" for sha256 in RELEASES[version]["wheels"].values())
                requirement = Path(scratch) / "requirement.txt"
                requirement.write_text(f"sglang=={version} {hashes}\n")
                command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
                command += ["--only-binary", ":all:", "--require-hashes", "--requirement", requirement]
                subprocess.run([*command, "--target", Path(scratch) / "made"], check=True)
                (Path(scratch) / "made").rename(folder)
    return folder
