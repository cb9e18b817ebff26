"""SGLang's own launcher from the patched package: what a client and a reader of the log see."""

import sys
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import openai
import requests

from server import Server
from server_ext.tiny.build import ensure

POOL_TOKENS = 1024
TOO_MANY_TOKENS = 8192
KEYS = {"--api-key": "ordinary-key", "--admin-api-key": "key-of-the-admin"}


def chat(client: openai.OpenAI, **options: Any) -> Any:
    messages = [{"role": "user", "content": "Ada keeps a diary."}]
    return client.chat.completions.create(model="qwen3", messages=messages, temperature=0, **options)


def complete(client: openai.OpenAI, **options: Any) -> Any:
    return client.completions.create(model="qwen3", prompt="Ada keeps a diary.", temperature=0, **options)


def outgrow(ask: Callable[..., Any], server: Server, *, stream: bool) -> tuple[openai.APIError | None, list[Any]]:
    """Ask for more tokens than the pool has; return the error, and what came before it."""
    chunks: list[Any] = []
    try:
        answer = ask(server.client(), stream=stream, max_tokens=TOO_MANY_TOKENS, extra_body={"ignore_eos": True})
        if stream:
            chunks.extend(answer)
    except openai.APIError as error:
        return error, chunks
    return None, chunks


def check_error(error: openai.APIError | None) -> None:
    assert error is not None
    assert f"The KV cache pool of {POOL_TOKENS} tokens is full" in error.message
    assert "Raise --max-total-tokens or --mem-fraction-static on the server" in error.message


def test_a_client_learns_which_pool_is_full_and_no_reader_learns_a_key(alone: None, tmp_path: Path) -> None:
    pair = ensure("qwen3")
    arguments = ["--model-path", str(pair.target), "--max-total-tokens", str(POOL_TOKENS), "--dtype", "bfloat16"]
    arguments += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(pair.draft)]
    arguments += ["--served-model-name", "qwen3", *(f"{option}={key}" for option, key in KEYS.items())]
    server = Server(
        arguments,
        tmp_path / "log",
        command=[sys.executable, "-m", "sglang.launch_server"],
        key=KEYS["--api-key"],
        environment={"SGLANG_PLATFORM": "cpu_reference"},
    )
    with server:
        server.wait_for("The server is fired up and ready to roll")
        for ask in (chat, complete):
            error, _ = outgrow(ask, server, stream=False)
            check_error(error)
            assert error.status_code == HTTPStatus.INSUFFICIENT_STORAGE
            error, chunks = outgrow(ask, server, stream=True)
            check_error(error)
            assert len(chunks) > 10 and not any(chunk.choices[0].finish_reason for chunk in chunks if chunk.choices)
        info = requests.get(f"{server.url}/server_info", headers=server.headers, timeout=60)
        assert info.json()["max_total_num_tokens"] == POOL_TOKENS
        shown = server.output() + info.text
        assert "server_args=" in shown
        assert [key for key in KEYS.values() if key in shown] == []
