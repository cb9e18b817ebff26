"""The patch series: status, apply, unapply, check, edit, new, export. README.md beside this file says how to use it.

Run as `python image/patchset.py` or `sglang-dflash patches`. `apply`, `unapply` and `status` need Python alone; `edit`,
`new`, `export`, `check` and `status --against` need git.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from server_ext.image.checkout import check, commit, edit, export, probe
from server_ext.image.installation import Installation, applied, apply, file_sha256, pristine_copy, unapply
from server_ext.image.series import PATCHES, PatchsetError, Series, pinned_version, series_hash, upstream

__all__ = [
    "Installation",
    "PatchsetError",
    "Series",
    "applied",
    "apply",
    "pristine_copy",
    "run",
    "series_hash",
    "unapply",
]


@contextlib.contextmanager
def opened(target: Path | None) -> Iterator[Installation]:
    """Find an installation, in a scratch folder if `target` is a wheel; one that is pinned must have its sha256."""
    if target is None or target.suffix != ".whl":
        yield Installation.find(target)
        return
    _check_pin(target)
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(target) as wheel:
        wheel.extractall(scratch)
        yield Installation.find(Path(scratch))


def _check_pin(wheel: Path) -> None:
    _, version, python, _, platform = wheel.stem.split("-")
    pin = upstream()["sglang"] if version == pinned_version() else upstream()["releases"].get(version, {})
    for key, expected in pin.get("wheels", {}).items():
        tag, _, machine = key.partition("-")
        if tag == python and platform.endswith(machine) and (found := file_sha256(wheel)) != expected:
            raise PatchsetError(
                f"{wheel} is not the pinned wheel: expected sha256 {expected}, found {found}; download it again"
            )


def _status(args: argparse.Namespace) -> int:
    with opened(args.target) as installation:
        series, state = Series.load(installation.version, args.patches), installation.state()
        condition = installation.condition(state)
        current = state is not None and state.series_hash == series.hash
        verdict = condition if current or condition != "applied" else "another series is applied"
        print(f"{verdict}: {series} in {args.target or installation.root}")
        applied = state.patches if state and condition == "applied" else {}
        for patch in series.patches:
            recorded = applied.get(patch.name)
            found = "applied" if recorded == patch.sha256 else "applied in another form" if recorded else "not applied"
            print(f"  {patch.name}: {found}")
        for name in applied.keys() - {patch.name for patch in series.patches}:
            print(f"  {name}: applied, no longer in the series")
        if args.against:
            with opened(args.against) as release:
                print(f"against SGLang {release.version}:")
                for name, answer in probe(series, installation, release).items():
                    print(f"  {name}: {answer}")
            return 0
    return 0 if verdict == "applied" else 1


def _apply(args: argparse.Namespace) -> int:
    installation = Installation.find(args.target)
    series = Series.load(installation.version, args.patches)
    done = "applied" if apply(installation, series) else "already applied"
    print(f"{done}: {series} in {installation.root}")
    return 0


def _unapply(args: argparse.Namespace) -> int:
    installation = Installation.find(args.target)
    done = "as published again" if unapply(installation) else "nothing was applied"
    print(f"{done}: SGLang {installation.version} in {installation.root}")
    return 0


def _check(args: argparse.Namespace) -> int:
    with opened(args.target) as installation:
        series = Series.load(installation.version, args.patches)
        faults = check(installation, series, args.patches)
    for fault in faults:
        print(fault, file=sys.stderr)
    if not faults:
        print(f"{series}: complete, fits, round-trips")
    return 1 if faults else 0


def _edit(args: argparse.Namespace) -> int:
    with opened(args.target) as installation:
        exists = (args.patches / installation.version / "series").is_file()
        series = Series.load(installation.version, args.patches) if exists else Series(installation.version, ())
        edit(args.folder, installation, series)
    print(f"{args.folder}: tag v{series.version}, then a commit for each of {series}")
    return 0


def _new(args: argparse.Namespace) -> int:
    commit(args.folder, args.subject, datetime.date.today())
    print(f"committed; fill in the ? of its header: git -C {args.folder} commit --amend")
    return 0


def _export(args: argparse.Namespace) -> int:
    series = export(args.folder, args.patches)
    print(f"{args.patches / series.version}: {series}")
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands to a parser, for `run`."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(function: Callable[[argparse.Namespace], int], text: str, target: str = "") -> argparse.ArgumentParser:
        sub = commands.add_parser(function.__name__.strip("_"), help=text, description=text)
        sub.set_defaults(patches_command=function)
        sub.add_argument(
            "--patches", type=Path, default=PATCHES, metavar="DIR", help="holds <version>/series (default: %(default)s)"
        )
        if target:
            sub.add_argument("--target", type=Path, help=f"{target} (default: the SGLang this Python imports)")
        return sub

    places = "environment, site-packages or checkout"
    status = command(
        _status, "say what is applied; exit 1 unless it is the committed series, whole", f"{places}, or a wheel"
    )
    status.add_argument(
        "--against",
        type=Path,
        metavar="RELEASE",
        help="another release (wheel or folder): what of the series it contains",
    )
    command(_apply, "apply the series, all or nothing, in place of an older one", places)
    command(_unapply, "put the published files back, exactly", places)
    command(_check, "check headers and fit, and that a round trip through git changes nothing", f"{places}, or a wheel")
    sub = command(
        _edit, "write a git checkout: SGLang as published, then a commit for each patch", f"{places}, or a wheel"
    )
    sub.add_argument("folder", type=Path)
    sub = command(_new, "commit what changed in a checkout as a new patch with a header to fill in")
    sub.add_argument("folder", type=Path)
    sub.add_argument("subject", help="what the patch does, in one line")
    sub = command(_export, "write the commits of a checkout back as patch files")
    sub.add_argument("folder", type=Path)


def run(args: argparse.Namespace) -> int:
    """Run the sub-command that was parsed; return 0, or 1 for a series not applied or not in order.

    Raise PatchsetError for everything that stops it.
    """
    try:
        return int(args.patches_command(args))
    except OSError as error:
        hint = "; run as the owner of the installation" if isinstance(error, PermissionError) else ""
        raise PatchsetError(f"{error}{hint}") from error


def main() -> int:
    """Run as `python image/patchset.py`."""
    parser = argparse.ArgumentParser(prog="patchset.py", description="The patch series for SGLang.")
    add_arguments(parser)
    try:
        return run(parser.parse_args())
    except PatchsetError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
