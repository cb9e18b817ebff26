"""A plugin or a hook that fails is an error; SGLang alone would log it and go on."""

from collections import defaultdict

import pytest
from sglang.srt import plugins
from sglang.srt.plugins.hook_registry import HookRegistry

from server_ext import hooks, plugin
from server_ext.hooks import Hook


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave this process's real hooks alone."""
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", {"sglang.version.taken"})
    monkeypatch.setattr(plugins, "_plugins_loaded", False)


def test_failing_plugin_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no such target")

    monkeypatch.setattr(plugin, "_apply_hooks", fail)
    with pytest.raises(SystemExit, match="the plugin sglang_dflash failed: no such target"):
        plugins.load_plugins()


def test_hook_without_its_target() -> None:
    with pytest.raises(RuntimeError, match=r"did not take on this SGLang: sglang\.version\.nothing"):
        hooks.apply([Hook("sglang.version.nothing", print, "before")])


def test_second_hook_on_an_applied_target() -> None:
    with pytest.raises(RuntimeError, match=r"already have hooks applied.*sglang\.version\.taken"):
        hooks.apply([Hook("sglang.version.taken", print, "before")])


def test_targets_that_are_not_there() -> None:
    there, renamed, moved = "sglang.version.__version__", "sglang.version.nothing", "sglang.nowhere.at.all"
    assert hooks.unresolved([Hook(target, print, "after") for target in (there, renamed, moved)]) == [renamed, moved]
