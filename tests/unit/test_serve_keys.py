"""Where keys come from."""

from pathlib import Path

from server_ext import keys


def test_no_key_is_no_key() -> None:
    assert keys.load({}, {}) == {}


def test_file_and_environment(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("from-file\n")
    environment = {"SGLANG_ADMIN_API_KEY": "from-environment", "HOME": "/home"}
    loaded = keys.load({"api_key": str(path), "admin_api_key": None}, environment)
    assert loaded == {"api_key": "from-file", "admin_api_key": "from-environment"}
    assert environment == {"HOME": "/home"}


def test_file_wins_and_the_variable_goes_anyway(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("from-file")
    environment = {"SGLANG_API_KEY": "from-environment"}
    assert keys.load({"api_key": str(path)}, environment) == {"api_key": "from-file"}
    assert environment == {}


def test_the_announced_command_takes_the_key_from_where_the_server_did() -> None:
    assert keys.shell_expression(keys.API_KEY, None) == "$SGLANG_API_KEY"
    assert keys.shell_expression(keys.API_KEY, "/run/my key") == "$(cat '/run/my key')"
