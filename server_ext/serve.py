"""``sglang-dflash serve``: SGLang's launcher with keys kept out of sight and a bounded, orderly way out.

Takes SGLang's options and its ``--config`` file unchanged. Mistakes that can be seen without SGLang are reported
before it is imported, which takes many seconds.
"""

import argparse
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from server_ext import exposition, hooks, init, keys, openai_api, plugin, refusal
from server_ext.announce import ready_text
from server_ext.checks import bound_socket, check_model
from server_ext.drain import Drain, end_children, leave
from server_ext.errors import UserError
from server_ext.hooks import Hook
from server_ext.options import check_arguments, engine_option_names, read_config
from server_ext.refusal import PROGRAM

# Ways to run SGLang in which another server than its HTTP process answers, or several of them do: keys, drain and
# error bodies would silently not apply there.
_UNSUPPORTED_MODES = {
    "tokenizer_worker_num": 1,
    "enable_http2": False,
    "grpc_port": None,
    "grpc_mode": False,
    "smg_grpc_mode": False,
    "use_ray": False,
    "encoder_only": False,
}

_KEY_OPTIONS = frozenset(key.option for key in keys.KEYS)
_EXAMPLES = """\
examples:
  %(prog)s --pair qwen3                      a tiny model pair, made on first use, without a GPU
  %(prog)s --config engine.yaml              all options from a file, `option: value` on each line
  %(prog)s MODEL --speculative-algorithm DFLASH --speculative-draft-model-path DRAFT \\
      --speculative-draft-window-size 512 --speculative-draft-kv-ratio 0.1 --enable-metrics
"""


class _Parser(argparse.ArgumentParser):
    """Reports a mistake as `UserError` instead of pages of usage."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0 or more")
    return seconds


def _ratio(text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = math.nan
    if not 0 < ratio <= 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number greater than 0 and at most 1; 1 keeps a draft KV slot for every target token"
        )
    return ratio


def _window(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens, 1 or more")
    return int(text)


def _own_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group("sglang-dflash")
    group.add_argument("--pair", metavar="NAME", help="Serve a tiny model pair, made on first use; see `tiny --help`.")
    for key in keys.KEYS:
        group.add_argument(
            key.file_option,
            metavar="FILE",
            help=f"Read the key for {key.option} from FILE. The environment variable {key.variable} works too.",
        )
    group.add_argument(
        "--drain-timeout-seconds",
        type=_seconds,
        metavar="SECONDS",
        default=30.0,
        help="How long running requests may take to finish after SIGTERM or SIGINT. Default: 30.",
    )
    group.add_argument(
        "--metrics-best-effort",
        action="store_true",
        help="Serve without pool metrics (sglang_dflash_up 0) when their hooks do not fit SGLang, instead of stopping.",
    )
    return parser


def _own_parser() -> argparse.ArgumentParser:
    return _own_options(_Parser(add_help=False, allow_abbrev=False))


def _early_parser() -> argparse.ArgumentParser:
    """Return a parser of our own options and of those of SGLang's that are checked early, with SGLang's defaults."""
    parser = _own_parser()
    parser.add_argument("--model-path", "--model")
    parser.add_argument("--tokenizer-path")
    parser.add_argument("--speculative-draft-model-path", "--speculative-draft-model")
    parser.add_argument("--speculative-draft-kv-ratio", type=_ratio, default=1.0)
    parser.add_argument("--speculative-draft-window-size", type=_window)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    return parser


def _names(parser: argparse.ArgumentParser) -> frozenset[str]:
    return frozenset(option for action in parser._actions for option in action.option_strings)


def _normalized(arguments: Sequence[str]) -> list[str]:
    """Accept ``serve MODEL`` and ``--config=FILE`` too; SGLang's parser overlooks the latter."""
    spread: list[str] = ["--model-path"] if arguments and not arguments[0].startswith("-") else []
    for argument in arguments:
        option, equals, value = argument.partition("=")
        spread += [option, value] if option == "--config" and equals else [argument]
    return spread


def _config_path(arguments: Sequence[str]) -> str | None:
    places = [place for place, argument in enumerate(arguments) if argument == "--config"]
    if len(places) > 1:
        raise UserError(f"--config is given {len(places)} times; put all options into one file")
    if places and places[0] + 1 == len(arguments):
        raise UserError("--config needs the path of a YAML file")
    return arguments[places[0] + 1] if places else None


def _argument(name: str, value: Any) -> str | None:
    """Return a line of the config file as on the command line; None for a switch that is off."""
    if isinstance(value, bool):
        return f"--{name}" if value else None
    return f"--{name}={value}"


def _check(arguments: Sequence[str]) -> argparse.Namespace:
    """Report every mistake that can be seen without SGLang; return the options of `_early_parser`."""
    parser = _early_parser()
    known = engine_option_names() | _names(parser)
    given = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    keys.refuse_in_options(given, known, "on the command line")
    check_arguments(given, known)
    config: Mapping[str, Any] = {}
    if path := _config_path(arguments):
        config = read_config(path, known)
        keys.refuse_in_options([f"--{name}" for name in config], known, f"in {path}")
    from_config = [_argument(name, value) for name, value in config.items() if f"--{name}" in _names(parser)]
    options, _ = parser.parse_known_args([*filter(None, from_config), *arguments])
    if options.pair is not None:
        from server_ext.tiny.recipe import recipe_named

        recipe_named(options.pair)
    elif options.model_path is None:
        raise UserError("no model: give --model-path FOLDER_OR_REPOSITORY, or --pair NAME for a tiny one")
    bound_socket(options.host, options.port).close()  # the server would find out only after loading the model
    for option in ("--model-path", "--tokenizer-path", "--speculative-draft-model-path"):
        if model := getattr(options, option[2:].replace("-", "_")):
            check_model(option, model)
    return options


def _pair_arguments(name: str) -> list[str]:
    """Return the engine options that serve the tiny pair `name`, making it if it is not there yet."""
    from server_ext.tiny.build import ensure

    pair = ensure(name, progress=lambda line: print(line, flush=True))
    return [
        f"--model-path={pair.target}",
        f"--served-model-name={name}",
        "--speculative-algorithm=DFLASH",
        f"--speculative-draft-model-path={pair.draft}",
        f"--speculative-dflash-block-size={pair.block_size}",
        f"--speculative-draft-window-size={pair.window_tokens}",
        # Small, but room for a draft pool of a quarter: it must hold what 8 requests and two chunks can.
        "--max-total-tokens=65536",
        "--max-running-requests=8",
        # States of a linear-attention target: three a request and the rest for prefixes. SGLang would size the pool
        # from free memory, gigabytes that take seconds to fill and of which no request shows. Others ignore it.
        "--max-mamba-cache-size=64",
        "--chunked-prefill-size=1024",
        "--enable-metrics",
        # A model this small may write white space for ever where a JSON grammar lets it.
        "--constrained-json-disable-any-whitespace",
    ]


def _full_parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = _Parser(
        prog=PROGRAM,
        usage="%(prog)s (MODEL | --pair NAME | --config FILE) [options]",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ServerArgs.add_cli_args(parser)
    _own_options(parser)  # after those of SGLang, two thousand lines: the end is what a terminal still shows
    for action in parser._actions:
        if action.option_strings and action.option_strings[0] in _KEY_OPTIONS:
            action.help = argparse.SUPPRESS  # refused: everyone on the machine sees a command line
    return parser


def _engine_options(arguments: Sequence[str], pair_arguments: Sequence[str]) -> Any:
    """Parse and resolve SGLang's options; return its ``ServerArgs``. `arguments` win over `pair_arguments`."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.environ import envs
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    parser = _full_parser()
    try:
        merged = [*pair_arguments, *ConfigArgumentMerger(parser).merge_config_with_args(list(arguments))]
        parser.parse_args(merged)
        server_args = prepare_server_args(_own_parser().parse_known_args(merged)[1])
        server_args.resolve_once()
    except UserError:
        raise
    except Exception as error:
        raise refusal.refused(error) from error
    resolved = resolving_view(server_args)
    modes = [name for name, value in _UNSUPPORTED_MODES.items() if getattr(resolved, name) != value]
    options = [f"--{name.replace('_', '-')}" for name in modes] + ["SGLANG_RUST_SERVER"] * envs.SGLANG_RUST_SERVER.get()
    if options:
        raise UserError(f"{options[0]} is not supported: keys, drain and /pools need SGLang's own HTTP process")
    return server_args


def _hooks(drain: Drain, server_keys: Mapping[str, str], shell_key: str, started: float) -> tuple[Hook, ...]:
    """Return the hooks of the process that answers HTTP."""

    def serve_with_keys(serve: Any, *args: Any, **kwargs: Any) -> Any:
        with keys.in_effect(server_keys):
            return serve(*args, **kwargs)

    def announce(_: None, server_args: Any, **__: Any) -> None:
        from sglang.srt.entrypoints.http_server import get_global_state
        from sglang.srt.runtime_context import get_observability

        manager = get_global_state().tokenizer_manager
        if manager.server_status.value == "Up":
            text = ready_text(
                server_args.url(),
                manager.served_model_name,
                key=shell_key if keys.API_KEY.field in server_keys else None,
                metrics=get_observability().enable_metrics,
                seconds=time.monotonic() - started,
            )
            print(text, flush=True)

    def serve_bound(serve: Any, server: Any, sockets: Any = None) -> Any:
        """Bind before SGLang's start-up request, which would take another server on the port for this one."""
        try:
            sockets = sockets or [bound_socket(server.config.host, server.config.port)]
        except UserError as error:
            refusal.report(error)
            leave(refusal.EXIT_STATUS)
        return serve(server, sockets)

    http = "sglang.srt.entrypoints.http_server"
    return (
        *openai_api.HOOKS,
        *exposition.HOOKS,
        *drain.hooks(),
        *refusal.LAUNCHER_HOOKS,
        Hook(f"{http}._setup_and_run_http_server", serve_with_keys, "around"),
        Hook(f"{http}.app.build_middleware_stack", drain.guard, "after"),
        Hook(f"{http}._wait_and_warmup", announce, "after"),
        Hook("uvicorn.server.Server.serve", serve_bound, "around"),
    )


def _check_pool_hooks() -> None:
    """Report here in one line what would end the scheduler as it starts."""
    from server_ext.watch import Watch

    if missing := hooks.unresolved(Watch().hooks()):
        raise UserError(
            f"this SGLang does not have what the pool metrics hook into: {', '.join(missing)}; install the pinned "
            "release, or serve without these metrics with --metrics-best-effort"
        )


def _load_plugins() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    if not plugin.loaded:
        raise UserError("the plugin sglang_dflash is not loaded; add it to SGLANG_PLUGINS or unset that variable")


def _add_routes() -> None:
    from sglang.srt.entrypoints.http_server import app

    from server_ext.routes import router

    app.include_router(router)


def check_installation() -> None:
    """Do all that is done to SGLang's HTTP process, without serving. Raises what `run` would end with."""
    _load_plugins()
    _check_pool_hooks()
    hooks.apply(_hooks(Drain(timeout_seconds=0.0), {}, "", time.monotonic()))
    _add_routes()


def run(arguments: Sequence[str]) -> int:
    """Serve until a signal; return the exit status. Raises `UserError` for bad input."""
    started = time.monotonic()
    init.leave_process_one()
    arguments = _normalized(arguments)
    if "--help" in arguments or "-h" in arguments:
        _full_parser().print_help()
        return 0
    options = _check(arguments)
    server_keys = keys.load({key.field: getattr(options, f"{key.field}_file") for key in keys.KEYS}, os.environ)
    keys.refuse_header_log(os.environ)
    pair_arguments = _pair_arguments(options.pair) if options.pair is not None else []
    drain = Drain(options.drain_timeout_seconds)
    drain.install()
    if options.metrics_best_effort:
        os.environ[plugin.BEST_EFFORT_VARIABLE] = "1"
    print(f"{PROGRAM}: loading the engine, which takes about half a minute", flush=True)

    from sglang.launch_server import run_server

    _load_plugins()
    server_args = _engine_options(arguments, pair_arguments)
    if not options.metrics_best_effort:
        _check_pool_hooks()
    shell_key = keys.shell_expression(keys.API_KEY, options.api_key_file)
    hooks.apply(_hooks(drain, server_keys, shell_key, started))
    _add_routes()
    try:
        run_server(server_args)
    except (AssertionError, ValueError) as error:
        if drain.serving:
            raise
        raise refusal.refused(error) from error
    finally:
        end_children()
    return 0
