"""An installed SGLang: finding it, applying a series to it, and putting the published files back.

An installation that was patched holds `sglang/.patchset/`: `state.json` (what was applied, the sha256 of each file
before and after) and `original/` (the files as they were). The record is written before the first file is replaced, and
every file is replaced by a rename, so a run that is killed leaves each file old or new, and the next `apply` or
`unapply` puts the rest right. Installed files may be hard links into a package cache: none is opened for writing.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import fcntl
import glob
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from server_ext.image.series import Outcome, PatchsetError, Series


@dataclass(frozen=True)
class State:
    """What `apply` recorded: patch name to sha256, file path to its sha256 before and after (None: no such file)."""

    version: str
    series_hash: str
    patches: dict[str, str]
    files: dict[str, tuple[str | None, str | None]]


@dataclass(frozen=True)
class Installation:
    """An SGLang on disk: `root` is the directory that holds the package `sglang`."""

    root: Path
    version: str
    record: dict[str, str]  # path to sha256 as the wheel's RECORD has them; empty for a source checkout

    @classmethod
    def find(cls, target: Path | None = None) -> Installation:
        """Find the SGLang this Python imports, or the one in `target`: an environment, a package folder, a checkout."""
        if target is None:
            spec = importlib.util.find_spec("sglang")
            if not spec or not spec.submodule_search_locations:
                raise PatchsetError(f"no SGLang in {sys.prefix}; install the pinned release or give --target")
            root = Path(next(iter(spec.submodule_search_locations))).resolve().parent
        else:
            places = [target, target / "python", *sorted(target.glob("lib/python3.*/site-packages"))]
            found = next((place for place in places if (place / "sglang/__init__.py").is_file()), None)
            if not found:
                raise PatchsetError(
                    f"no SGLang in {target}; --target takes an environment, a package folder or a checkout"
                )
            root = found.resolve()
        for distribution in importlib.metadata.distributions(name="sglang", path=[str(root)]):
            return cls(root, distribution.version, parse_record(distribution.read_text("RECORD") or ""))
        return cls(root, _source_version(root, target is None), {})

    @property
    def home(self) -> Path:
        """Where the record of what was applied is kept."""
        return self.root / "sglang" / ".patchset"

    def state(self) -> State | None:
        """What was applied here, or None. The record of another release that was since replaced counts as none."""
        try:
            raw = json.loads((self.home / "state.json").read_text())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise PatchsetError(
                f"{self.home / 'state.json'}: {error}; remove {self.home} and {self.way_out()}"
            ) from None
        state = State(**{**raw, "files": {path: tuple(pair) for path, pair in raw["files"].items()}})
        return state if state.version == self.version else None

    def condition(self, state: State | None) -> str:
        """One of `not applied`, `applied`, `interrupted`, `changed`: the recorded files against what is there."""
        if state is None:
            return "not applied"
        found = [(file_sha256(self.root / path), *hashes) for path, hashes in state.files.items()]
        if all(now == after for now, _, after in found):
            return "applied"
        if all(now == before for now, before, _ in found):
            return "not applied"
        return "interrupted" if all(now in known for now, *known in found) else "changed"

    def original(self, path: str, state: State | None) -> Path:
        """Where the unpatched bytes of `path` are; a file of that name does not exist if the release has none."""
        kept = self.home / "original" / path
        if state and path in state.files and (kept.exists() or state.files[path][0] is None):
            return kept
        return self.root / path

    def verify(self, state: State | None) -> None:
        """Raise PatchsetError if an unpatched file is not what the wheel's RECORD says (a checkout has no RECORD)."""
        for path, expected in self.record.items():
            if (found := file_sha256(self.original(path, state))) != expected:
                raise PatchsetError(
                    f"{self.root / path} is not the file of the SGLang {self.version} wheel: expected sha256 "
                    f"{expected}, found {found or 'no file'}; {self.way_out()}"
                )

    def outcomes(self, series: Series, state: State | None) -> dict[str, Outcome]:
        """What the series makes of the unpatched files here. Raise PatchsetError if it does not fit them."""
        try:
            return series.result(lambda path: read_file(self.original(path, state)))
        except PatchsetError as error:
            raise PatchsetError(f"{error}; {self.way_out()}") from None

    def way_out(self) -> str:
        """How to get the published files back, in words for the end of an error."""
        if self.record:
            return f"reinstall it: pip install --force-reinstall --no-deps sglang=={self.version}"
        return f"restore the files in {self.root}: git checkout v{self.version} -- sglang"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second writer out until the end; a killed process leaves no lock behind."""
        folder = os.open(self.root / "sglang", os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)


def _source_version(root: Path, imported: bool) -> str:
    """The version of a package with no metadata beside it: what its code says, or the editable install behind it."""
    code = (read_file(root / "sglang/_version.py") or b"").decode()
    if match := re.search(r"^(?:__version__ = )?version = '([^']+)'", code, re.M):
        return match[1]
    if imported:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version("sglang")
    raise PatchsetError(f"{root / 'sglang'} does not say its version; install it first: pip install -e {root}")


def parse_record(text: str) -> dict[str, str]:
    """The hex sha256 of each file below `sglang/` in a wheel's RECORD."""
    hashes = {row[0]: row[1].removeprefix("sha256=") for row in csv.reader(text.splitlines()) if row[1]}
    return {
        path: base64.urlsafe_b64decode(value + "=").hex()
        for path, value in hashes.items()
        if path.startswith("sglang/")
    }


def read_file(path: Path) -> bytes | None:
    """The bytes of a file, None if there is none."""
    return path.read_bytes() if path.is_file() else None


def file_sha256(path: Path) -> str | None:
    """The hex sha256 of a file, None if there is none."""
    content = read_file(path)
    return None if content is None else hashlib.sha256(content).hexdigest()


def _link(source: str | Path, destination: str | Path) -> None:
    """Hard-link, or copy with mode and time where the file system cannot link."""
    try:
        os.link(source, destination)
    except OSError:
        shutil.copy2(source, destination)


def _forget_bytecode(path: Path) -> None:
    """Drop a module's .pyc files: Python tells old from new by size and whole seconds alone."""
    for compiled in (path.parent / "__pycache__").glob(f"{glob.escape(path.stem)}.*.pyc"):
        compiled.unlink(missing_ok=True)


def apply(installation: Installation, series: Series) -> bool:
    """Apply the series, in place of an older one if there is one. Return False if it was applied before.

    All or nothing: an error leaves the installation as it was, or (killed, power) such that the next call succeeds.
    """
    with installation.locked():
        state = installation.state()
        if state and state.series_hash == series.hash and installation.condition(state) == "applied":
            return False
        installation.verify(state)
        outcomes = {path: o for path, o in installation.outcomes(series, state).items() if o.before != o.after}
        if state:
            _undo(installation, state)
        try:
            new_state = _stage(installation, series, outcomes)
        except BaseException:
            shutil.rmtree(installation.home, ignore_errors=True)
            raise
        try:
            for path, outcome in outcomes.items():
                file = installation.root / path
                file.parent.mkdir(parents=True, exist_ok=True)
                if outcome.after is None:
                    file.unlink()
                else:
                    (installation.home / "new" / path).replace(file)
                _forget_bytecode(file)
        except BaseException:
            _undo(installation, new_state)
            raise
        shutil.rmtree(installation.home / "new", ignore_errors=True)
        return True


def _stage(installation: Installation, series: Series, outcomes: dict[str, Outcome]) -> State:
    """Write the new files, keep the old ones, then write the record; touch nothing that is in use."""
    home = installation.home
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    (home / ".gitignore").write_text("*\n")
    files = {}
    for path, outcome in outcomes.items():
        file, kept, new = installation.root / path, home / "original" / path, home / "new" / path
        if outcome.before is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            _link(file, kept)
        if outcome.after is not None:
            new.parent.mkdir(parents=True, exist_ok=True)
            new.write_bytes(outcome.after)
            new.chmod(outcome.mode)
            if outcome.before is not None:
                old = file.stat()
                new.chmod(stat.S_IMODE(old.st_mode))
                with contextlib.suppress(PermissionError):
                    os.chown(new, old.st_uid, old.st_gid)
                if int(old.st_mtime) >= int(new.stat().st_mtime):  # for Python's bytecode it must be another second
                    os.utime(new, (old.st_atime, old.st_mtime + 1))
        digests = [
            None if data is None else hashlib.sha256(data).hexdigest() for data in (outcome.before, outcome.after)
        ]
        files[path] = (digests[0], digests[1])
    state = State(series.version, series.hash, {patch.name: patch.sha256 for patch in series.patches}, files)
    (home / "state.new").write_text(json.dumps(asdict(state), indent=1) + "\n")
    (home / "state.new").replace(home / "state.json")
    return state


def unapply(installation: Installation) -> bool:
    """Put the published files back, exactly. Return False if nothing was applied.

    Raise PatchsetError, having touched nothing, if a file was changed after the series was applied.
    """
    with installation.locked():
        state = installation.state()
        if state:
            _undo(installation, state)
        return state is not None


def _undo(installation: Installation, state: State) -> None:
    """Restore every recorded file, whatever part of it was replaced; the record goes last."""
    found = {path: file_sha256(installation.root / path) for path in state.files}
    for path, (before, after) in state.files.items():
        if found[path] not in (before, after):
            raise PatchsetError(
                f"{installation.root / path} changed after the series was applied: expected sha256 {after}, "
                f"found {found[path] or 'no file'}; keep your change elsewhere and {installation.way_out()}"
            )
    for path, (before, _) in state.files.items():
        file = installation.root / path
        if found[path] != before:
            if before is None:
                file.unlink()
            else:
                file.parent.mkdir(parents=True, exist_ok=True)
                (installation.home / "original" / path).replace(file)
        _forget_bytecode(file)
        if before is None:
            _remove_empty_folders(installation.root, path)
    (installation.home / "state.json").unlink()
    shutil.rmtree(installation.home)


def applied(target: Path | None = None) -> State | None:
    """What is applied to an installation; None if it is as published. For start-up checks and metrics.

    Raise PatchsetError if it is neither: the run that patched it was killed, or someone edited it since.
    """
    installation = Installation.find(target)
    state = installation.state()
    condition = installation.condition(state)
    if condition in ("interrupted", "changed"):
        cause = "were edited since" if condition == "changed" else "were left half done by a run that was cut short"
        raise PatchsetError(f"the patches in {installation.root} {cause}; run: sglang-dflash patches apply")
    return state if condition == "applied" else None


def pristine_copy(destination: Path, target: Path | None = None, *, link: bool = True) -> Path:
    """Make a copy of an installation's package as published, patched or not, and return `destination` for PYTHONPATH.

    With `link` the files are hard links: fast, and never to be written into. Takes the wheel's metadata along.
    """
    copy_published(Installation.find(target), destination, link=link)
    return destination


def copy_published(installation: Installation, destination: Path, *, link: bool) -> None:
    """Do what `pristine_copy` says for an installation that is found already."""
    copy = _link if link else shutil.copy2
    skip = shutil.ignore_patterns("__pycache__", installation.home.name)
    with installation.locked():
        state = installation.state()
        installation.verify(state)
        for folder in (installation.root / "sglang", *installation.root.glob("sglang-*.dist-info")):
            shutil.copytree(folder, destination / folder.name, ignore=skip, copy_function=copy)
        for path, (before, _) in (state.files if state else {}).items():
            (destination / path).unlink(missing_ok=True)
            if before is None:
                _remove_empty_folders(destination, path)
            else:
                (destination / path).parent.mkdir(parents=True, exist_ok=True)
                copy(installation.original(path, state), destination / path)


def _remove_empty_folders(root: Path, path: str) -> None:
    """Remove the folders between `root` and the removed file `path` that it was alone in."""
    for folder in (root / Path(path).parent / "__pycache__", *(root / path).parents[: len(Path(path).parents) - 2]):
        with contextlib.suppress(OSError):  # not empty, or gone
            folder.rmdir()
