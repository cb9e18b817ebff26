"""A plugin of SGLang that takes sliding-window eviction out of DFLASH, as in the releases that lacked it.

`installed` makes it one that the engine finds; the module itself is what its entry point names.
"""

import os
import sys
from pathlib import Path


def load() -> None:
    """Take the two calls out for good, in the scheduler's process."""
    if "sglang.srt.managers.scheduler" in sys.modules:
        from test_eviction import without_the_two_calls

        _kept.append(without_the_two_calls())
        _kept[0].__enter__()


_kept: list = []


def installed(folder: Path) -> dict[str, str]:
    """Return the environment in which a server finds this plugin; `folder` is for its metadata."""
    metadata = folder / "broken_eviction-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-eviction\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[sglang.srt.plugins]\nbroken_eviction = broken_eviction:load\n")
    here = Path(__file__).parent
    paths = [folder, here, here.parent / "engine", os.environ.get("PYTHONPATH")]
    return {"PYTHONPATH": os.pathsep.join(str(path) for path in paths if path)}
