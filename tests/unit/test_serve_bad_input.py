"""Bad input to ``sglang-dflash serve``: one line on standard error, before anything heavy is imported."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

# The command, and a look at what it has imported: SGLang or torch would make a person wait for the complaint.
PROGRAM = """
import sys
from server_ext.cli import main
status = main()
assert not {"sglang", "torch"} & set(sys.modules)
sys.exit(status)
"""


def refusal(*arguments: object, environment: dict[str, str] | None = None) -> str:
    """Run ``serve`` with arguments that it must refuse, and return what it says."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, "serve", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **(environment or {})},
    )
    assert (result.returncode, result.stdout) == (2, ""), result
    prefix, newline = "sglang-dflash serve: error: ", "\n"
    assert result.stderr.startswith(prefix) and result.stderr.count(newline) == 1, result.stderr
    return result.stderr.removeprefix(prefix).removesuffix(newline)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


# Options


def test_no_model() -> None:
    assert refusal() == "no model: give --model-path FOLDER_OR_REPOSITORY, or --pair NAME for a tiny one"


def test_mistyped_option(model: Path) -> None:
    assert (
        refusal("--model-path", model, "--max-total-token", 5, "--prot=3")
        == "unknown option --prot; did you mean --port?"
    )


def test_unknown_pair_names_the_pairs() -> None:
    message = refusal("--pair", "qwen33")
    assert "'qwen33'" in message and "qwen3" in message.partition("'qwen33'")[2]


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "soon"])
def test_drain_timeout_that_is_no_time(value: str, model: Path) -> None:
    message = refusal("--model-path", model, f"--drain-timeout-seconds={value}")
    assert message == f"argument --drain-timeout-seconds: '{value}' is not a number of seconds, 0 or more"


@pytest.mark.parametrize("value", ["0", "1.5", "-0.1", "nan", "a quarter"])
def test_draft_kv_ratio_out_of_range(value: str, model: Path) -> None:
    option = "--speculative-draft-kv-ratio"
    way_out = "is not a number greater than 0 and at most 1; 1 keeps a draft KV slot for every target token"
    assert refusal("--model-path", model, f"{option}={value}") == f"argument {option}: {value!r} {way_out}"


@pytest.mark.parametrize("value", ["0", "-64", "1.5", "wide"])
def test_draft_window_that_is_no_number_of_tokens(value: str, model: Path, tmp_path: Path) -> None:
    option = "speculative-draft-window-size"
    expected = f"argument --{option}: {value!r} is not a number of tokens, 1 or more"
    assert refusal("--model-path", model, f"--{option}={value}") == expected
    config = write(tmp_path, "engine.yaml", f"model-path: {model}\n{option}: {value}\n")
    assert refusal("--config", config) == expected


# Models


@pytest.mark.parametrize("option", ["--model-path", "--tokenizer-path", "--speculative-draft-model-path"])
def test_missing_folder(option: str, model: Path, tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    message = refusal("--model-path", model, option, missing)
    assert message == f"{option} {missing}: no such folder; give a model folder or a Hugging Face repository id"


def test_folder_without_a_model(tmp_path: Path) -> None:
    assert refusal(tmp_path).startswith(f"--model-path {tmp_path}: there is no config.json or params.json")


def test_config_json_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    assert (
        refusal("--model", tmp_path) == f"--model-path {tmp_path}: cannot read {tmp_path}/config.json: Is a directory"
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_folder_without_permission(model: Path) -> None:
    model.chmod(0)
    try:
        assert refusal("--model-path", model).endswith("Permission denied")
    finally:
        model.chmod(0o755)


def test_config_json_that_is_not_json(model: Path) -> None:
    write(model, "config.json", '{"architectures": ["Qwen3')
    assert refusal("--model-path", model).startswith(f"--model-path {model}: config.json is not valid JSON: ")


# Address


def test_port_in_use(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = refusal("--model-path", model, "--port", port)
    assert f"port {port} on 127.0.0.1 is in use" in message and "--port" in message and "PORT=" in message


@pytest.mark.parametrize("port", ["0", "65536", "-1"])
def test_port_out_of_range(port: str, model: Path) -> None:
    assert refusal("--model-path", model, f"--port={port}") == f"--port {port}: must be between 1 and 65535"


def test_port_that_is_no_number(model: Path) -> None:
    assert refusal("--model-path", model, "--port", "http") == "argument --port: invalid int value: 'http'"


def test_host_of_another_machine(model: Path) -> None:
    assert refusal("--model-path", model, "--host", "192.0.2.1").endswith("Cannot assign requested address")


# The config file


def test_config_file_with_a_typo(model: Path, tmp_path: Path) -> None:
    path = write(tmp_path, "engine.yaml", f"model-path: {model}\nmax-runing-requests: 8\n")
    message = refusal("--config", path)
    assert message == f"--config {path}: unknown option max-runing-requests; did you mean max-running-requests?"


def test_config_file_that_is_no_yaml(tmp_path: Path) -> None:
    path = write(tmp_path, "engine.yaml", "model-path: [unclosed\n")
    assert refusal(f"--config={path}").startswith(f"--config {path}: not valid YAML at line 2, column 1: ")


def test_config_file_that_is_no_mapping(tmp_path: Path) -> None:
    path = write(tmp_path, "engine.yaml", "- model-path\n")
    assert refusal("--config", path) == f"--config {path}: expected `option: value` lines, found a list"


def test_config_file_with_another_ending(tmp_path: Path) -> None:
    path = write(tmp_path, "engine.json", "{}")
    assert refusal("--config", path) == f"--config {path}: the name must end in .yaml or .yml"


def test_config_file_that_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    assert refusal("--config", path) == f"--config {path}: No such file or directory"


def test_config_without_a_file() -> None:
    assert refusal("--config") == "--config needs the path of a YAML file"


def test_two_config_files(tmp_path: Path) -> None:
    path = write(tmp_path, "engine.yaml", "")
    assert refusal("--config", path, "--config", path) == "--config is given 2 times; put all options into one file"


def test_values_in_the_config_file_are_checked_like_options(tmp_path: Path) -> None:
    path = write(tmp_path, "engine.yaml", json.dumps({"model_path": str(tmp_path / "nowhere")}))
    assert refusal("--config", path).startswith(f"--model-path {tmp_path}/nowhere: no such folder")


def test_options_win_over_the_config_file(model: Path, tmp_path: Path) -> None:
    path = write(tmp_path, "engine.yaml", f"model-path: {tmp_path}/nowhere\nport: 99999\n")
    assert refusal("--config", path, "--model-path", model) == "--port 99999: must be between 1 and 65535"


# Keys

SECRET = "sk-must-never-show"


@pytest.mark.parametrize("option", ["--api-key", "--admin-api-key", "--api-k", "--admin-api"])
def test_key_on_the_command_line(option: str, model: Path) -> None:
    message = refusal("--model-path", model, f"{option}={SECRET}")
    assert "on the command line" in message and "-key-file FILE" in message and "API_KEY" in message
    assert SECRET not in message


@pytest.mark.parametrize("name", ["api-key", "api_key", "admin-api-key"])
def test_key_in_the_config_file(name: str, model: Path, tmp_path: Path) -> None:
    path = write(tmp_path, "engine.yaml", f"model-path: {model}\n{name}: {SECRET}\n")
    message = refusal("--config", path)
    assert f"in {path}" in message and "-key-file FILE" in message
    assert SECRET not in message


@pytest.mark.parametrize("option", ["--api-key-file", "--admin-api-key-file"])
def test_key_file_that_is_missing(option: str, model: Path, tmp_path: Path) -> None:
    message = refusal("--model-path", model, option, tmp_path / "key")
    assert message == f"{option} {tmp_path}/key: No such file or directory"


@pytest.mark.parametrize("content", ["", "\n", " \n\n"])
def test_key_file_that_is_empty(content: str, model: Path, tmp_path: Path) -> None:
    path = write(tmp_path, "key", content)
    assert refusal("--model-path", model, "--api-key-file", path).startswith(f"--api-key-file {path} is empty")


def test_key_file_that_is_a_folder(model: Path, tmp_path: Path) -> None:
    assert refusal("--model-path", model, "--api-key-file", tmp_path).endswith("Is a directory")


@pytest.mark.parametrize("content", ["two words", "two\nlines", "schlüssel"])
def test_key_that_fits_no_header(content: str, model: Path, tmp_path: Path) -> None:
    path = write(tmp_path, "key", content)
    message = refusal("--model-path", model, "--api-key-file", path)
    assert message.startswith(f"--api-key-file {path} must be one line of printable ASCII") and content not in message


def test_key_variable_that_is_empty(model: Path) -> None:
    message = refusal("--model-path", model, environment={"SGLANG_API_KEY": ""})
    assert message.startswith("the environment variable SGLANG_API_KEY is empty")


def test_log_of_the_header_with_the_key(model: Path) -> None:
    message = refusal("--model-path", model, environment={"SGLANG_LOG_REQUEST_HEADERS": "x-id, Authorization"})
    assert message.startswith("SGLANG_LOG_REQUEST_HEADERS names authorization")
