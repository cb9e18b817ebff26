"""The format of a patch series, and how it is applied in memory.

A release's series is `patches/<version>/series`: one file name a line, in order. A patch file is what `git am` reads:
`From`, `Subject`, the reason in prose, DEP-3 fields (https://dep-team.pages.debian.net/deps/dep3/), `---`, and a git
diff with paths as in SGLang's repository (`python/sglang/...`). The diff of each file carries the full git blob ids of
its contents before and after, so a patch by itself says which bytes it fits and which bytes it makes: nothing is ever
applied with fuzz or at another line, and a source checkout is held to the same bytes as a wheel.
"""

from __future__ import annotations

import hashlib
import io
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server_ext.errors import UserError

HERE = Path(__file__).resolve().parent
PATCHES = HERE / "patches"
REPOSITORY_PREFIX = "python/"  # where SGLang's repository keeps what the wheel has at its top
NO_BLOB = "0" * 40
HEADER = re.compile(
    rb"(?:new file mode 100(\d{3})\n|deleted file mode 100\d{3}\n)?"
    rb"index ([0-9a-f]{40})\.\.([0-9a-f]{40})(?: 100(\d{3}))?\n(?:--- .+\n\+\+\+ .+\n)?"
)


class PatchsetError(UserError):
    """One line for the user: what is wrong, what was found, what to do."""


@dataclass(frozen=True)
class Hunk:
    """One place of a diff: `old` lines, from 0-based line `start` on, become `new` lines (each with its line end)."""

    start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]


@dataclass(frozen=True)
class FileChange:
    """One file of a patch: `path` as in the wheel, git blob ids (`NO_BLOB`: no such file), the mode of a new file."""

    path: str
    old_blob: str
    new_blob: str
    mode: int
    hunks: tuple[Hunk, ...]

    def apply(self, content: bytes | None) -> bytes | None:
        """Return the new bytes (None: no such file). Raise PatchsetError unless every byte is as the diff says."""
        if (found := blob_id(content)) != self.old_blob:
            raise PatchsetError(f"{self.path}: expected git blob {self.old_blob}, found {found}")
        if self.new_blob == NO_BLOB:
            return None
        lines, out, done = io.BytesIO(content or b"").readlines(), bytearray(), 0
        for hunk in self.hunks:
            if tuple(lines[hunk.start : hunk.start + len(hunk.old)]) != hunk.old or hunk.start < done:
                raise PatchsetError(f"{self.path}: the hunk at line {hunk.start + 1} does not match the file it names")
            out += b"".join((*lines[done : hunk.start], *hunk.new))
            done = hunk.start + len(hunk.old)
        result = bytes(out) + b"".join(lines[done:])
        if (found := blob_id(result)) != self.new_blob:
            raise PatchsetError(f"{self.path}: the diff makes git blob {found} and says {self.new_blob}")
        return result


@dataclass(frozen=True)
class Patch:
    """A patch file: its name in the series, its bytes, and what they mean."""

    name: str
    data: bytes
    author: str
    message: str  # the commit message: subject, blank line, prose, blank line, fields
    changes: tuple[FileChange, ...]

    @classmethod
    def parse(cls, name: str, data: bytes) -> Patch:
        """Read a patch file. Raise PatchsetError for anything that `export` would not write."""
        head, separator, diff = data.partition(b"\n---\n")
        match = re.fullmatch(r"From: (.+)\nSubject: (.+)\n\n((?s:.+))", head.decode(errors="replace"))
        if not separator or not match:
            raise PatchsetError(f"{name}: a patch starts with From, Subject, a blank line, prose and fields, and ---")
        author, subject, body = match.groups()
        try:
            return cls(name, data, author, f"{subject}\n\n{body}\n", parse_diff(diff))
        except PatchsetError as error:
            raise PatchsetError(f"{name}: {error}") from None

    @property
    def fields(self) -> dict[str, str]:
        """The DEP-3 fields: the message's last paragraph, `Name: value` lines with indented continuations."""
        paragraph = self.message.rstrip().rpartition("\n\n")[2]
        found = re.findall(r"^([A-Z][\w-]*): *(.*(?:\n[ \t].*)*)", paragraph, re.M)
        return {name: " ".join(value.split()) for name, value in found}

    @property
    def sha256(self) -> str:
        """Hex sha256 of the file."""
        return hashlib.sha256(self.data).hexdigest()


def blob_id(content: bytes | None) -> str:
    """Git's id of a file's bytes, 40 hex digits."""
    if content is None:
        return NO_BLOB
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def parse_diff(diff: bytes) -> tuple[FileChange, ...]:
    """Read a git diff with full blob ids: text files added, changed or deleted. Raise PatchsetError for all else."""
    changes = []
    for part in re.split(rb"^diff --git ", diff, flags=re.M)[1:]:
        names, _, body = part.partition(b"\n")
        name = names[2 : len(names) // 2].decode()  # "a/P b/P"
        if names != f"a/{name} b/{name}".encode() or not re.match(r"python/sglang/(?!.*\.\./)", name):
            raise PatchsetError(f"{names.decode()!r}: a patch changes files below python/sglang/ and renames none")
        header = HEADER.match(body)
        if not header:
            raise PatchsetError(f"{name}: a patch holds text changes with full blob ids, and no changes of mode")
        old_blob, new_blob, mode = header[2].decode(), header[3].decode(), int(header[1] or header[4] or b"644", 8)
        lines, at, hunks = io.BytesIO(body[header.end() :]).readlines(), 0, []
        while at < len(lines):
            hunk, at = _parse_hunk(name, lines, at)
            hunks.append(hunk)
        path = name.removeprefix(REPOSITORY_PREFIX)
        changes.append(FileChange(path, old_blob, new_blob, mode, tuple(hunks)))
    if not changes:
        raise PatchsetError("the patch holds no diff")
    return tuple(changes)


def _parse_hunk(path: str, lines: list[bytes], at: int) -> tuple[Hunk, int]:
    """Read the hunk whose `@@` line is `lines[at]`; return it and the index of the line behind it."""
    match = re.match(rb"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@", lines[at])
    if not match:
        raise PatchsetError(f"{path}: not a hunk: {lines[at].decode(errors='replace').strip()!r}")
    first, old_count, new_count = (1 if number is None else int(number) for number in match.groups())
    old: list[bytes] = []
    new: list[bytes] = []
    at += 1
    while at < len(lines) and (len(old) < old_count or len(new) < new_count or lines[at].startswith(b"\\")):
        kind, text = lines[at][:1], lines[at][1:]
        if kind == b"\\":  # "\ No newline at end of file" speaks of the line before
            for side, marks in ((old, b" -"), (new, b" +")):
                if lines[at - 1][:1] in marks:
                    side[-1] = side[-1].removesuffix(b"\n")
        if kind in b" -":
            old.append(text)
        if kind in b" +":
            new.append(text)
        at += 1
    if (len(old), len(new)) != (old_count, new_count):
        raise PatchsetError(f"{path}: the hunk at line {first} ends early")
    return Hunk(first - 1 if old_count else first, tuple(old), tuple(new)), at


@dataclass(frozen=True)
class Series:
    """The patches for one release, in order."""

    version: str
    patches: tuple[Patch, ...]

    @classmethod
    def load(cls, version: str, patches: Path = PATCHES) -> Series:
        """Read `patches/<version>`. Raise PatchsetError if there is none or one of its files is unfit."""
        folder = patches / version
        if not (folder / "series").is_file():
            known = ", ".join(sorted(path.parent.name for path in patches.glob("*/series"))) or "none"
            raise PatchsetError(
                f"no patch series for SGLang {version} in {patches} (there is: {known}); install a release that has one"
            )
        names = (folder / "series").read_text().splitlines()
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise PatchsetError(
                f"{folder / 'series'} names {missing[0]!r}, which is not there; restore it or export again"
            )
        return cls(version, tuple(Patch.parse(name, (folder / name).read_bytes()) for name in names))

    @property
    def hash(self) -> str:
        """Names, order and bytes in one sha256, the same as `sha256sum $(cat series) | sha256sum` prints."""
        return hashlib.sha256("".join(f"{p.sha256}  {p.name}\n" for p in self.patches).encode()).hexdigest()

    def __str__(self) -> str:
        count = f"{len(self.patches)} patch{'' if len(self.patches) == 1 else 'es'}"
        holds = upstream()["releases"].get(self.version, {}).get("holds")
        return f"series {self.hash}, {count} for SGLang {self.version}" + (f" ({holds})" if holds else "")

    def paths(self) -> tuple[str, ...]:
        """Every file the series touches, as in the wheel."""
        return tuple(sorted({change.path for patch in self.patches for change in patch.changes}))

    def result(self, read: Callable[[str], bytes | None]) -> dict[str, Outcome]:
        """Apply to the files that `read` gives. Raise PatchsetError naming the patch, the file and both blob ids."""
        files = {path: read(path) for path in self.paths()}
        before, modes = dict(files), dict.fromkeys(files, 0o644)
        for patch in self.patches:
            for change in patch.changes:
                modes[change.path] = change.mode
                try:
                    files[change.path] = change.apply(files[change.path])
                except PatchsetError as error:
                    raise PatchsetError(f"{patch.name} does not fit SGLang {self.version}: {error}") from None
        return {path: Outcome(before[path], files[path], modes[path]) for path in files}


@dataclass(frozen=True)
class Outcome:
    """A file's bytes before and after a series (None: no such file), and the mode a new file gets."""

    before: bytes | None
    after: bytes | None
    mode: int


def series_hash(version: str | None = None) -> str:
    """The hash of the committed series for a release, by default the pinned one; for image labels."""
    return Series.load(version or pinned_version()).hash


def upstream() -> dict[str, Any]:
    """The pins: `sglang`, the release of the image, and `releases`, older ones with a series, by version."""
    return tomllib.loads((HERE / "upstream.toml").read_text())


def pinned_version() -> str:
    """The SGLang release of the image."""
    version: str = upstream()["sglang"]["version"]
    return version
