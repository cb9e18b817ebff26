"""The pins agree with each other, and make says what is wrong with the Python it is given."""

import os
import re
import subprocess
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
UPSTREAM = tomllib.loads((REPOSITORY / "image" / "upstream.toml").read_text())["sglang"]
LOCKS = ("bootstrap", "dev", "engine", "sbom")


def lock(name: str) -> str:
    return (REPOSITORY / "requirements" / f"{name}.lock").read_text()


def test_lock_pins_the_upstream_version_and_its_wheels() -> None:
    pin = re.search(r"^sglang==(\S+) .*\\\n((?:    --hash=.*\n)+)", lock("engine"), re.MULTILINE)
    assert pin is not None
    assert pin[1] == UPSTREAM["version"]
    assert set(UPSTREAM["wheels"].values()) <= set(re.findall(r"sha256:([0-9a-f]{64})", pin[2]))


def test_environment_has_the_upstream_version() -> None:
    assert version("sglang") == UPSTREAM["version"]


@pytest.mark.parametrize("name", LOCKS)
def test_lock_says_how_it_was_made_and_hashes_everything(name: str) -> None:
    text = lock(name)
    assert "\n#    make lock\n" in text
    requirements = [line for line in text.splitlines() if "==" in line]
    assert requirements and all(line.endswith("\\") for line in requirements)


def pins(name: str) -> dict[str, set[str]]:
    """Return each package's versions in a lock; Python 3.11 and 3.12 can need different ones."""
    found: dict[str, set[str]] = {}
    for package, pinned in re.findall(r"^([\w.\[\]-]+)==(\S+)", lock(name), re.MULTILINE):
        found.setdefault(package, set()).add(pinned)
    return found


def test_locks_agree() -> None:
    engine, dev = pins("engine"), pins("dev")
    shared = engine.keys() & dev.keys()
    assert shared
    assert {package: engine[package] for package in shared} == {package: dev[package] for package in shared}


def test_no_other_file_states_the_version() -> None:
    """One fact in one place: what needs the version reads image/upstream.toml; prose and patches may name it."""
    tracked = subprocess.run(
        ["git", "ls-files", "*.py", "*.toml", "Makefile", ".ci"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    stating = {
        name
        for name in tracked.stdout.split()
        if re.search(rf"[\"'=]{re.escape(UPSTREAM['version'])}[\"'\s]", (REPOSITORY / name).read_text())
    }
    assert stating <= {"image/upstream.toml"}


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        ["make", *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, env=environment
    )


def complaint(*arguments: str) -> str:
    """Return the one line with which make refuses."""
    result = make(*arguments)
    assert result.returncode == 2 and result.stderr.count("\n") == 1, result.stderr
    return result.stderr


@pytest.mark.parametrize("reported", ["Python 3.10.13", "Python 3.13.0"])
def test_make_refuses_another_python(reported: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "{reported}" && exit\nexit 1\n')
    python.chmod(0o755)
    said = complaint("check-python", f"PYTHON={python}")
    assert f"PYTHON={python} ({reported})" in said
    assert "3.11" in said and "3.12" in said and "name another: PYTHON=" in said


def test_make_refuses_a_python_that_is_not_there() -> None:
    assert "PYTHON=/nowhere/python (" in complaint("check-python", "PYTHON=/nowhere/python")


def test_make_help_names_every_target_of_the_readme() -> None:
    listed = set(re.findall(r"^  make ([a-z-]+)", make("help").stdout, re.MULTILINE))
    used = set(re.findall(r"\bmake ([a-z-]+)", (REPOSITORY / "README.md").read_text()))
    assert used and used <= listed
