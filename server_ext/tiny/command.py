"""The command `sglang-dflash tiny`."""

from __future__ import annotations

import argparse
from pathlib import Path

from server_ext.tiny.recipe import RECIPES, recipe_named

SUMMARY = "make tiny target and draft models to run the engine with, no download"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    names = ", ".join(f"{recipe.name} ({recipe.summary})" for recipe in RECIPES.values())
    parser.add_argument("pairs", nargs="+", metavar="PAIR", help=f"which pair to make: {names}")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="make each pair in DIR/PAIR instead of the cache (XDG_CACHE_HOME or ~/.cache, sglang-dflash/tiny)",
    )
    parser.add_argument("--seed", type=int, default=0, help="what the models are drawn from (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="make the pair again even if it is there")


def run(args: argparse.Namespace) -> int:
    """Make the pairs and print their folders. Raises `UserError` for bad input."""
    from server_ext.tiny.build import ensure  # imports torch

    for name in args.pairs:
        recipe_named(name)
    for name in args.pairs:
        pair = ensure(
            name,
            seed=args.seed,
            output=args.output,
            force=args.force,
            progress=lambda line: print(line, flush=True),
        )
        print(f"target: {pair.target}\ndraft: {pair.draft}", flush=True)
    return 0
