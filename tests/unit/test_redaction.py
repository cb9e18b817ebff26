"""No log line, page or dump shows the keys that a server was started with."""

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from unpatched import without

PATCH = "keys-out-of-logs-server-info-and-dumps.patch"
KEYS = {
    "--api-key": "ordinary-key",
    "--admin-api-key": "key-of-the-admin",
    "--ssl-keyfile-password": "word-of-the-file",
}
SPELLINGS = {
    "apart": [part for item in KEYS.items() for part in item],
    "joined": [f"{option}={key}" for option, key in KEYS.items()],
    "abbreviated": [part for option, key in KEYS.items() for part in (option[:-1], key)],
}


def server_args(*options: str) -> Any:
    from sglang.srt.server_args import prepare_server_args

    return prepare_server_args(["--model-path", "none", *options])


def logged(args: Any) -> dict[str, Any]:
    from sglang.srt.entrypoints.engine import _server_args_for_logging

    return _server_args_for_logging(args)


def server_info(args: Any) -> str:
    from sglang.srt.sampling.watermarking.core import redact_watermark_secrets
    from sglang.srt.utils.common import build_server_info

    return str(redact_watermark_secrets(build_server_info(args, {"internal_states": [args.resolved_dict()]})))


def crash_dump(args: Any) -> str:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.runtime_context import get_context

    with get_context().override_server_args():
        dumped = TokenizerManager._server_args_for_dump(SimpleNamespace(server_args=args))
    return pickle.dumps(dumped).decode(errors="replace")


VIEWS: dict[str, Callable[[Any], str]] = {
    "log": lambda args: str(logged(args)),
    "info": server_info,
    "command line": lambda args: args.launch_command,
    "repr": repr,
    "dump": crash_dump,
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("view", VIEWS)
def test_no_view_of_the_arguments_shows_a_key(view: str, spelling: str) -> None:
    args = server_args(*SPELLINGS[spelling])
    shown = VIEWS[view](args)
    assert [key for key in KEYS.values() if key in shown] == []
    assert (args.api_key, args.admin_api_key, args.ssl_keyfile_password) == tuple(KEYS.values())

    with without(PATCH):
        shown = VIEWS[view](server_args(*SPELLINGS[spelling]))
        assert [key for key in KEYS.values() if key in shown] == list(KEYS.values())


def test_one_still_sees_whether_there_is_a_key() -> None:
    with_key, without_key = (logged(server_args(*options)) for options in (("--api-key", "k"), ()))
    assert (with_key["api_key"], with_key["admin_api_key"]) == ("<redacted>", None)
    assert without_key["api_key"] is None
    assert "--api-key <redacted>" in server_args("--api-key", "k").launch_command
