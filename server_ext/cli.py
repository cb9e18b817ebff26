"""The command ``sglang-dflash``."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from server_ext.errors import UserError

# Command, what it does, and the module that offers add_arguments(parser) and run(args).
_COMMANDS = {
    "plan": ("size the pools for a pair, a GPU and a load, without a GPU", "server_ext.planner.command"),
    "tiny": ("make tiny target and draft models to run the engine with", "server_ext.tiny.command"),
    "status": ("show the memory pools of a running server", "server_ext.status"),
    "patches": ("apply, check and export the patch series for SGLang", "server_ext.image.patchset"),
}


def _parser(command: str | None) -> argparse.ArgumentParser:
    """Return the parser with the options of `command`; only its module is imported."""
    parser = argparse.ArgumentParser(prog="sglang-dflash", description="SGLang with a bounded DFLASH draft KV pool.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("serve", help="run the server; takes SGLang's options")
    for name, (text, module_name) in _COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text)
        if name == command:
            module = importlib.import_module(module_name)
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    return parser


def _run(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["serve"]:  # its options are SGLang's, which argparse here knows nothing about
        from server_ext import serve

        return serve.run(arguments[1:])
    args = _parser(arguments[0] if arguments else None).parse_args(arguments)
    return int(args.run(args))


def main() -> int:
    """Run the command line and return the exit status: 2 for bad input, with one line that says what to change."""
    arguments = sys.argv[1:]
    try:
        return _run(arguments)
    except UserError as error:
        print(f"sglang-dflash {arguments[0]}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
