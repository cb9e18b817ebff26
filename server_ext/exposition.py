"""Lets ``/metrics`` answer every scraper in the same format, with the same names.

Asked for OpenMetrics, as every Prometheus before 3.0 asks, `prometheus_client` writes ``sglang_num_running_reqs`` for
``sglang:num_running_reqs``: a query, a dashboard or an alert would be right with one scraper and empty with another.
"""

from typing import Any

from server_ext.hooks import Hook
from server_ext.openai_api import AsgiApp, Message, Send


def _in_plain_text(metrics: AsgiApp) -> AsgiApp:
    """Hide from `metrics` which formats are asked for, so that it answers in Prometheus' own text format."""

    async def answer(scope: Message, receive: Any, send: Send) -> None:
        headers = [(name, value) for name, value in scope["headers"] if name != b"accept"]
        await metrics({**scope, "headers": headers}, receive, send)

    return answer


def _after_mount(_: None, app: Any) -> None:
    route = app.routes[-1]  # the one that SGLang has just added
    route.app = _in_plain_text(route.app)


HOOKS = (Hook("sglang.srt.utils.common.add_prometheus_middleware", _after_mount, "after"),)
"""Hooks of the process that answers HTTP."""
