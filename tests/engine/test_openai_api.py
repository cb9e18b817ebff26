"""The official ``openai`` client against the running server, and what the server says to requests it must refuse."""

import json
import math
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
import requests

from server import Server

PAIR = "qwen3"
MESSAGES = [{"role": "user", "content": "Tell me about the river."}]
PROMPT = "The river"


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return server.client()


def chat(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(
        **{"model": PAIR, "messages": MESSAGES, "max_tokens": 24, "temperature": 0, **options}
    )


def complete(client: openai.OpenAI, **options: Any) -> Any:
    return client.completions.create(**{"model": PAIR, "prompt": PROMPT, "max_tokens": 24, "temperature": 0, **options})


# Requests that are answered


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [PAIR]
    assert client.models.retrieve(PAIR).id == PAIR


def test_chat(client: openai.OpenAI) -> None:
    answer = chat(client)
    (choice,) = answer.choices
    assert answer.model == PAIR
    assert choice.message.role == "assistant"
    assert len(set(choice.message.content.split())) > 3
    assert (choice.finish_reason == "length") == (answer.usage.completion_tokens == 24)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_completion(client: openai.OpenAI) -> None:
    answer = complete(client)
    (choice,) = answer.choices
    assert len(set(choice.text.split())) > 3
    assert answer.usage.completion_tokens == 24 and choice.finish_reason == "length"


def test_several_prompts(client: openai.OpenAI) -> None:
    prompts = [PROMPT, "The mountain"]
    together = complete(client, prompt=prompts)
    assert [choice.index for choice in together.choices] == [0, 1]
    assert [choice.text for choice in together.choices] == [
        complete(client, prompt=prompt).choices[0].text for prompt in prompts
    ]


def test_token_ids_as_prompt(client: openai.OpenAI, server: Server) -> None:
    answer = requests.post(f"{server.url}/v1/tokenize", json={"model": PAIR, "prompt": PROMPT}, timeout=60)
    assert complete(client, prompt=answer.json()["tokens"]).choices[0].text == complete(client).choices[0].text


def test_chat_stream_is_the_answer_in_pieces(client: openai.OpenAI) -> None:
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    whole = chat(client)
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    assert sum(1 for choice in choices if choice.delta.content) > 1
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == [whole.choices[0].finish_reason]
    assert chunks[-1].usage == whole.usage


def test_completion_stream_is_the_answer_in_pieces(client: openai.OpenAI) -> None:
    pieces = [chunk.choices[0].text for chunk in complete(client, stream=True)]
    assert len(pieces) > 1
    assert "".join(pieces) == complete(client).choices[0].text


def test_n_choices(client: openai.OpenAI) -> None:
    answer = chat(client, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 1
    assert len({choice.message.content for choice in chat(client, n=4, temperature=1.5).choices}) > 1


def test_stop_string(client: openai.OpenAI) -> None:
    text = complete(client).choices[0].text
    stop = text.split()[3]
    choice = complete(client, stop=[stop]).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.text == text[: text.index(stop)]


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = chat(client, logprobs=True, top_logprobs=4)
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == answer.usage.completion_tokens
    for token in tokens:
        assert len(token.top_logprobs) == 4
        likely = [top.logprob for top in token.top_logprobs]
        assert likely == sorted(likely, reverse=True)
        assert sum(map(math.exp, likely)) <= 1 + 1e-3
        assert token.logprob == pytest.approx(likely[0], abs=1e-3)  # greedy takes the most likely token


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = complete(client, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert len(logprobs.token_logprobs) == answer.usage.completion_tokens
    assert all(value <= 0 for value in logprobs.token_logprobs)


def test_seed_repeats_a_sample(client: openai.OpenAI) -> None:
    def sample(seed: int) -> str:
        return str(chat(client, temperature=2, seed=seed, extra_body={"min_p": 1e-4}).choices[0].message.content)

    assert len({sample(7) for _ in range(4)}) == 1
    assert len({sample(seed) for seed in range(16)}) > 1


def test_json_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {
            "place": {"enum": ["river", "mountain", "sea"]},
            "wet": {"type": "boolean"},
            "code": {"type": "string", "pattern": "^[A-F]{4}$"},
        },
        "required": ["place", "wet", "code"],
        "additionalProperties": False,
    }
    for temperature in (0, 1.5):
        answer = chat(
            client,
            temperature=temperature,
            max_tokens=400,
            response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": schema, "strict": True}},
        )
        assert answer.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(answer.choices[0].message.content), schema)


# Requests that are refused


@pytest.fixture(autouse=True)
def lives_on(server: Server) -> Iterator[None]:
    """The engine process survives each test of this module and still answers."""
    pids = {process.pid for process in server.processes()}
    yield
    assert {process.pid for process in server.processes()} == pids
    assert chat(server.client(), max_tokens=1).choices[0].finish_reason == "length"


def check_shape(response: Any, status: int) -> dict[str, Any]:
    """See that a raw response is an error in OpenAI's shape, and return the error."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert error["message"] and "site-packages" not in error["message"] and "Traceback" not in error["message"]
    assert error["code"] is None or isinstance(error["code"], str)
    return error


BAD_CHATS: list[tuple[dict[str, Any], int, str | None, str]] = [
    ({"model": "gpt-7"}, 404, "model", "'gpt-7'"),
    ({"model": ""}, 404, "model", "''"),
    ({"model": 3}, 400, "model", "string"),
    ({"temperature": -1}, 400, None, "-1.0"),
    ({"temperature": "hot"}, 400, "temperature", "number"),
    ({"top_p": 2}, 400, None, "2.0"),
    ({"n": 0}, 400, "n", "got 0"),
    ({"n": -1}, 400, "n", "got -1"),
    ({"n": 100_000}, 400, "n", "128"),
    ({"max_tokens": -1}, 400, None, "-1"),
    ({"max_tokens": 10**9}, 400, None, "context length"),
    ({"stop": 5}, 400, "stop", "stop: "),
    ({"stop": ["a"] * 50}, 400, None, "50"),
    ({"logprobs": True, "top_logprobs": -1}, 400, "top_logprobs", "got -1"),
    ({"logprobs": True, "top_logprobs": 10**6}, 400, "top_logprobs", "got 1000000"),
    ({"messages": []}, 400, None, "empty"),
    ({"messages": "Hello"}, 400, "messages", "list"),
    ({"messages": [{"role": "narrator", "content": "x"}]}, 400, "messages[0].role", "role"),
    ({"messages": [{"role": "user", "content": "word " * 30_000}]}, 400, None, "context length"),
    ({"response_format": 5}, 400, None, "body"),
    ({"response_format": {"type": "json_schema"}}, 400, None, "schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "rock"}}}},
        400,
        None,
        "rock",
    ),
    ({"tools": [{"type": "function"}]}, 400, "tools[0].function", "required"),
    ({"tool_choice": "required"}, 400, None, "Tools"),
    ({"logit_bias": {"99999999": 1}}, 400, None, "99999999"),
    ({"frequency_penalty": 5}, 400, None, "5.0"),
    ({"seed": "x"}, 400, "seed", "integer"),
    ({"rid": ["a"]}, 400, "rid", "rid"),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("options", "status", "param", "says"), BAD_CHATS, ids=[json.dumps(case[0])[:50] for case in BAD_CHATS]
)
def test_bad_chat(
    server: Server, stream: bool, options: dict[str, Any], status: int, param: str | None, says: str
) -> None:
    body = {"model": PAIR, "messages": MESSAGES, "max_tokens": 4, "stream": stream, **options}
    error = check_shape(requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=120), status)
    assert error["param"] == param
    assert says in error["message"]


@pytest.mark.parametrize(
    ("options", "status", "param", "says"),
    [
        ({"model": "gpt-7"}, 404, "model", "'gpt-7'"),
        ({"prompt": ""}, 400, None, "empty"),
        ({"prompt": None}, 400, "prompt", "prompt: "),
        ({"prompt": [10**8]}, 400, None, "token id 100000000"),
        ({"prompt": [5, -5]}, 400, None, "token id -5"),
        ({"prompt": [[1, 2], [1, 10**8]]}, 400, None, "token id 100000000"),
        ({"prompt": "word " * 30_000}, 400, None, "context length"),
        ({"logprobs": -1}, 400, "logprobs", "got -1"),
        ({"logprobs": 10_000}, 400, "logprobs", "got 10000"),
        ({"n": 0}, 400, "n", "got 0"),
    ],
    ids=str,
)
def test_bad_completion(server: Server, options: dict[str, Any], status: int, param: str | None, says: str) -> None:
    body = {"model": PAIR, "prompt": PROMPT, "max_tokens": 4, **options}
    error = check_shape(requests.post(f"{server.url}/v1/completions", json=body, timeout=120), status)
    assert error["param"] == param
    assert says in error["message"]


@pytest.mark.parametrize("content", [b"{nope", b"", b"[1]", b"5", b"null", b'"x"', b'{"model": "\xff"}'])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_body_that_is_no_request(server: Server, path: str, content: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    check_shape(requests.post(server.url + path, data=content, headers=headers, timeout=60), 400)


def test_other_content_type(server: Server) -> None:
    error = check_shape(requests.post(f"{server.url}/v1/chat/completions", data="Hello", timeout=60), 400)
    assert "application/json" in error["message"]


def test_unknown_path_and_method(server: Server) -> None:
    check_shape(requests.get(f"{server.url}/v1/nonsense", timeout=60), 404)
    check_shape(requests.get(f"{server.url}/v1/chat/completions", timeout=60), 405)


def test_the_client_sees_its_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        chat(client, model="gpt-7")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-7")
    with pytest.raises(openai.BadRequestError) as too_long:
        chat(client, messages=[{"role": "user", "content": "word " * 30_000}])
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        list(chat(client, stream=True, temperature=-1))
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt-7", input="Hello")
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model=PAIR, input="Hello")
