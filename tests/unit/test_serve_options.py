"""What the early checks know of SGLang's options is what SGLang's own parser knows."""

import argparse
from pathlib import Path

import pytest

from server import free_port
from server_ext import serve
from server_ext.options import engine_option_names
from server_ext.serve import _early_parser


@pytest.fixture(scope="module")
def engine_parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


# For SGLang's gRPC server, which is refused here: a package beside SGLang adds them once something imports it.
OF_THE_GRPC_SERVER = {"--servicer-impl", "--metrics-host", "--metrics-port"}


def test_names_read_from_source_are_those_of_the_parser(engine_parser: argparse.ArgumentParser) -> None:
    names = {option for action in engine_parser._actions for option in action.option_strings if option[:2] == "--"}
    assert engine_option_names() == names - OF_THE_GRPC_SERVER


def test_options_checked_early_have_sglangs_defaults(engine_parser: argparse.ArgumentParser) -> None:
    theirs = {option: action for action in engine_parser._actions for option in action.option_strings}
    shared = [action for action in _early_parser()._actions if action.option_strings[0] in theirs]
    assert [action.option_strings[0] for action in shared] == [
        "--model-path",
        "--tokenizer-path",
        "--speculative-draft-model-path",
        "--speculative-draft-kv-ratio",
        "--speculative-draft-window-size",
        "--host",
        "--port",
    ]
    for action in shared:
        original = theirs[action.option_strings[0]]
        assert (action.option_strings, action.default) == (original.option_strings, original.default)


@pytest.mark.parametrize("value", [True, False])
def test_a_switch_of_ours_in_the_config_file(value: bool, tmp_path: Path) -> None:
    config = tmp_path / "engine.yaml"
    config.write_text(f"pair: qwen3\nport: {free_port()}\nmetrics-best-effort: {str(value).lower()}\n")
    assert serve._check(["--config", str(config)]).metrics_best_effort is value


def test_help_hides_the_options_that_are_refused_and_ends_with_examples() -> None:
    text = serve._full_parser().format_help()
    assert "--api-key-file FILE" in text and "--api-key API_KEY" not in text
    assert text.startswith("usage: sglang-dflash serve (MODEL | --pair NAME | --config FILE) [options]\n")
    assert "examples:\n  sglang-dflash serve --pair qwen3 " in text
