"""What `helm test` asks a server: its models, a completion, a stream and its metrics. Needs Python alone."""

import argparse
import json
import urllib.error
import urllib.request
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("url")
parser.add_argument("--timeout-seconds", type=float, default=120)
parser.add_argument("--api-key-file")
options = parser.parse_args()
key = Path(options.api_key_file).read_text().strip() if options.api_key_file else None


def ask(path, body=None):
    """Return the text of an answer; a body is posted."""
    request = urllib.request.Request(options.url + path, data=json.dumps(body).encode() if body else None)
    request.add_header("Content-Type", "application/json")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=options.timeout_seconds) as response:
            return response.read().decode()
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{path}: {error} {error.read().decode(errors='replace')}") from error
    except OSError as error:
        raise SystemExit(f"{options.url}{path}: {error}") from error


def check(passed, name, seen):
    """Print what was seen, or end with it."""
    if not passed:
        raise SystemExit(f"{name}: {seen}")
    print(f"{name}: {seen}")


model = json.loads(ask("/v1/models"))["data"][0]["id"]
check(model, "models", model)

chat = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
answer = json.loads(ask("/v1/chat/completions", chat))
check(answer["usage"]["completion_tokens"] > 0, "completion", answer["usage"])

lines = [line[6:] for line in ask("/v1/chat/completions", chat | {"stream": True}).splitlines() if line]
check(len(lines) > 2 and lines[-1] == "[DONE]", "stream", f"{len(lines)} events, the last {lines[-1:]}")

running = [line for line in ask("/metrics").splitlines() if line.startswith("sglang:num_running_reqs{")]
check(running, "metrics", running)
