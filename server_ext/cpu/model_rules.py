"""SGLang's rules for single models, where they name the attention backends that serve the model.

The lists are closed and know only in-tree backends. What they ask for (a sliding window per layer, pools of two
geometries) this platform's backend has.
"""

from collections.abc import Callable
from typing import Any

from server_ext.cpu import PLATFORM
from server_ext.cpu.substitutes import HOOKS
from server_ext.hooks import Hook

_LISTED = "triton"
"""The in-tree backend that every such list has."""


def _with_listed_name(handle: Callable[[Any], None], server_args: Any) -> None:
    """Let the rules read `_LISTED` where the platform's own backend is chosen; the choice itself stays."""
    from sglang.srt.arg_groups import model_hook

    backends_of = model_hook.attention_backends_of

    def listed(config: Any) -> tuple[str | None, ...]:
        return tuple(_LISTED if name == PLATFORM else name for name in backends_of(config))

    # Not a hook of its own: the registry would put it into every module that imports the function.
    model_hook.attention_backends_of = listed
    try:
        handle(server_args)
    finally:
        model_hook.attention_backends_of = backends_of


HOOKS.append(Hook("sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments", _with_listed_name, "around"))
