"""Releases that get the eviction fix alone: real files of the pinned wheel, as published and with the series."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from server_ext.image import patchset
from server_ext.image.installation import Installation, apply, pristine_copy
from server_ext.image.series import HERE, PATCHES, Patch, Series, pinned_version, series_hash

import older_release
import unpacked_wheels

FIXED_FILE = "sglang/srt/speculative/dflash_info_v2.py"
EAGLE_FILE = "sglang/srt/speculative/eagle_utils.py"


@pytest.fixture(scope="session", params=unpacked_wheels.RELEASES)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pristine_copy(tmp_path_factory.mktemp("published"), unpacked_wheels.unpacked(request.param))


@pytest.fixture(scope="session")
def patched(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = pristine_copy(tmp_path_factory.mktemp("patched"), published)
    installation = Installation.find(root)
    assert apply(installation, Series.load(installation.version))
    return root


@pytest.fixture(scope="session")
def seen(published: Path, patched: Path) -> dict[str, Any]:
    """What decode steps do, by `published`, `patched` and `eagle`."""
    command = [sys.executable, "-W", "ignore", older_release.__file__, published, patched]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr[-5000:]
    return json.loads(run.stdout.splitlines()[-1])


def evicts(run: dict[str, Any], _: dict[str, Any]) -> bool:
    return run["decode"]["after"][-1]["evicted"] > 0


def ticks(run: dict[str, Any], _: dict[str, Any]) -> bool:
    return run["decode"]["after"][0]["ticks"] == 1


def evicts_before_it_ticks(run: dict[str, Any], _: dict[str, Any]) -> bool:
    """And before it allocates: each eviction sees the books that the step before left."""
    at, after = run["decode"]["at_evictions"], run["decode"]["after"]
    return [books["ticks"] for books in at] == list(range(len(after))) and all(
        now["allocated"] == then["allocated"] for now, then in zip(at[1:], after, strict=False)
    )


def keeps_ticking(run: dict[str, Any], _: dict[str, Any]) -> bool:
    return [books["ticks"] for books in run["decode"]["after"]] == list(range(1, older_release.STEPS + 1))


def leaves_an_empty_batch_alone(run: dict[str, Any], _: dict[str, Any]) -> bool:
    """The steps around it evict and tick, once each."""
    return run["empty"]["requests_at_evictions"] == [1, 1] and run["empty"]["ticks"] == 2


def keeps_the_books_of_eagle(run: dict[str, Any], eagle: dict[str, Any]) -> bool:
    return run["decode"] == eagle


PROPERTIES = (
    evicts,
    ticks,
    evicts_before_it_ticks,
    keeps_ticking,
    leaves_an_empty_batch_alone,
    keeps_the_books_of_eagle,
)


@pytest.mark.parametrize("holds", PROPERTIES)
def test_dflash_evicts(seen: dict[str, Any], holds: Callable[[dict[str, Any], dict[str, Any]], bool]) -> None:
    assert holds(seen["patched"], seen["eagle"])
    assert not holds(seen["published"], seen["eagle"]), "the release does not need the patch"


def test_a_request_outlives_the_pool_only_with_the_patch(seen: dict[str, Any]) -> None:
    reserve = 2 * older_release.BLOCK_TOKENS
    bound = older_release.WINDOW_TOKENS + older_release.ACCEPTED_TOKENS + reserve
    with_patch, without = seen["patched"]["decode"], seen["published"]["decode"]

    assert with_patch["error"] is None
    assert with_patch["generated"] > 3 * older_release.SWA_TOKENS
    assert max(books["swa_held"] for books in with_patch["after"]) <= bound

    assert without["error"].startswith("Out of memory")
    assert all(books["swa_held"] == books["allocated"] for books in without["after"])
    left = older_release.SWA_TOKENS - without["after"][-1]["swa_held"]
    assert 0 <= left < older_release.ACCEPTED_TOKENS


def test_eagle_is_as_published(published: Path, patched: Path, seen: dict[str, Any]) -> None:
    assert Series.load(Installation.find(patched).version).paths() == (FIXED_FILE,)
    assert (patched / EAGLE_FILE).read_bytes() == (published / EAGLE_FILE).read_bytes()
    assert seen["eagle"]["after"][-1]["evicted"] > 0


def test_the_tool_takes_the_release_for_what_it_is(patched: Path, published: Path, tmp_path: Path) -> None:
    root = pristine_copy(tmp_path / "again", patched)
    version = Installation.find(root).version

    def said(command: str) -> str:
        run = [sys.executable, patchset.__file__, command, "--target", root]
        return subprocess.run(run, capture_output=True, text=True, check=True).stdout

    series = (
        f"series {series_hash(version)}, 1 patch for SGLang {version} ({unpacked_wheels.RELEASES[version]['holds']})"
    )
    assert said("apply") == f"applied: {series} in {root}\n"
    assert said("status").startswith(f"applied: {series} in {root}\n")
    assert (root / FIXED_FILE).read_bytes() == (patched / FIXED_FILE).read_bytes()
    assert said("unapply") == f"as published again: SGLang {version} in {root}\n"
    assert (root / FIXED_FILE).read_bytes() == (published / FIXED_FILE).read_bytes()


def state_of(patch: Patch, version: str) -> str:
    """What a release has to do with a patch of any of the series."""
    if patch.name in {other.name for other in Series.load(version).patches}:
        return "needed"
    since = patch.fields["Applied-Upstream"]
    if since != "no" and Version(since) <= Version(version):
        return f"upstream since {since}"
    return "not applicable"


def test_the_readme_says_which_release_needs_which_patch() -> None:
    versions = sorted((*unpacked_wheels.RELEASES, pinned_version()), key=Version)
    assert {path.parent.name for path in PATCHES.glob("*/series")} == set(versions)
    rows = [f"| patch | {' | '.join(versions)} |", f"| --- |{' --- |' * len(versions)}"]
    for patch in {patch.name: patch for version in versions for patch in Series.load(version).patches}.values():
        states = " | ".join(state_of(patch, version) for version in versions)
        rows.append(f"| {patch.message.partition(chr(10))[0]} | {states} |")
    assert "\n".join(["", *rows, ""]) in (HERE / "README.md").read_text()
