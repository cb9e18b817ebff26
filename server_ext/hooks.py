"""Applies hooks through SGLang's `HookRegistry` and makes sure that each one took.

The registry logs a hook that it cannot apply and goes on, and it ignores one whose target already has hooks applied. An
engine that runs without its hooks looks healthy, so both are errors here.
"""

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Hook:
    """A function laid over the dotted path `target`; see `HookType` in SGLang for what each kind is called with."""

    target: str
    function: Callable[..., Any]
    kind: Literal["before", "after", "around", "replace"]


def unresolved(hooks: Sequence[Hook]) -> list[str]:
    """Return the targets that the installed SGLang does not have."""
    missing = []
    for hook in hooks:
        try:
            pkgutil.resolve_name(hook.target)
        except (ImportError, AttributeError):
            missing.append(hook.target)
    return missing


def apply(hooks: Sequence[Hook]) -> None:
    """Apply `hooks` in this process. Raises `RuntimeError` that names the targets of those which did not take."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    late = [hook.target for hook in hooks if hook.target in HookRegistry._patched]
    if late:
        raise RuntimeError(f"these already have hooks applied and would ignore another one: {', '.join(late)}")
    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, HookType(hook.kind))
    HookRegistry.apply_hooks()
    missing = [hook.target for hook in hooks if hook.target not in HookRegistry._patched]
    if missing:
        raise RuntimeError(f"hooks that did not take on this SGLang: {', '.join(missing)}")
