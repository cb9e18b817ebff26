"""Writes what an image holds as SPDX 2.3: `python -m server_ext.image.sbom FILE.spdx.json`.

Python distributions as their metadata describe them, Debian packages as dpkg lists them, and SGLang with each patch of
the series that is applied to it. The format is the SPDX project's own library's, which also checks the document.
"""

import hashlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime

from license_expression import ExpressionError, get_spdx_licensing
from server_ext.image.installation import applied
from server_ext.image.series import PATCHES
from spdx_tools.spdx.model import (
    Actor,
    ActorType,
    Checksum,
    ChecksumAlgorithm,
    CreationInfo,
    Document,
    ExternalPackageRef,
    ExternalPackageRefCategory,
    File,
    Package,
    Relationship,
    RelationshipType,
    SpdxNoAssertion,
)
from spdx_tools.spdx.writer.write_anything import write_file

_ROOT = "SPDXRef-DOCUMENT"


def _id(kind: str, name: str) -> str:
    return f"SPDXRef-{kind}-{re.sub(r'[^A-Za-z0-9.-]', '-', name)}"


def _package(kind: str, name: str, version: str, purl: str, licence: str | None) -> Package:
    try:
        expression = get_spdx_licensing().parse(licence, validate=True) if licence else None
    except ExpressionError:  # free text; the licence itself is beside the package
        expression = None
    return Package(
        spdx_id=_id(kind, f"{name}-{version}"),
        name=name,
        version=version,
        download_location=SpdxNoAssertion(),
        files_analyzed=False,
        license_declared=SpdxNoAssertion() if expression is None else expression,
        external_references=[ExternalPackageRef(ExternalPackageRefCategory.PACKAGE_MANAGER, "purl", purl)],
    )


def python_packages() -> list[Package]:
    """Return the distributions that this Python finds, each name once, as an import would resolve it."""
    found = {}
    for distribution in importlib.metadata.distributions():
        meta: Mapping[str, str] = distribution.metadata  # type: ignore[assignment]  # a message, which is one
        name = re.sub(r"[-_.]+", "-", meta.get("Name", "")).lower()
        if name and name not in found:
            licence = meta.get("License-Expression") or meta.get("License")
            purl = f"pkg:pypi/{name}@{distribution.version}"
            found[name] = _package("Python", name, distribution.version, purl, licence)
    return [found[name] for name in sorted(found)]


def debian_packages() -> list[Package]:
    """Return the packages that dpkg lists, none where there is no dpkg."""
    if shutil.which("dpkg-query") is None:
        return []
    listing = subprocess.run(
        ["dpkg-query", "--show", "--showformat", "${Package}\t${Version}\t${Architecture}\n"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    packages = []
    for line in listing.splitlines():
        name, version, architecture = line.split("\t")
        purl = f"pkg:deb/{name}@{version}?arch={architecture}"
        packages.append(_package("Debian", f"{name}-{architecture}", version, purl, None))
    return packages


def document() -> Document:
    """Return the document. Raises `ValueError` if SGLang is not patched here."""
    state = applied()
    if state is None:
        raise ValueError("SGLang is not patched here; run sglang-dflash patches apply")
    packages = [*python_packages(), *debian_packages()]
    (sglang,) = (
        package for package in packages if package.external_references[0].locator.startswith("pkg:pypi/sglang@")
    )
    files, relations = [], [Relationship(_ROOT, RelationshipType.DESCRIBES, package.spdx_id) for package in packages]
    for name, sha256 in state.patches.items():
        content = (PATCHES / state.version / name).read_bytes()
        patch = File(
            name=f"./image/patches/{state.version}/{name}",
            spdx_id=_id("Patch", name),
            checksums=[
                Checksum(ChecksumAlgorithm.SHA1, hashlib.sha1(content, usedforsecurity=False).hexdigest()),
                Checksum(ChecksumAlgorithm.SHA256, sha256),
            ],
        )
        files.append(patch)
        relations.append(Relationship(patch.spdx_id, RelationshipType.PATCH_FOR, sglang.spdx_id))
        relations.append(Relationship(sglang.spdx_id, RelationshipType.PATCH_APPLIED, patch.spdx_id))
    info = CreationInfo(
        spdx_version="SPDX-2.3",
        spdx_id=_ROOT,
        name="sglang-dflash",
        document_namespace=f"https://spdx.org/spdxdocs/sglang-dflash-{state.series_hash}",
        creators=[Actor(ActorType.TOOL, "spdx-tools")],
        created=datetime.now(UTC).replace(tzinfo=None, microsecond=0),
    )
    return Document(info, packages=packages, files=files, relationships=relations)


if __name__ == "__main__":
    write_file(document(), sys.argv[1])
