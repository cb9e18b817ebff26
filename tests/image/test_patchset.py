"""The patch series tool, on real files of the installed SGLang and with real git."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_ext.image import checkout, patchset
from server_ext.image.installation import Installation, applied, apply, pristine_copy, unapply
from server_ext.image.series import PATCHES, PatchsetError, Series, parse_diff, pinned_version, series_hash

import unpacked_wheels
from server_ext import cli

VERSION = pinned_version()
METADATA = f"sglang-{VERSION}.dist-info"
FILES = ("__init__.py", "_version.py", "version.py", "launch_server.py", "profiler.py", "utils.py", "srt/environ.py")
TOUCHED = ("launch_server.py", "profiler.py", "srt/environ.py", "srt/added/__init__.py")
HEADER = f"""
The engine tests of this file need a change that git and the tool both know.

Origin: vendor
Bug: https://example.org/issues/1
Forwarded: not-needed
Applied-Upstream: no
Last-Update: 2026-11-29
Test: tests/image/{Path(__file__).name}::test_apply_makes_what_git_makes
"""


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The whole package as published, a true copy: no fault of the tool may reach the environment's files."""
    root = pristine_copy(tmp_path_factory.mktemp("published"), link=False)
    before = digests(root)
    yield root
    assert digests(root) == before


@pytest.fixture
def site(published: Path, tmp_path: Path) -> Path:
    """A few real files with their wheel's metadata, hard links as uv makes them; few, to be quick."""
    root = tmp_path / "site"
    for name in FILES:
        (root / "sglang" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "sglang" / name).hardlink_to(published / "sglang" / name)
    (root / METADATA).mkdir()
    shutil.copy(published / METADATA / "METADATA", root / METADATA)
    rows = (published / METADATA / "RECORD").read_text().splitlines(keepends=True)
    (root / METADATA / "RECORD").write_text("".join(row for row in rows if row.split(",")[0][7:] in FILES))
    return root


@pytest.fixture(scope="session")
def worktree(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout as `edit` makes it, of the few files, with two commits on top."""
    folder = tmp_path_factory.mktemp("worktree")
    for name in FILES:
        (folder / "python/sglang" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(published / "sglang" / name, folder / "python/sglang" / name)
    checkout.commit_series(folder, Series(VERSION, ()))
    package = folder / "python/sglang"
    edit(package / "launch_server.py", "\ndef run_server(", "\n# first\ndef run_server(")
    (package / "srt/added").mkdir()
    (package / "srt/added/__init__.py").write_text("NO_NEWLINE = 1")
    commit(folder, "Add a module")
    edit(package / "launch_server.py", 'if __name__ == "__main__":', 'if __name__ == "__main__":  # second')
    edit(package / "srt/environ.py", "import warnings\n", "import warnings  # second\n")
    (package / "profiler.py").unlink()
    commit(folder, "Mark the entry point, drop the profiler")
    return folder


@pytest.fixture
def patches(worktree: Path, tmp_path: Path) -> Path:
    """A patches folder with the two commits exported."""
    checkout.export(worktree, tmp_path / "patches")
    return tmp_path / "patches"


@pytest.fixture
def series(patches: Path) -> Series:
    return Series.load(VERSION, patches)


@pytest.fixture
def older(series: Series) -> Series:
    return Series(VERSION, series.patches[:1])


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    replace(file, text.replace(old, new, 1).encode())


def replace(file: Path, content: bytes) -> None:
    """Give a file new content without writing into the hard link that it may be."""
    file.unlink(missing_ok=True)
    file.write_bytes(content)


def commit(folder: Path, subject: str, body: str = HEADER) -> None:
    checkout.git(folder, "add", "--all")
    author = "--author=A Maintainer <maintainer@example.org>"
    checkout.git(folder, "commit", "--quiet", author, "--file=-", stdin=f"{subject}\n{body}".encode())


def snapshot(root: Path) -> dict[str, tuple[bytes, int, int, int]]:
    """Every file below `root`: content, mode, time, inode; and every folder."""
    found = {}
    for path in sorted(root.rglob("*")):
        about = path.stat()
        key = str(path.relative_to(root))
        found[key] = (b"", 0, 0, 0)
        if path.is_file():
            found[key] = (path.read_bytes(), about.st_mode, about.st_mtime_ns, about.st_ino)
    return found


def digests(root: Path) -> dict[str, tuple[bytes, int, int, int]]:
    """A snapshot of a tree that is too large to hold, with sha256 for content."""
    found = {}
    for path in sorted(root.rglob("*")):
        about = path.stat()
        content = path.read_bytes() if path.is_file() else b""
        mtime = about.st_mtime_ns if path.is_file() else 0
        found[str(path.relative_to(root))] = (hashlib.sha256(content).digest(), about.st_mode, mtime, about.st_ino)
    return found


def contents(root: Path) -> dict[str, bytes | None]:
    """The bytes of the files that the series touches."""
    return {name: checkout.read_file(root / "sglang" / name) for name in TOUCHED}


def tool(*arguments: object) -> int:
    """Run the command line in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["sglang-dflash", "patches", *map(str, arguments)])
        return cli.main()


# --- Apply and undo --------------------------------------------------------------------------------------------------


def test_apply_makes_what_git_makes(site: Path, series: Series, worktree: Path) -> None:
    assert apply(Installation.find(site), series)
    assert contents(site) == contents(worktree / "python")
    assert contents(site)["profiler.py"] is None
    assert applied(site).series_hash == series.hash


def test_apply_twice_touches_nothing(
    site: Path, patches: Path, series: Series, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--patches", patches, "--target", site)
    assert tool("status", *arguments) == 1
    assert capsys.readouterr().out.startswith(f"not applied: series {series.hash}, 2 patches for SGLang {VERSION}")
    assert tool("apply", *arguments) == 0
    assert capsys.readouterr().out.startswith("applied: ")
    before = snapshot(site)
    assert tool("apply", *arguments) == 0
    assert capsys.readouterr().out.startswith("already applied: ")
    assert snapshot(site) == before
    assert tool("status", *arguments) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"applied: {series} in {site}",
        "  add-a-module.patch: applied",
        "  mark-the-entry-point-drop-the-profiler.patch: applied",
    ]


def test_unapply_restores_every_bit(site: Path, series: Series, patches: Path) -> None:
    launcher = site / "sglang/launch_server.py"
    replace(launcher, launcher.read_bytes())
    launcher.chmod(0o751)
    before = snapshot(site)
    apply(Installation.find(site), series)
    assert launcher.stat().st_mode & 0o777 == 0o751
    assert (site / "sglang/srt/added/__init__.py").stat().st_mode & 0o777 == 0o644
    assert tool("unapply", "--target", site) == 0
    assert snapshot(site) == before
    assert tool("unapply", "--target", site) == 0
    assert snapshot(site) == before


def test_files_in_the_package_cache_stay_as_they_are(site: Path, series: Series, published: Path) -> None:
    before = {name: (published / "sglang" / name).read_bytes() for name in FILES}
    apply(Installation.find(site), series)
    edit(site / "sglang/srt/added/__init__.py", "1", "2")  # a user's edit of a patched file hits no cache either
    assert {name: (published / "sglang" / name).read_bytes() for name in FILES} == before
    assert not (site / "sglang/launch_server.py").samefile(published / "sglang/launch_server.py")


def test_a_file_system_without_hard_links(site: Path, series: Series, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no links here")

    before = {path: row[:3] for path, row in snapshot(site).items()}
    monkeypatch.setattr(os, "link", refuse)
    apply(Installation.find(site), series)
    unapply(Installation.find(site))
    assert {path: row[:3] for path, row in snapshot(site).items()} == before


def test_another_series_takes_the_place_of_the_applied_one(
    site: Path, series: Series, older: Series, patches: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(site)
    apply(Installation.find(site), older)
    assert tool("status", "--patches", patches, "--target", site) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"another series is applied: {series} in {site}",
        "  add-a-module.patch: applied",
        "  mark-the-entry-point-drop-the-profiler.patch: not applied",
    ]
    apply(Installation.find(site), series)
    assert applied(site).series_hash == series.hash
    apply(Installation.find(site), older)
    assert contents(site)["profiler.py"] is not None
    unapply(Installation.find(site))
    assert snapshot(site) == before


def test_a_reinstalled_release_is_as_published(site: Path, series: Series, published: Path) -> None:
    apply(Installation.find(site), series)
    for name in FILES:
        (site / "sglang" / name).unlink(missing_ok=True)
        (site / "sglang" / name).hardlink_to(published / "sglang" / name)
    shutil.rmtree(site / "sglang/srt/added")
    assert applied(site) is None
    assert apply(Installation.find(site), series)
    assert applied(site).series_hash == series.hash


def test_python_never_runs_old_bytecode(site: Path, tmp_path: Path) -> None:
    """Python tells bytecode by its source's size and whole seconds; here both stay, as an image builder may have it."""
    folder, module = tmp_path / "same-size", site / "sglang/version.py"
    (site / METADATA / "RECORD").write_text("")
    replace(module, b"VALUE = 1\n")
    shutil.copytree(site / "sglang", folder / "python/sglang")
    checkout.commit_series(folder, Series(VERSION, ()))
    replace(folder / "python/sglang/version.py", b"VALUE = 2\n")
    commit(folder, "Another value")
    series = checkout.export(folder, tmp_path / "patches")
    ahead = 2_000_000_000
    os.utime(module, (ahead, ahead))

    def value() -> str:
        command = [sys.executable, "-c", "import version; print(version.VALUE)"]
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        run = subprocess.run(command, cwd=module.parent, env=env, capture_output=True, text=True, check=True)
        assert list((module.parent / "__pycache__").glob("version.*"))
        return run.stdout.strip()

    assert value() == "1"
    for _ in range(2):
        apply(Installation.find(site), series)
        assert module.stat().st_mtime == ahead + 1  # bytecode may lie outside __pycache__: PYTHONPYCACHEPREFIX
        os.utime(module, (ahead, ahead))
        assert value() == "2"
        unapply(Installation.find(site))
        assert value() == "1"


# --- Killed, failed, two at once -------------------------------------------------------------------------------------

CHANGES = {"os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir", "os.chmod", "os.chown", "os.utime"}


def killed(at: int, action: Callable[[], object]) -> bool:
    """Run `action` in a child that gets SIGKILL before change number `at` to the file system; say whether it did."""
    child = os.fork()
    if child == 0:
        seen = 0

        def hook(event: str, arguments: tuple) -> None:
            nonlocal seen
            opened_to_write = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            if event in CHANGES or opened_to_write:
                seen += 1
                if seen == at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            action()
        except BaseException:
            os._exit(2)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("act", ["apply", "replace", "unapply"])
def test_a_kill_at_any_moment_is_mended_by_the_next_run(
    act: str, site: Path, series: Series, older: Series, tmp_path: Path
) -> None:
    as_published = {path: row[:3] for path, row in snapshot(site).items()}
    outcomes = Installation.find(site).outcomes(series, None)
    start = tmp_path / "start"
    shutil.copytree(site, start)
    if act != "apply":
        apply(Installation.find(start), older if act == "replace" else series)
    known = [contents(site), contents(start)]
    act_on = unapply if act == "unapply" else lambda installation: apply(installation, series)
    at = moments = 0
    was_killed = True
    while was_killed:
        at += 1
        for mend in (apply, unapply):
            copy = tmp_path / f"copy-{at}-{mend.__name__}"
            shutil.copytree(start, copy)
            was_killed = killed(at, lambda copy=copy: act_on(Installation.find(copy)))
            moments += was_killed
            for name, content in contents(copy).items():
                assert content in (*(state[name] for state in known), outcomes[f"sglang/{name}"].after), (at, name)
            if mend is apply:
                apply(Installation.find(copy), series)
                assert applied(copy).series_hash == series.hash
                assert {f"sglang/{k}": v for k, v in contents(copy).items()} == {
                    k: o.after for k, o in outcomes.items()
                }
                unapply(Installation.find(copy))
            else:
                unapply(Installation.find(copy))
                shutil.rmtree(copy / "sglang/.patchset", ignore_errors=True)  # a kill before the record leaves litter
            assert {path: row[:3] for path, row in snapshot(copy).items()} == as_published, at
            shutil.rmtree(copy)
    assert moments > 20


def test_a_half_patched_installation_is_told(site: Path, series: Series, capsys: pytest.CaptureFixture[str]) -> None:
    apply(Installation.find(site), series)
    original = site / "sglang/.patchset/original/sglang/launch_server.py"
    original.replace(site / "sglang/launch_server.py")
    assert Installation.find(site).condition(Installation.find(site).state()) == "interrupted"
    with pytest.raises(PatchsetError, match=r"left half done by a run .* run: sglang-dflash patches apply"):
        applied(site)
    apply(Installation.find(site), series)
    assert applied(site).series_hash == series.hash


def test_a_failure_at_any_rename_leaves_the_old_files(
    site: Path, series: Series, older: Series, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(site)
    rename = Path.replace
    for failing in range(1, 5):
        calls = 0

        def full(self: Path, target: Path, failing: int = failing) -> Path:
            nonlocal calls
            calls += 1
            if calls == failing:
                raise OSError(28, "No space left on device", str(target))
            return rename(self, target)

        monkeypatch.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            apply(Installation.find(site), series)
        monkeypatch.setattr(Path, "replace", rename)
        assert snapshot(site) == before, failing


def test_several_runs_at_once_apply_once(site: Path, patches: Path, series: Series) -> None:
    command = [sys.executable, patchset.__file__, "apply", "--patches", patches, "--target", site]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = sorted(run.communicate()[0].split(":")[0] for run in runs)
    assert said == ["already applied"] * 3 + ["applied"]
    assert applied(site).series_hash == series.hash


# --- Where SGLang is -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["python", "lib/python3.11/site-packages"])
def test_checkouts_and_environments(place: str, site: Path, series: Series, tmp_path: Path) -> None:
    """A checkout has no RECORD: the patches' own blob ids say which bytes they fit."""
    root = tmp_path / "tree" / place
    shutil.copytree(site / "sglang", root / "sglang")
    before = snapshot(root)
    installation = Installation.find(tmp_path / "tree")
    assert (installation.root, installation.version, installation.record) == (root, VERSION, {})
    apply(installation, series)
    assert applied(tmp_path / "tree").series_hash == series.hash
    unapply(installation)
    assert snapshot(root) == before


@pytest.mark.parametrize("layout", ["wheel", "editable"])
def test_an_imported_sglang_is_found_without_importing_it(
    layout: str, site: Path, patches: Path, series: Series, tmp_path: Path
) -> None:
    """An editable install has its metadata in another place than its code, which may not say its version."""
    path = [site]
    if layout == "editable":
        (site / METADATA / "RECORD").unlink()
        (site / "sglang/_version.py").unlink()
        shutil.move(site / METADATA, tmp_path / "metadata" / METADATA)
        path.append(tmp_path / "metadata")
    code = (
        "import sys, runpy; sys.argv = sys.argv[1:]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as stop: print(stop.code, 'sglang' in sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    folder = tmp_path / "checkout"
    for arguments, says in (
        (["apply"], f"applied: {series} in {site}"),
        (["edit", folder], f"{folder}: tag v{VERSION}, then a commit for each of {series}"),
    ):
        command = [sys.executable, "-c", code, patchset.__file__, *arguments, "--patches", patches]
        out = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
        assert out.splitlines() == [says, "0 False"]


def test_apply_status_and_unapply_need_no_git(
    site: Path, patches: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    arguments = ("--patches", patches, "--target", site)
    assert [tool(command, *arguments) for command in ("apply", "status", "unapply")] == [0, 0, 0]
    capsys.readouterr()
    assert tool("check", *arguments) == 2
    assert capsys.readouterr().err == (
        "sglang-dflash patches: error: this needs git, which is not installed; apply, unapply and status work without\n"
    )


# --- Refusals --------------------------------------------------------------------------------------------------------


def spoil_record(site: Path, patches: Path) -> None:
    edit(site / "sglang/utils.py", "import", "import  ")


def spoil_touched(site: Path, patches: Path) -> None:
    (site / METADATA / "RECORD").unlink()
    edit(site / "sglang/launch_server.py", "import", "import  ")


def lose_file(site: Path, patches: Path) -> None:
    (site / "sglang/utils.py").unlink()


def edit_after_apply(site: Path, patches: Path) -> None:
    apply(Installation.find(site), Series(VERSION, Series.load(VERSION, patches).patches[:1]))
    edit(site / "sglang/launch_server.py", "import", "import  ")


def other_version(site: Path, patches: Path) -> None:
    edit(site / METADATA / "METADATA", f"Version: {VERSION}", "Version: 0.5.22")
    (site / METADATA).rename(site / "sglang-0.5.22.dist-info")


def no_version(site: Path, patches: Path) -> None:
    shutil.rmtree(site / METADATA)
    (site / "sglang/_version.py").unlink()


def no_package(site: Path, patches: Path) -> None:
    shutil.rmtree(site / "sglang")


def lose_patch(site: Path, patches: Path) -> None:
    (patches / VERSION / "add-a-module.patch").unlink()


def damage_state(site: Path, patches: Path) -> None:
    (site / "sglang/.patchset").mkdir()
    (site / "sglang/.patchset/state.json").write_text("{")


def in_patch(old: str, new: str) -> Callable[[Path, Path], None]:
    """In every place: the first patch changes one file and adds one."""

    def spoil(site: Path, patches: Path) -> None:
        patch = patches / VERSION / "add-a-module.patch"
        assert old in patch.read_text()
        patch.write_text(patch.read_text().replace(old, new))

    return spoil


DIFF = "diff --git a/python/sglang/launch_server.py b/python/sglang/launch_server.py\n"
REFUSALS = {
    "a file differs from the wheel": (
        spoil_record,
        ["sglang/utils.py", "expected sha256", "found", "reinstall it: pip"],
    ),
    "a touched file differs": (
        spoil_touched,
        ["add-a-module.patch", "launch_server.py: expected git blob", "checkout v"],
    ),
    "a file is missing": (lose_file, ["sglang/utils.py", "found no file; reinstall it"]),
    "edited since": (edit_after_apply, ["launch_server.py changed after the series was applied", "keep your change"]),
    "wrong version": (
        other_version,
        ["no patch series for SGLang 0.5.22", f"there is: {VERSION}", "install a release"],
    ),
    "no version": (no_version, ["does not say its version; install it first"]),
    "no package": (no_package, ["no SGLang in", "--target takes an environment"]),
    "a patch is missing": (lose_patch, ["series names 'add-a-module.patch', which is not there; restore it"]),
    "damaged record": (damage_state, ["state.json", "remove", "reinstall it"]),
    "no fuzz in context": (
        in_patch(" def run_server(", " def run_servers("),
        ["the hunk at line", "does not match"],
    ),
    "no offset": (in_patch("@@ -", "@@ -1"), ["add-a-module.patch does not fit SGLang", "does not match"]),
    "a changed line": (in_patch("# first", "# other"), ["the diff makes git blob", "and says"]),
    "short blob ids": (in_patch("\nindex 000000000", "\nindex "), ["text changes with full blob ids"]),
    "change of mode": (in_patch(DIFF, f"{DIFF}old mode 100644\nnew mode 100755\n"), ["no changes of mode"]),
    "symbolic link": (in_patch("new file mode 100644", "new file mode 120000"), ["no changes of mode"]),
    "rename": (in_patch(DIFF, DIFF.replace(" b/", " b/x")), ["renames none"]),
    "outside the package": (in_patch(DIFF, DIFF.replace("python/sglang", "python/sglan/")), ["below python/sglang/"]),
    "climbs out": (in_patch(DIFF, DIFF.replace("/launch", "/../../launch")), ["below python/sglang/"]),
    "cut short": (in_patch("\n+NO_NEWLINE = 1\n\\ No newline at end of file\n", "\n"), ["ends early"]),
    "junk for a hunk": (in_patch("\n@@ -", "\n@ -"), ["not a hunk"]),
    "no header": (in_patch("From: ", "By: "), ["a patch starts with From, Subject"]),
    "no diff": (in_patch("diff --git", "diff"), ["the patch holds no diff"]),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_apply_refuses_in_one_line_and_touches_nothing(
    case: str, site: Path, patches: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, words = REFUSALS[case]
    spoil(site, patches)
    before = snapshot(site)
    assert tool("apply", "--patches", patches, "--target", site) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("sglang-dflash patches: error: ") and err.count("\n") == 1
    for word in words:
        assert word in err
    assert snapshot(site) == before


def test_unapply_keeps_what_a_user_edited(site: Path, patches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_after_apply(site, patches)
    before = snapshot(site)
    assert tool("unapply", "--target", site) == 2
    assert "launch_server.py changed after the series was applied: expected sha256" in capsys.readouterr().err
    assert snapshot(site) == before
    with pytest.raises(PatchsetError, match="were edited since"):
        applied(site)


def test_a_wheel_must_be_the_pinned_one(tmp_path: Path, site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = tmp_path / f"sglang-{VERSION}-cp311-cp311-manylinux_2_34_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in site.rglob("*"):
            archive.write(path, path.relative_to(site))
    assert tool("status", "--target", wheel) == 2
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert "is not the pinned wheel: expected sha256 00b3cd5b" in (err := capsys.readouterr().err)
    assert f"found {found}; download it again" in err


# --- Editing, export, check ------------------------------------------------------------------------------------------


def test_edit_and_export_give_the_same_bytes(
    site: Path, patches: Path, series: Series, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the user's git is set up to print diffs of another shape."""
    (tmp_path / ".gitconfig").write_text("[core]\nautocrlf = true\n[commit]\ngpgSign = true\n[gpg]\nprogram = false\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "checkout"
    assert tool("edit", folder, "--target", site, "--patches", patches) == 0
    for name in ("noprefix", "suppressBlankEmpty", "mnemonicPrefix"):
        checkout.git(folder, "config", f"diff.{name}", "true")
    checkout.git(folder, "config", "diff.context", "9")
    checkout.git(folder, "config", "diff.algorithm", "patience")
    assert tool("export", folder, "--patches", tmp_path / "again") == 0
    written = {path.name: path.read_bytes() for path in (tmp_path / "again" / VERSION).iterdir()}
    assert written == {path.name: path.read_bytes() for path in (patches / VERSION).iterdir()}
    assert written["series"].decode().split() == [patch.name for patch in series.patches]
    assert not (folder / "python/sglang/launch_server.py").samefile(site / "sglang/launch_server.py")


def test_edit_begins_the_series_of_a_release_that_has_none(site: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkout"
    assert tool("edit", folder, "--target", site, "--patches", tmp_path / "none") == 0
    assert checkout.git(folder, "describe", "--tags").decode() == f"v{VERSION}\n"
    assert tool("export", folder, "--patches", tmp_path / "none") == 0
    assert (tmp_path / "none" / VERSION / "series").read_text() == ""


def test_export_drops_the_file_of_a_dropped_commit(site: Path, patches: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkout"
    tool("edit", folder, "--target", site, "--patches", patches)
    checkout.git(folder, "reset", "--hard", "--quiet", "HEAD~1")
    assert tool("export", folder, "--patches", patches) == 0
    assert sorted(path.name for path in (patches / VERSION).iterdir()) == ["add-a-module.patch", "series"]


def test_new_commits_a_header_that_check_wants_filled_in(
    site: Path, patches: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "Someone")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "someone@example.org")
    folder = tmp_path / "checkout"
    tool("edit", folder, "--target", site, "--patches", patches)
    edit(folder / "python/sglang/utils.py", "import", "import  ")
    assert tool("export", folder, "--patches", patches) == 2
    assert "has changes that are not committed; commit them first" in capsys.readouterr().err
    assert tool("new", folder, "A third change") == 0
    assert tool("export", folder, "--patches", patches) == 0
    assert tool("check", "--patches", patches, "--target", site) == 1
    assert capsys.readouterr().err.splitlines() == [
        "a-third-change.patch: no reason between the subject and the fields",
        "a-third-change.patch: Bug is '?', expected none|https://\\S+",
        "a-third-change.patch: Test is '?', expected (\\S+\\.py(::\\w+)+ ?)+",
    ]


@pytest.mark.parametrize("body", ["", f"\nx\n---\ny\n{HEADER}"])
def test_export_refuses_a_commit_that_is_no_patch(body: str, site: Path, patches: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkout"
    tool("edit", folder, "--target", site, "--patches", patches)
    before = snapshot(patches)
    edit(folder / "python/sglang/utils.py", "import", "import  ")
    commit(folder, "Third", body)
    with pytest.raises(PatchsetError, match=r"'Third' cannot be a patch: it takes one parent, .* git rebase -i v"):
        checkout.export(folder, patches)
    assert snapshot(patches) == before


def test_a_fault_of_the_system_is_one_line(site: Path, patches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool("edit", "/proc/nowhere/checkout", "--target", site, "--patches", patches) == 2
    err = capsys.readouterr().err
    assert err.startswith("sglang-dflash patches: error: [Errno 2] No such file") and err.count("\n") == 1


def test_edit_refuses_a_folder_in_use(site: Path, patches: Path, tmp_path: Path) -> None:
    with pytest.raises(PatchsetError, match="is not empty; name a new folder"):
        checkout.edit(site, Installation.find(site), Series.load(VERSION, patches))


def test_upstream_can_take_a_patch_with_git_am(site: Path, patches: Path, series: Series, tmp_path: Path) -> None:
    folder = tmp_path / "upstream"
    shutil.copytree(site / "sglang", folder / "python/sglang")
    checkout.commit_series(folder, Series(VERSION, ()))
    for patch in series.patches:
        checkout.git(folder, "am", "--quiet", str(patches / VERSION / patch.name))
    apply(Installation.find(site), series)
    assert contents(folder / "python") == contents(site)
    assert checkout.git(folder, "log", "-1", "--format=%B").decode().strip() == series.patches[-1].message.strip()


def test_check_passes_on_a_patched_installation_too(
    site: Path, patches: Path, series: Series, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert tool("check", "--patches", patches, "--target", site) == 0
        assert capsys.readouterr().out == f"{series}: complete, fits, round-trips\n"
        apply(Installation.find(site), series)


HEADERS = {
    "Origin: vendor": ("", "no field Origin"),
    "Bug: https://example.org/issues/1": ("Bug: see mail", "Bug is 'see mail'"),
    "Forwarded: not-needed": ("Forwarded: soon", "Forwarded is 'soon'"),
    "Applied-Upstream: no": ("", "no field Applied-Upstream"),
    "Last-Update: 2026-11-29": ("Last-Update: today", "Last-Update is 'today'"),
    "::test_apply_makes_what_git_makes": ("::test_gone", "there is no test tests/image/test_patchset.py::test_gone"),
    "Test: tests/image/test_patchset.py": ("Test: tests/gone.py", "there is no test tests/gone.py::test_apply_makes"),
}


@pytest.mark.parametrize("old", HEADERS)
def test_check_wants_whole_headers(old: str, site: Path, patches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new, complaint = HEADERS[old]
    edit(patches / VERSION / "add-a-module.patch", f"{old}\n" if not new else old, new)
    assert tool("check", "--patches", patches, "--target", site) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"add-a-module.patch: {complaint}")


def test_check_wants_what_export_writes(site: Path, patches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(patches / VERSION / "add-a-module.patch", "\n---\n", "\n\n---\n")
    (patches / VERSION / "left-behind.patch").write_text("")
    assert tool("check", "--patches", patches, "--target", site) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"{patches / VERSION / name} is not what export writes; run edit and export"
        for name in ("add-a-module.patch", "left-behind.patch")
    ]


# --- Another release -------------------------------------------------------------------------------------------------


def shifted(site: Path, target: Path, version: str = "0.5.24") -> Path:
    """A later release: the same files, ten lines further down."""
    shutil.copytree(site / "sglang", target / "sglang")
    for name in ("launch_server.py", "srt/environ.py"):
        file = target / "sglang" / name
        if file.exists():
            replace(file, b"# later\n" * 10 + file.read_bytes())
    edit(target / "sglang/_version.py", f"'{VERSION}'", f"'{version}'")
    return target


def test_status_against_a_later_release(
    site: Path, patches: Path, series: Series, older: Series, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (patch.name for patch in series.patches)

    def verdicts(release: Path) -> dict[str, str]:
        capsys.readouterr()
        assert tool("status", "--patches", patches, "--target", site, "--against", release) == 0
        lines = capsys.readouterr().out.partition("against SGLang 0.5.24:\n")[2].splitlines()
        return dict(line.strip().split(": ", 1) for line in lines)

    none = shifted(site, tmp_path / "none")
    assert verdicts(none) == {first: "still applies", second: "still applies"}
    apply(Installation.find(site), older)
    one = shifted(site, tmp_path / "one")
    assert verdicts(one) == {first: "contained, drop it", second: "still applies"}
    apply(Installation.find(site), series)
    both = shifted(site, tmp_path / "both")
    assert verdicts(both) == {first: "contained, drop it", second: "contained, drop it"}
    edit(none / "sglang/srt/environ.py", "import warnings\n", "import warnings as other\n")
    assert verdicts(none)[first] == "still applies"
    assert verdicts(none)[second] == "conflicts in python/sglang/srt/environ.py"
    wheel = tmp_path / "sglang-0.5.24-cp311-cp311-manylinux_2_34_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in one.rglob("*"):
            archive.write(path, path.relative_to(one))
    assert verdicts(wheel) == {first: "contained, drop it", second: "still applies"}


def test_the_way_to_a_later_release(site: Path, patches: Path, older: Series, tmp_path: Path) -> None:
    """The commands of image/README.md: what the release contains drops out, the rest moves along."""
    folder = tmp_path / "checkout"
    tool("edit", folder, "--target", site, "--patches", patches)
    apply(Installation.find(site), older)
    later = shifted(site, tmp_path / "later")
    shutil.rmtree(later / "sglang/.patchset")
    checkout.git(folder, "checkout", "--quiet", "--detach", f"v{VERSION}")
    shutil.rmtree(folder / "python/sglang")
    shutil.copytree(later / "sglang", folder / "python/sglang")
    checkout.git(folder, "add", "--all", "--force")
    checkout.git(folder, "commit", "--quiet", "--author=SGLang <>", "--message=SGLang 0.5.24")
    checkout.git(folder, "tag", "v0.5.24")
    checkout.git(folder, "rebase", "--quiet", "--onto", "v0.5.24", f"v{VERSION}", "series")
    assert tool("export", folder, "--patches", patches) == 0
    moved = Series.load("0.5.24", patches)
    assert [patch.name for patch in moved.patches] == ["mark-the-entry-point-drop-the-profiler.patch"]
    apply(Installation.find(later), moved)
    assert b"# first" in contents(later)["launch_server.py"] and b"# second" in contents(later)["launch_server.py"]


# --- The format ------------------------------------------------------------------------------------------------------

line = st.sampled_from(
    [b"a", b"b", b"", b" c", b"-- d", b"++ e", b"@@ -1 +1 @@", b"diff --git a/x b/x", b"\\ No", b"f\r", b"\xff"]
)
text = st.one_of(
    st.none(),
    st.builds(lambda lines, end: b"\n".join(lines) + end, st.lists(line, max_size=30), st.sampled_from([b"", b"\n"])),
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs=st.lists(st.tuples(text, text), min_size=1, max_size=60))
def test_every_diff_of_git_is_read_right(pairs: list[tuple[bytes | None, bytes | None]], tmp_path: Path) -> None:
    folder = tmp_path / "diffs"
    package = folder / "python/sglang"
    package.mkdir(parents=True)
    checkout.git(folder, "init", "--quiet")
    for side in (0, 1):
        for number, pair in enumerate(pairs):
            replace(package / f"{number}.py", pair[side] or b"")
            if pair[side] is None:
                (package / f"{number}.py").unlink()
        checkout.git(folder, "add", "--all")
        checkout.git(folder, "commit", "--quiet", "--allow-empty", "--author=a <b>", "--message=c")
    diff = checkout.git(folder, *checkout.DIFF, "--text", "HEAD")
    shutil.rmtree(folder)
    changes = {change.path: change for change in parse_diff(diff)} if diff else {}
    for number, (old, new) in enumerate(pairs):
        change = changes.get(f"sglang/{number}.py")
        assert (change is None) == (old == new)
        if change:
            assert change.apply(old) == new
            with pytest.raises(PatchsetError, match="expected git blob"):
                change.apply((old or b"") + b"more")


def test_the_series_hash_is_what_sha256sum_prints(patches: Path, series: Series) -> None:
    command = "sha256sum $(cat series) | sha256sum"
    out = subprocess.run(command, shell=True, cwd=patches / VERSION, capture_output=True, text=True, check=True).stdout
    assert out.split()[0] == series.hash


# --- The installed SGLang and the committed series -------------------------------------------------------------------


def test_a_pristine_copy_of_a_patched_installation(site: Path, series: Series, tmp_path: Path) -> None:
    before = {path: row for path, row in snapshot(site).items()}
    apply(Installation.find(site), series)
    linked = pristine_copy(tmp_path / "linked", site)
    copied = pristine_copy(tmp_path / "copied", site, link=False)
    for tree, same_files in ((linked, True), (copied, False)):
        found = snapshot(tree)
        assert {path: row[:3] for path, row in found.items()} == {path: row[:3] for path, row in before.items()}
        inodes = {path: row[3] for path, row in found.items() if row[3] and ".dist-info" not in path}
        assert all((before[path][3] == inode) == same_files for path, inode in inodes.items())
    assert applied(linked) is None


def test_the_whole_package_takes_and_gives_back_the_committed_series(published: Path, tmp_path: Path) -> None:
    root = pristine_copy(tmp_path / "whole", published)
    before = digests(root)
    assert tool("apply", "--target", root) == 0
    assert applied(root).series_hash == series_hash()
    assert tool("unapply", "--target", root) == 0
    assert digests(root) == before


@pytest.mark.parametrize("version", sorted(path.parent.name for path in PATCHES.glob("*/series")))
def test_the_committed_series_is_in_order(version: str, capsys: pytest.CaptureFixture[str]) -> None:
    target = () if version == VERSION else ("--target", unpacked_wheels.unpacked(version))
    assert tool("check", *target) == 0, capsys.readouterr().err
