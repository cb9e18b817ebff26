"""Closes the gaps between SGLang's OpenAI API and OpenAI's own.

Seen in SGLang 0.5.23: errors come in a flat body of SGLang's own, validation errors show file paths of the server, an
error in a stream's first event follows a status of 200; any model name is accepted; ``n`` and log-probability counts
are not checked; a prompt token id outside the vocabulary ends the scheduler; a body that is no object, a
``response_format`` that is none, a non-ASCII Authorization header and a list as ``rid`` are answered with 500.
"""

import json
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from http import HTTPStatus
from typing import Any

from server_ext.hooks import Hook

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Message, Callable[[], Awaitable[Message]], Send], Awaitable[None]]

MAX_CHOICES = 128
"""The most choices a request may ask for (``n``), as OpenAI has it."""

_SHAPED_PATHS = ("/v1/", "/pools")
_FOREIGN_APIS = ("/v1/messages", "/v1/systemone")  # Anthropic's and System One's, with error bodies of their own
_STREAM = b"text/event-stream"
_TYPE_NAMES = {"bool", "float", "int", "str"}  # members of a union in Pydantic's locations


def error_body(message: str, status: int, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return the body of an error response in OpenAI's shape."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    if code is None and status == HTTPStatus.UNAUTHORIZED:
        code = "invalid_api_key"
    elif code is None and status == HTTPStatus.BAD_REQUEST and "context length" in message:
        code = "context_length_exceeded"
    elif code is None and status == HTTPStatus.NOT_FOUND and param == "model":
        code = "model_not_found"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _openai_error(content: bytes, status: int) -> bytes:
    """Return an error response's body in OpenAI's shape, whatever shape it has."""
    try:
        body = json.loads(content)
    except ValueError:
        body = {"message": content.decode(errors="replace").strip()}
    error = body.get("error", body) if isinstance(body, dict) else {"message": str(body)}
    if not isinstance(error, dict):
        error = {"message": str(error)}
    message = error.get("message") or error.get("detail") or HTTPStatus(status).phrase
    code = error.get("code") if isinstance(error.get("code"), str) else None
    return json.dumps(error_body(str(message), status, param=error.get("param"), code=code)).encode()


def _event_data(event: bytes) -> bytes:
    return event.removeprefix(b"data:").partition(b"\n\n")[0]


def _error_event_status(event: bytes) -> int | None:
    """Return the HTTP status in a stream's event if it is an error, else None."""
    try:
        code = json.loads(_event_data(event))["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return None
    return code if isinstance(code, int) and 400 <= code < 600 else None


class _ErrorShaper:
    """Holds the start of an error response or a stream back until its first body is there."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._held: Message | None = None
        self._content = b""
        self._answered = False

    async def send(self, message: Message) -> None:
        """Take the place of the server's ``send``."""
        if self._answered:  # the rest of a stream that began with an error
            return
        if message["type"] == "http.response.start":
            stream = any(name == b"content-type" and value.startswith(_STREAM) for name, value in message["headers"])
            if stream or message["status"] >= 400:
                self._held = message
                return
        elif self._held is not None and message["type"] == "http.response.body":
            await self._send_held(self._held, message)
            return
        await self._send(message)

    async def _send_held(self, start: Message, message: Message) -> None:
        status = start["status"]
        if status >= 400:
            self._content += message.get("body", b"")
            if message.get("more_body"):
                return
        elif (event_status := _error_event_status(message.get("body", b""))) is not None:
            status, self._content = event_status, _event_data(message["body"])
        else:
            self._held = None
            await self._send(start)
            await self._send(message)
            return
        body = _openai_error(self._content, status)
        kept = [header for header in start["headers"] if header[0] not in (b"content-length", b"content-type")]
        own = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        self._answered = True
        await self._send({"type": "http.response.start", "status": status, "headers": [*kept, *own]})
        await self._send({"type": "http.response.body", "body": body})


def shape_errors(app: AsgiApp) -> AsgiApp:
    """Give error responses under `_SHAPED_PATHS` OpenAI's shape, and an error in a stream's first event its status."""

    async def shaped(scope: Message, receive: Any, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        if path.startswith(_SHAPED_PATHS) and not path.startswith(_FOREIGN_APIS):
            send = _ErrorShaper(send).send
        await app(scope, receive, send)

    return shaped


def _field_path(location: Sequence[str | int]) -> str:
    """Return ``messages[0].role`` for a Pydantic location in a body, without the names of types in it."""
    path = ""
    for part in location[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part.islower() and part not in _TYPE_NAMES:
            path += f".{part}"
    return path.lstrip(".")


async def _answer_validation_error(request: Any, error: Any) -> Any:
    """Answer a request that does not fit its schema; registered for FastAPI's ``RequestValidationError``."""
    from fastapi.responses import JSONResponse

    problems = error.errors()
    if problems[0]["type"] == "json_invalid":
        found = [("", f"The body is not valid JSON: {problems[0]['ctx']['error']}")]
    else:
        found = [(_field_path(problem["loc"]), problem["msg"]) for problem in problems]
    message = "; ".join(dict.fromkeys(f"{path}: {text}" if path else text for path, text in found))
    return JSONResponse(error_body(message, 400, param=found[0][0] or None), status_code=400)


async def _parse_body(parse: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
    """Blame the body when one of SGLang's validators, which expects objects in it, trips over something else."""
    from fastapi.exceptions import RequestValidationError

    try:
        return await parse(*args, **kwargs)
    except (AttributeError, KeyError, TypeError) as error:
        problem = {"type": "value_error", "loc": ("body",), "msg": f"The body does not fit this endpoint: {error}"}
        raise RequestValidationError([problem]) from error


def _known_models(manager: Any) -> set[str]:
    """Return the names a request may give: the model, its adapters, and what SGLang fills in when none is given."""
    from sglang.srt.entrypoints.openai.protocol import DEFAULT_MODEL_NAME
    from sglang.srt.runtime_context import get_lora

    names = {manager.served_model_name, DEFAULT_MODEL_NAME}
    if get_lora().enable_lora:
        names |= {adapter.lora_name for adapter in manager.lora_registry.get_all_adapters().values()}
    return names


def _problem(serving: Any, request: Any) -> tuple[dict[str, Any], int] | None:
    """Return error body and status for what SGLang does not check in a request, or None if it is fine."""
    model = getattr(request, "model", None)
    if model is not None and serving._parse_model_parameter(model)[0] not in _known_models(serving.tokenizer_manager):
        message = f"The model '{model}' does not exist."
        return error_body(message, 404, param="model"), 404
    choices = getattr(request, "n", None)
    if choices is not None and not 1 <= choices <= MAX_CHOICES:
        return error_body(f"n must be between 1 and {MAX_CHOICES}, got {choices}.", 400, param="n"), 400
    if isinstance(getattr(request, "rid", None), list) and not isinstance(getattr(request, "prompt", None), list):
        return error_body("rid must be one string for one prompt.", 400, param="rid"), 400
    vocabulary_tokens = serving.tokenizer_manager.model_config.vocab_size
    for field in ("logprobs", "top_logprobs"):
        count = getattr(request, field, None)
        if count is not None and not 0 <= count <= vocabulary_tokens:
            message = f"{field} must be between 0 and {vocabulary_tokens}, got {count}."
            return error_body(message, 400, param=field), 400
    return None


async def _handle_request(handle: Callable[..., Awaitable[Any]], serving: Any, request: Any, raw_request: Any) -> Any:
    from fastapi.responses import JSONResponse

    problem = _problem(serving, request)
    if problem is not None:
        return JSONResponse(*problem)
    return await handle(serving, request, raw_request)


def _check_prompt_ids(manager: Any, request: Any, input_ids: Sequence[int] | None) -> None:
    """Raise `ValueError`, which SGLang answers with 400, for a client's token id that has no embedding."""
    if request.input_ids is None or not input_ids or request.contains_mm_input():
        return
    vocabulary_tokens = manager.model_config.vocab_size
    for token_id in (min(input_ids), max(input_ids)):
        if not 0 <= token_id < vocabulary_tokens:
            raise ValueError(f"The prompt has the token id {token_id}; the ids are 0 to {vocabulary_tokens - 1}.")


def _drop_unusable_header(**request: Any) -> tuple[tuple[()], dict[str, Any]] | None:
    """Treat an Authorization header with non-ASCII characters as absent; comparing it with a key would raise."""
    header = request["authorization_header"]
    return ((), {**request, "authorization_header": None}) if header and not header.isascii() else None


def _build(build: Callable[[], AsgiApp]) -> AsgiApp:
    """Build SGLang's middleware stack with our answers to validation errors, and shape what comes out of it."""
    from fastapi.exceptions import RequestValidationError
    from sglang.srt.entrypoints.http_server import app

    original = app.exception_handlers[RequestValidationError]

    async def answer(request: Any, error: Any) -> Any:
        foreign = request.url.path.startswith(_FOREIGN_APIS)
        return await (original if foreign else _answer_validation_error)(request, error)

    app.exception_handlers[RequestValidationError] = answer
    return shape_errors(build())


HOOKS = (
    Hook("sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase.handle_request", _handle_request, "around"),
    Hook("sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request", _check_prompt_ids, "before"),
    Hook("fastapi.dependencies.utils.request_body_to_args", _parse_body, "around"),
    Hook("sglang.srt.utils.auth.decide_request_auth", _drop_unusable_header, "before"),
    Hook("sglang.srt.entrypoints.http_server.app.build_middleware_stack", _build, "around"),
)
"""For the process that answers HTTP."""
