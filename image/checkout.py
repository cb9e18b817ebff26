"""A series as git commits: the checkout in which it is edited, the export, the checks, the probe of another release."""

from __future__ import annotations

import ast
import contextlib
import datetime
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from server_ext.image.installation import Installation, copy_published, read_file
from server_ext.image.series import HERE, PATCHES, REPOSITORY_PREFIX, Patch, PatchsetError, Series

# Spelled out so that neither a checkout's settings nor a later git's defaults change a byte.
DIFF = (
    *("-c", "diff.suppressBlankEmpty=false", "diff-tree", "--patch", "--no-commit-id", "--full-index", "--no-renames"),
    *("--no-ext-diff", "--unified=3", "--diff-algorithm=myers", "--indent-heuristic"),
)


def git(folder: Path, *arguments: str, stdin: bytes = b"", own_settings: bool = False) -> bytes:
    """Run git in `folder` and return what it prints. The user's settings count only for commits of their own."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | {"LC_ALL": "C.UTF-8"}
    if not own_settings:
        env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        env |= {"GIT_COMMITTER_NAME": "patchset", "GIT_COMMITTER_EMAIL": "patchset@localhost"}
    try:
        done = subprocess.run(["git", "-C", folder, *arguments], input=stdin, capture_output=True, env=env)
    except FileNotFoundError:
        raise PatchsetError("this needs git, which is not installed; apply, unapply and status work without") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines() or ["no message"]
        raise PatchsetError(
            f"git {arguments[0]} in {folder}: {lines[0].removeprefix('error: ').removeprefix('fatal: ')}"
        )
    return done.stdout


def commit_series(folder: Path, series: Series) -> None:
    """Make the unpatched files in `folder` a repository: a commit tagged `v<version>`, then a commit for each patch."""
    git(folder, "init", "--quiet", "--initial-branch=series")
    git(folder, "config", "core.compression", "1")
    (folder / ".git/info/exclude").write_text("__pycache__/\n")
    _commit_release(folder, series.version)
    for patch in series.patches:
        git(folder, "apply", "--index", "--whitespace=nowarn", "-", stdin=patch.data)
        message = ("--cleanup=verbatim", f"--author={patch.author}", "--file=-")
        git(folder, "commit", "--quiet", *message, stdin=patch.message.encode())


def _commit_release(folder: Path, version: str) -> None:
    git(folder, "add", "--all", "--force")
    published = f"SGLang {version} as published"
    git(folder, "commit", "--quiet", "--allow-empty", "--author=SGLang <>", "--message", published)
    git(folder, "tag", f"v{version}")


def edit(folder: Path, installation: Installation, series: Series) -> None:
    """Write a git checkout of the whole package, laid out as SGLang's repository, for `git commit` and `export`."""
    if folder.exists() and any(folder.iterdir()):
        raise PatchsetError(f"{folder} is not empty; name a new folder")
    installation.outcomes(series, installation.state())
    copy_published(installation, folder / REPOSITORY_PREFIX, link=False)
    for metadata in (folder / REPOSITORY_PREFIX).glob("*.dist-info"):
        shutil.rmtree(metadata)
    try:
        commit_series(folder, series)
    except PatchsetError:
        shutil.rmtree(folder)
        raise


def commit(folder: Path, subject: str, today: datetime.date) -> None:
    """Commit what changed in a checkout as a new patch, with a header whose `?` remain to be filled in."""
    fields = {
        "Origin": "vendor",
        "Bug": "?",
        "Forwarded": "no",
        "Applied-Upstream": "no",
        "Last-Update": f"{today}",
        "Test": "?",
    }
    message = f"{subject}\n\n?\n\n" + "".join(f"{name}: {value}\n" for name, value in fields.items())
    git(folder, "add", "--all", own_settings=True)
    git(folder, "commit", "--quiet", "--file=-", stdin=message.encode(), own_settings=True)


def export(folder: Path, patches: Path = PATCHES) -> Series:
    """Write the commits of a checkout since its tag `v<version>` to `patches/<version>`, and return them as a series.

    The same commits always make the same bytes: no commit id, date, version of git or setting of the user is in them.
    """
    if git(folder, "status", "--porcelain", own_settings=True):
        raise PatchsetError(f"{folder} has changes that are not committed; commit them first")
    tag = git(folder, "describe", "--tags", "--abbrev=0", "--match=v[0-9]*").decode().strip()
    files: dict[str, bytes] = {}
    for commit_id in git(folder, "rev-list", "--reverse", f"{tag}..HEAD").decode().split():
        shown = git(folder, "log", "-1", "--format=%P%n%f%n%an <%ae>%n%B", commit_id).decode()
        parents, slug, author, message = shown.split("\n", 3)
        subject, _, body = message.strip().partition("\n")
        name = f"{slug[:60].strip('-').lower()}.patch"
        if len(parents.split()) != 1 or name in files or "\n---\n" in body or not body.strip():
            raise PatchsetError(
                f"commit {commit_id[:12]} {subject!r} cannot be a patch: it takes one parent, a subject of its own, "
                f"then the reason and the fields, with no line ---; put it right with git rebase -i {tag}"
            )
        diff = git(folder, *DIFF, commit_id)
        files[name] = f"From: {author}\nSubject: {subject}\n\n{body.strip()}\n---\n".encode() + diff
        Patch.parse(name, files[name])
    target = patches / tag.removeprefix("v")
    target.mkdir(parents=True, exist_ok=True)
    for name, data in {**files, "series": "".join(f"{name}\n" for name in files).encode()}.items():
        if read_file(target / name) != data:
            (target / name).write_bytes(data)
    for stale in {path.name for path in target.glob("*.patch")} - set(files):
        (target / stale).unlink()
    return Series.load(target.name, patches)


def header_faults(patch: Patch, checkout: Path) -> Iterator[str]:
    """Yield what a patch's header lacks; `Test` names must exist if `checkout` has a tests folder."""
    forms = {
        "Origin": r"vendor|upstream|backport|other|(\w+, )?https://\S+",
        "Bug": r"none|https://\S+",
        "Forwarded": r"no|not-needed|https://\S+",
        "Applied-Upstream": r"no|\d\S+|https://\S+",
        "Last-Update": r"20\d\d-[01]\d-[0-3]\d",
        "Test": r"(\S+\.py(::\w+)+ ?)+",
    }
    prose = patch.message.partition("\n")[2].strip().rpartition("\n\n")[0].strip()
    if prose in ("", "?"):
        yield f"{patch.name}: no reason between the subject and the fields"
    for name, form in forms.items():
        value = patch.fields.get(name, patch.fields.get("PR") if name == "Bug" else None)
        if value is None:
            yield f"{patch.name}: no field {name}"
        elif not re.fullmatch(form, value):
            yield f"{patch.name}: {name} is {value!r}, expected {form}"
        elif name == "Test" and (checkout / "tests").is_dir():
            for test in value.split():
                if not _has_test(checkout, test):
                    yield f"{patch.name}: there is no test {test}"


def _has_test(checkout: Path, test: str) -> bool:
    """Whether `path.py::Class::function` names a definition."""
    file, *names = test.split("::")
    body: list[ast.stmt] = ast.parse(read_file(checkout / file) or b"").body
    for name in names:
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = next((node for node in body if isinstance(node, kinds) and node.name == name), None)
        if not found:
            return False
        body = found.body
    return True


def check(installation: Installation, series: Series, patches: Path = PATCHES) -> list[str]:
    """Return the faults of a series: headers, and a round trip through git that must give the committed files again."""
    state = installation.state()
    installation.verify(state)
    outcomes = installation.outcomes(series, state)
    faults = [fault for patch in series.patches for fault in header_faults(patch, HERE.parent)]
    with tempfile.TemporaryDirectory() as scratch:
        folder, exported = Path(scratch, "checkout"), Path(scratch, "patches")
        folder.mkdir()
        _write_files(folder, {path: (outcome.before, outcome.mode) for path, outcome in outcomes.items()})
        commit_series(folder, series)
        export(folder, exported)
        for path, outcome in outcomes.items():
            if read_file(folder / REPOSITORY_PREFIX / path) != outcome.after:
                faults.append(f"{path}: git makes other bytes of the series than apply does")
        ours, theirs = patches / series.version, exported / series.version
        for name in sorted({path.name for where in (ours, theirs) for path in where.iterdir()}):
            if read_file(ours / name) != read_file(theirs / name):
                faults.append(f"{ours / name} is not what export writes; run edit and export")
    return faults


def _write_files(folder: Path, files: dict[str, tuple[bytes | None, int]]) -> None:
    for path, (content, mode) in files.items():
        if content is not None:
            file = folder / REPOSITORY_PREFIX / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
            file.chmod(mode)


def _published(installation: Installation, series: Series) -> dict[str, tuple[bytes | None, int]]:
    """The unpatched content, and a mode, of every file that the series touches."""
    state = installation.state()
    return {path: (read_file(installation.original(path, state)), 0o644) for path in series.paths()}


def probe(series: Series, installation: Installation, release: Installation) -> dict[str, str]:
    """Say of each patch what another release makes of it: contained (drop it), still applies, or where it conflicts.

    From the last patch back, what can be taken out of the release is contained. Git then moves the others in order,
    with the files of both releases at hand, as it would in a checkout.
    """
    verdicts: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _write_files(folder, _published(installation, series))
        commit_series(folder, series)
        git(folder, "checkout", "--quiet", "--detach", f"v{series.version}")
        shutil.rmtree(folder / REPOSITORY_PREFIX, ignore_errors=True)
        _write_files(folder, _published(release, series))
        _commit_release(folder, f"{release.version}-probed")
        for patch in reversed(series.patches):
            with contextlib.suppress(PatchsetError):
                git(folder, "apply", "--reverse", "--index", "-", stdin=patch.data)
                verdicts[patch.name] = "contained, drop it"
        git(folder, "reset", "--quiet", "--hard")
        commits = git(folder, "rev-list", "--reverse", f"v{series.version}..series").decode().split()
        for patch, commit_id in zip(series.patches, commits, strict=True):
            if patch.name not in verdicts:
                try:
                    git(folder, "cherry-pick", commit_id)
                    verdicts[patch.name] = "still applies"
                except PatchsetError:
                    where = git(folder, "diff", "--name-only", "--diff-filter=U").decode().split()
                    verdicts[patch.name] = f"conflicts in {', '.join(where)}" if where else "contained, drop it"
                    git(folder, "cherry-pick", "--quit")
                    git(folder, "reset", "--quiet", "--hard")
    return {patch.name: verdicts[patch.name] for patch in series.patches}
