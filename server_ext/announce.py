"""What a person reads when the server is ready."""

import shlex

_PROMPT = "Hello"


def ready_text(url: str, model: str, *, key: str | None, metrics: bool, seconds: float) -> str:
    """Return the commands to try against a server at `url`, which took `seconds` to start.

    `key` is the shell expression that gives the server's key, when it has one.
    """
    body = f'{{"model": "{model}", "max_tokens": 64, "messages": [{{"role": "user", "content": "{_PROMPT}"}}]}}'
    header = f' -H "Authorization: Bearer {key}"' if key else ""
    lines = [
        f"Ready after {seconds:.0f} s: {model} at {url}",
        f"  chat     curl {url}/v1/chat/completions{header} -H 'Content-Type: application/json' -d {shlex.quote(body)}",
    ]
    if metrics:
        lines.append(f"  metrics  curl {url}/metrics")
    lines.append("  stop     Ctrl-C finishes running requests first; a second one stops at once")
    return "\n" + "\n".join(lines) + "\n"
