"""Requests that keep a service busy, and what became of each."""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import openai

KEY = "the-key"
# No answer has a pause that long, even beside an engine that starts on the same two cores.
HUNG_SECONDS = 90.0


def client(url: str, key: str = KEY) -> openai.OpenAI:
    """Return OpenAI's client, without retries so that each error shows."""
    timeout = httpx.Timeout(HUNG_SECONDS, connect=5)
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=timeout)


@dataclass(frozen=True)
class Outcome:
    """How a request ended, and when (Unix time).

    `kind` is ``finished``, ``refused`` (before any of it was answered), ``broken`` (in its middle) or ``hung``.
    """

    kind: str
    ended: float
    detail: str = ""


def stream(url: str, tokens: int) -> Outcome:
    """Ask for a chat answer of so many tokens and read it to its end."""
    accepted, finished = False, False
    try:
        # A new connection each time: one that is kept would stay with the pod of the last answer.
        with client(url) as asking:
            for chunk in asking.chat.completions.create(
                model="qwen3",
                messages=[{"role": "user", "content": "Tell me of the river"}],
                max_tokens=tokens,
                stream=True,
                extra_body={"ignore_eos": True},
            ):
                accepted = True
                finished = finished or any(choice.finish_reason == "length" for choice in chunk.choices)
    except openai.APITimeoutError as error:
        # A connection that does not come about was not accepted.
        hung = not isinstance(error.__cause__, httpx.ConnectTimeout)
        return Outcome("hung" if hung else "refused", time.time(), repr(error.__cause__))
    except httpx.ReadTimeout as error:
        return Outcome("hung", time.time(), repr(error))
    except (openai.OpenAIError, httpx.HTTPError) as error:
        return Outcome("broken" if accepted else "refused", time.time(), repr(error))
    return Outcome("finished" if finished else "broken", time.time())


class Load:
    """Streams, one after the other on each of several threads. Make it in the cluster's network."""

    def __init__(self, url: str, threads: int, tokens: int) -> None:
        self.outcomes: list[Outcome] = []
        self._url, self._tokens = url, tokens
        self._done = threading.Event()
        self._threads = [threading.Thread(target=self._work) for _ in range(threads)]

    def _work(self) -> None:
        while not self._done.is_set():
            outcome = stream(self._url, self._tokens)
            self.outcomes.append(outcome)
            if outcome.kind == "refused":
                time.sleep(0.2)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Keep the load up inside; at the end the requests that run are waited for."""
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._done.set()
            for thread in self._threads:
                thread.join()

    def kinds(self) -> Counter[str]:
        """Return how many requests ended in each way."""
        return Counter(outcome.kind for outcome in self.outcomes)
