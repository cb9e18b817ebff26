"""Collects the hooks that stand in for GPU launches, each named by the dotted path of what it replaces."""

from collections.abc import Callable
from typing import Any

from server_ext.hooks import Hook

HOOKS: list[Hook] = []
"""Every substitute of this package; complete once its modules are imported."""


def substitutes(target: str) -> Callable[[Any], Any]:
    """Note the decorated function or class as the replacement of ``target``, whose signature it keeps."""

    def note(replacement: Any) -> Any:
        HOOKS.append(Hook(target, replacement, "replace"))
        return replacement

    return note
