"""``sglang-dflash status URL``: the pools of a running server as a small table, refreshed while a terminal shows it."""

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import requests
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from server_ext import keys
from server_ext.errors import UserError

TIMEOUT_SECONDS = 15.0
WARN_RATIO, ALARM_RATIO = 0.75, 0.9

Answer = Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``status``."""
    parser.add_argument("url", metavar="URL", help="where the server is, such as http://127.0.0.1:30000")
    parser.add_argument("--json", action="store_true", help="print one snapshot as JSON")
    parser.add_argument(
        "--interval-seconds", type=float, default=2.0, metavar="SECONDS", help="between two refreshes; default: 2"
    )
    parser.add_argument(
        keys.API_KEY.file_option,
        metavar="FILE",
        help=f"read the server's API key from FILE; the environment variable {keys.API_KEY.variable} works too",
    )


def run(args: argparse.Namespace) -> int:
    """Print the pools, once or until interrupted; return 0. Raises `UserError` if the server does not give them."""
    if not args.interval_seconds > 0:
        raise UserError(f"--interval-seconds {args.interval_seconds:g} must be greater than 0")
    server = _Server(args.url, keys.load({keys.API_KEY.field: args.api_key_file}, dict(os.environ)))
    config, pools = server.get("/pools/config"), server.get("/pools")
    if args.json:
        print(json.dumps({"config": config, "pools": pools}, indent=2))
        return 0
    console = Console()
    if not console.is_terminal:
        console.print(render(config, pools))
        return 0
    with Live(render(config, pools), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(args.interval_seconds)
            live.update(render(config, server.get("/pools")), refresh=True)


class _Server:
    """A server to ask for its pools."""

    def __init__(self, url: str, server_keys: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"{url} is not the URL of a server; expected something like http://127.0.0.1:30000")
        self._url = url.rstrip("/")
        self._session = requests.Session()
        if key := server_keys.get(keys.API_KEY.field):
            self._session.headers["Authorization"] = f"Bearer {key}"

    def get(self, path: str) -> Answer:
        """Return the JSON object at `path`."""
        url = self._url + path
        try:
            response = self._session.get(url, timeout=TIMEOUT_SECONDS)
        except requests.Timeout:
            raise UserError(f"{url}: no answer within {TIMEOUT_SECONDS:g} seconds") from None
        except requests.RequestException as error:
            raise UserError(f"{url}: cannot connect ({type(error).__name__}); is the server running there?") from None
        if response.status_code == 401:
            way_out = f"give {keys.API_KEY.file_option} FILE or set {keys.API_KEY.variable}"
            raise UserError(f"{url}: the key is missing or wrong; {way_out}")
        if response.status_code == 404:
            raise UserError(f"{url}: not found; the server there was not started with `sglang-dflash serve`")
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise UserError(f"{url}: answered {response.status_code} and no JSON object; is this the right server?")
        if response.status_code != 200:
            raise UserError(f"{url}: answered {response.status_code}: {answer['error']['message']}")
        return answer


def render(config: Answer, pools: Answer) -> RenderableType:
    """Return the table of every scheduler in answers of ``/pools/config`` and ``/pools``."""
    configs = {scheduler["dp_rank"]: scheduler for scheduler in config["schedulers"]}
    found: list[RenderableType] = []
    for scheduler in pools["schedulers"]:
        found += [_headline(configs[scheduler["dp_rank"]], scheduler), _table(scheduler)]
    return Group(*found)


def _headline(config: Answer, scheduler: Answer) -> Text:
    parts = [f"SGLang {config['sglang_version']}"]
    if config["speculative_algorithm"] is not None:
        parts.append(f"{config['speculative_algorithm']} block {config['block_size_tokens']}")
    if config["draft_window_tokens"] is not None:
        parts.append(f"window {config['draft_window_tokens']}")
    if config["draft_kv_ratio"] is not None:
        parts.append(f"ratio {config['draft_kv_ratio']:g}")
    parts.append(f"page {config['page_size_tokens']}")
    parts.append(f"running {scheduler['running_requests']} of {config['max_running_requests']}")
    parts.append(f"waiting {scheduler['waiting_requests']}")
    speculation = scheduler["speculation"]
    if speculation and speculation["verify_steps_total"]:
        parts.append(f"accept length {speculation['accepted_tokens_total'] / speculation['verify_steps_total']:.2f}")
    if scheduler["dp_rank"] or config["dp_rank"]:
        parts.insert(0, f"rank {scheduler['dp_rank']}")
    return Text(" · ".join(parts), style="bold")


def _table(scheduler: Answer) -> Table:
    """One column for each pool, one row for each figure; what does not apply to a pool stays empty."""
    pools = scheduler["pools"]
    retractions = {entry["cause"]: entry for entry in scheduler["retractions"]}
    retracted = [retractions.get(pool["name"], {}) for pool in pools]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("slots", style="dim")
    for pool in pools:
        table.add_column(pool["name"], justify="right", min_width=16)
    table.add_row("used", *map(_used, pools))
    for title, name in (
        ("most used", "high_water_slots"),
        ("evictable", "evictable_slots"),
        ("free", "free_slots"),
        ("size", "size_slots"),
    ):
        table.add_row(title, *_figures(pools, name))
    table.add_row("largest request", *map(_held, pools))
    for title, name in (
        ("evicted", "evicted_slots_total"),
        ("left the window", "window_freed_slots_total"),
        ("prefix tokens lost", "prefix_lost_tokens_total"),
        ("requests delayed", "delayed_admissions_total"),
    ):
        table.add_row(title, *_figures(pools, name))
    table.add_row("requests retracted", *_figures(retracted, "requests_total", style="yellow"))
    table.add_row("requests aborted", *_figures(retracted, "aborted_requests_total", style="red"))
    return table


def _figures(answers: Sequence[Answer], name: str, style: str = "") -> list[Text]:
    """Return each answer's value as text, in `style` where it is not zero."""
    values = [answer.get(name) for answer in answers]
    return [Text("" if value is None else f"{value:,}", style=style if value else "") for value in values]


def _used(pool: Answer) -> Text:
    ratio = pool["used_slots"] / pool["size_slots"]
    style = "red" if ratio >= ALARM_RATIO else "yellow" if ratio >= WARN_RATIO else "green"
    return Text(f"{pool['used_slots']:,} ({ratio:.0%})", style=style)


def _held(pool: Answer) -> Text:
    if pool["held_max_slots"] is None:
        return Text("")
    over = pool["held_max_slots"] > pool["held_bound_slots"]
    return Text(f"{pool['held_max_slots']:,} of {pool['held_bound_slots']:,}", style="red" if over else "")
