"""Patches the SGLang of a container image and proves that this package fits it: `python -m server_ext.image.bake`.

Run in the build of the image, with the Python that will serve, after this package was installed there. Whatever is not
as it must be ends the build.
"""

from __future__ import annotations

import argparse
import compileall
import dataclasses
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from server_ext.image.installation import Installation, applied, apply, parse_record
from server_ext.image.series import PatchsetError, Series, pinned_version

import server_ext

# Each in a process of its own: what is hooked in one process of the engine is not in another. Without a GPU both run on
# the CPU platform; the hooks are the same on every platform.
_SELF_TESTS = {
    "the HTTP process": "from server_ext.serve import check_installation; check_installation()",
    "the scheduler's process": (
        "import sglang.srt.managers.scheduler; from sglang.srt.plugins import load_plugins; load_plugins(); "
        "from server_ext import plugin; assert plugin.loaded"
    ),
}


def pinned(published: Path) -> Installation:
    """Find the SGLang that this Python imports. Raise PatchsetError unless it is the pinned release.

    `published` is a wheel of that release. A checkout has no record of its files, so it is held to the wheel's Python
    files, all but the generated version; compiled modules differ from build to build.
    """
    installation = Installation.find()
    if installation.version != pinned_version():
        raise PatchsetError(
            f"the base image has SGLang {installation.version} in {installation.root}, and the patches are for "
            f"{pinned_version()}; build on an image of that release (BASE_IMAGE)"
        )
    if installation.record:
        return installation
    with zipfile.ZipFile(published) as wheel:
        record = parse_record(wheel.read(f"sglang-{pinned_version()}.dist-info/RECORD").decode())
    generated = "sglang/_version.py"
    return dataclasses.replace(
        installation,
        record={path: digest for path, digest in record.items() if path.endswith(".py") and path != generated},
    )


def bake(published: Path, expected_hash: str | None) -> str:
    """Apply the series to the pinned SGLang, compile what is ours, test; return a line that says what was done.

    Raise PatchsetError for another SGLang, a changed file, a series that is not the one announced, or a failed test.
    """
    series = Series.load(pinned_version())
    if expected_hash and expected_hash != series.hash:
        raise PatchsetError(
            f"the image would be labelled with series {expected_hash} and holds {series.hash}; leave SERIES_HASH to "
            "`make image`"
        )
    installation = pinned(published)
    apply(installation, series)
    state = applied()
    if state is None or state.series_hash != series.hash:
        raise PatchsetError(f"the series is not whole in {installation.root}; start from a clean base image")
    # Not the whole of SGLang, which the base image compiled as it chose to: our layers stay small.
    for path in state.files:
        if path.endswith(".py") and (installation.root / path).exists():
            compileall.compile_file(installation.root / path, quiet=1)
    for folder in server_ext.__path__:
        compileall.compile_dir(folder, quiet=1)
    for where, program in _SELF_TESTS.items():
        _test(where, program)
    return f"{series} in {installation.root}; hooks fit in {' and '.join(_SELF_TESTS)}"


def _test(where: str, program: str) -> None:
    environment = {**os.environ, "SGLANG_PLATFORM": "cpu_reference", "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    if result.returncode != 0:
        print(result.stderr, file=sys.stderr)
        last = (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
        raise PatchsetError(f"the self-test of {where} failed: {last}")


def main() -> int:
    """Return 0, or 2 with one line that says what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m server_ext.image.bake", description=__doc__)
    parser.add_argument("--published", type=Path, required=True, help="a wheel of the pinned SGLang")
    parser.add_argument("--series-hash", metavar="SHA256", help="the series that the image's label will name")
    args = parser.parse_args()
    try:
        print(bake(args.published, args.series_hash))
    except PatchsetError as error:
        print(f"bake: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
