"""Images for the cluster's containerd, made without a container builder."""

import hashlib
import io
import json
import platform
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write(archive: Path, name: str, files: Mapping[str, Path | str], command: list[str]) -> None:
    """Write an OCI archive of an image with one layer.

    `files` maps absolute paths in the image to files here, or to texts that are the targets of symbolic links. Folders
    on the way are made, readable for every user whatever they are here: containers run as users of their own.
    """
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        folders = {parent for path in files for parent in Path(path).parents} - {Path("/")} | {
            Path("/tmp"),
            Path("/etc"),
        }
        for folder in sorted(folders):
            entry = tarfile.TarInfo(str(folder).lstrip("/"))
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for path, source in sorted(files.items()):
            entry = tarfile.TarInfo(path.lstrip("/"))
            if isinstance(source, str):
                entry.type, entry.linkname = tarfile.SYMTYPE, source
                tar.addfile(entry)
            else:
                entry.size, entry.mode = source.stat().st_size, 0o755 if source.stat().st_mode & 0o100 else 0o644
                with source.open("rb") as content:
                    tar.addfile(entry, content)
    blobs: dict[str, bytes] = {}

    def blob(content: bytes, media_type: str) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        blobs[digest] = content
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}

    kind = "application/vnd.oci.image"
    layer_blob = blob(layer.getvalue(), f"{kind}.layer.v1.tar")
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": command, "Env": ["PATH=/usr/local/bin:/usr/bin:/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [layer_blob["digest"]]},
    }
    manifest = {
        "schemaVersion": 2,
        "config": blob(json.dumps(config).encode(), f"{kind}.config.v1+json"),
        "layers": [layer_blob],
    }
    entry = blob(json.dumps(manifest).encode(), f"{kind}.manifest.v1+json")
    entry["annotations"] = {"io.containerd.image.name": name}
    with tarfile.open(archive, "w") as tar:

        def add(path: str, content: bytes) -> None:
            item = tarfile.TarInfo(path)
            item.size = len(content)
            tar.addfile(item, io.BytesIO(content))

        add("oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        add("index.json", json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode())
        for digest, content in blobs.items():
            add(f"blobs/sha256/{digest}", content)


def python_files() -> dict[str, Path | str]:
    """Return this Python without site packages, a few programs, and the libraries that they and the engine load."""
    base = Path(sys.base_prefix)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = base / "lib" / version
    skipped = {"site-packages", "dist-packages", "test", "idlelib", "turtledemo", "ensurepip"}
    modules = [
        path
        for path in library.rglob("*")
        if path.is_file() and not skipped & {*path.relative_to(library).parts} and ".pyc." not in path.name
    ]
    python = Path(sys.executable).resolve()
    programs = [Path("/bin/sleep"), Path("/bin/sh"), Path("/usr/bin/lscpu")]  # the engine asks for the topology
    files: dict[str, Path | str] = {str(path): path for path in [*modules, python]}
    files |= {f"/usr/bin/{path.name}": path.resolve() for path in programs}
    files |= {"/bin": "usr/bin", "/lib": "usr/lib", "/lib64": "usr/lib64"}
    files["/usr/local/bin/python3"] = str(python)
    # What wheels may expect of every system (PEP 600), and what looks names up.
    expected = ["libstdc++", "libgcc_s", "libpthread", "libdl", "librt", "libutil", "libresolv", "libnss_files"]
    expected += ["libnss_dns", "libmvec", "libanl", "libz", "libgomp", "libnuma"]
    wanted = [path for name in expected for path in Path("/lib").glob(f"{platform.machine()}-linux-gnu/{name}.so.?")]
    needing = [python, *programs, *library.glob("lib-dynload/*.so"), *wanted]
    for path in {*_libraries(needing), *wanted}:
        text = str(path)
        if text.startswith(("/lib/", "/lib64/")):
            text = f"/usr{text}"
        files[text] = path.resolve()
    return files


def _libraries(programs: Iterable[Path]) -> set[Path]:
    """Return the shared libraries that programs load."""
    printed = subprocess.run(["ldd", *programs], capture_output=True, text=True).stdout
    return {Path(path) for path in re.findall(r"(/\S+) \(0x", printed)}
