"""Linear-attention hybrid targets on the real engine: text, and states that are reused, evicted, dropped and rebuilt.

Every engine runs with SGLang's strict memory checks, and every text is compared with Hugging Face's.
"""

import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from reference import MAX_NEAR_TIE_SHARE, Agreement, Reference
from scripted import Answer, Engine, EngineProcess, Engines, Script
from server_ext.tiny import documents
from server_ext.tiny.build import TinyPair, ensure

# SGLang keeps states on these grids: while it prefills (the rule's chunk) and while it decodes (the tracking interval).
PREFILL_GRID_TOKENS, DECODE_GRID_TOKENS = 64, 256
STATES = 64
# A hidden value that rounds to the other bfloat16 neighbour moves a state by thousandths.
STATE_TOLERANCE = 0.02
STRATEGIES = {
    "extra_buffer, page 1": {"mamba_radix_cache_strategy": "extra_buffer", "page_size": 1},
    "extra_buffer, page 64": {"mamba_radix_cache_strategy": "extra_buffer", "page_size": 64},
    "no_buffer": {"mamba_radix_cache_strategy": "no_buffer", "page_size": 1, "disable_overlap_schedule": True},
}

Asked = list[tuple[list[int], Answer]]
"""Prompts and their answers."""


@dataclass(frozen=True)
class Setup:
    """An engine and what it was started with."""

    engine: EngineProcess
    strategy: str
    speculative: bool

    @property
    def keeps_states_of_prefixes(self) -> bool:
        """Whether the prefix cache has states inside a prompt or answer, not only at its end."""
        return self.strategy != "no_buffer"


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    shared = Engines()
    yield shared
    shared.close()


@pytest.fixture(scope="module", params=[True, False], ids=["dflash", "plain"])
def speculative(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(scope="module", params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def setup(engines: Engines, strategy: str, speculative: bool) -> Setup:
    options = {"pair": "gdn", "max_mamba_cache_size": STATES, **STRATEGIES[strategy]}
    return Setup(engines.get(speculative=speculative, **options), strategy, speculative)


@pytest.fixture(scope="module")
def pair() -> TinyPair:
    return ensure("gdn")


@pytest.fixture(scope="module")
def reference(pair: TinyPair) -> Reference:
    return Reference(pair.target)


@pytest.fixture(scope="module")
def texts(pair: TinyPair) -> list[list[int]]:
    """Token ids of texts like those the pair was trained on, each of at least 1,200 tokens and unlike the others."""
    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    found = [tokenizer(text)["input_ids"] for text in documents.texts(random.Random(7), 16, length=9000)]
    return [ids for ids in found if len(ids) >= 1200]


def assert_text(reference: Reference, asked: Asked) -> None:
    """Every answer to its prompt is Hugging Face's, but for near ties."""
    agreement = Agreement(0, 0)
    for prompt, answer in asked:
        agreement += reference.compare(prompt, answer.token_ids)
    assert agreement.near_ties <= max(1, MAX_NEAR_TIE_SHARE * agreement.tokens), agreement


def ask(engine: Engine, *prompts: list[int], tokens: int) -> Script[list[Answer]]:
    """Send prompts at once and wait for all answers."""
    names = [f"{len(engine.answers)}-{i}" for i in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        engine.submit(name, prompt, max_new_tokens=tokens)
    yield from engine.until_idle()
    return [engine.answers[name] for name in names]


def ends_of_an_answer(prompt_tokens: int, written_tokens: int, speculative: bool) -> set[int]:
    """Where the one state of a finished request may stand when there are none inside its answer.

    A decode step leaves out the token that it has just written. A verify step may have seen that token in its block; if
    it accepted more than was asked for, its state is of no use, and the one at the prompt's end remains.
    """
    return {written_tokens - 1} | ({written_tokens, prompt_tokens} if speculative else set())


def conversation(engine: Engine, first: list[int], turn: list[int]) -> Script[Asked]:
    """A prompt of many windows, a turn that continues its answer, and the prompt again."""
    yield from engine.flush()
    (cold,) = yield from ask(engine, first, tokens=300)
    continued = first + cold.token_ids + turn
    (next_turn,) = yield from ask(engine, continued, tokens=64)
    (again,) = yield from ask(engine, first, tokens=32)
    return [(first, cold), (continued, next_turn), (first, again)]


def test_text_after_reused_states(reference: Reference, texts: list[list[int]], setup: Setup) -> None:
    """The prompt spans 17 windows and five prefill chunks; what is reused is what the strategy keeps."""
    first = texts[0][:1100]
    asked = setup.engine.run(conversation, first, texts[1][:20])
    assert_text(reference, asked)
    cold, next_turn, again = (answer for _, answer in asked)
    written = len(first) + len(cold.token_ids)
    assert cold.cached_tokens == 0
    if setup.keeps_states_of_prefixes:
        assert again.cached_tokens == len(first) // PREFILL_GRID_TOKENS * PREFILL_GRID_TOKENS
        assert next_turn.cached_tokens == written // DECODE_GRID_TOKENS * DECODE_GRID_TOKENS
    else:
        assert again.cached_tokens == 1024, "the end of the last whole chunk"
        assert next_turn.cached_tokens in ends_of_an_answer(len(first), written, setup.speculative)
    if setup.speculative:
        assert cold.accept_length >= 2


def kept_state(engine: Engine, tokens: list[int]) -> tuple[int, np.ndarray, list[np.ndarray]]:
    """Return the deepest state the prefix cache keeps for these tokens.

    That is how many of them it stands for, the recurrent states, ``[layers, heads, V, K]``, and the inputs that each
    convolution still needs, ``[layers, channels, width - 1]``.
    """
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_cache.components.base import ComponentType

    cache = engine.scheduler.tree_cache
    match = cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))
    slot = cache.tree_core.get_component_device_value(match.best_match_node, ComponentType.MAMBA)
    pool = engine.scheduler.req_to_token_pool.mamba_pool.mamba_cache
    return (
        match.device_prefix_len,
        pool.temporal[:, slot[0]].float().numpy(),
        [conv[:, slot[0]].float().numpy() for conv in pool.conv],
    )


def states_of_a_conversation(engine: Engine, first: list[int]) -> Script[list[tuple[list[int], Any]]]:
    """What is kept of a long prompt, and of its answer."""
    yield from engine.flush()
    (answer,) = yield from ask(engine, first, tokens=300)
    return [(tokens, kept_state(engine, tokens)) for tokens in (first, first + answer.token_ids)]


def test_kept_states_equal_hugging_face(reference: Reference, texts: list[list[int]], setup: Setup) -> None:
    """Text alone would not tell: a tiny model may get along with a wrong state for a while."""
    kept = setup.engine.run(states_of_a_conversation, texts[0][:1100])
    lengths = [length for _, (length, _, _) in kept]
    if setup.keeps_states_of_prefixes:
        assert lengths == [1088, 1280]
    else:
        assert lengths[0] == 1100
        assert lengths[1] in ends_of_an_answer(1100, 1400, setup.speculative)
    for tokens, (length, recurrent, (convolved,)) in kept:
        expected_recurrent, expected_convolved = reference_states(reference, tokens[:length])
        assert distance(recurrent, expected_recurrent) < STATE_TOLERANCE, length
        assert distance(convolved, expected_convolved[..., -convolved.shape[-1] :]) < STATE_TOLERANCE, length


def reference_states(reference: Reference, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return Hugging Face's states after these tokens, shaped like SGLang's; its convolution keeps more inputs."""
    with torch.inference_mode():
        cache = reference.model(torch.tensor([tokens]), use_cache=True).past_key_values
    linear = [layer for layer in cache.layers if hasattr(layer, "recurrent_states")]
    recurrent = [layer.recurrent_states[0][0].transpose(-1, -2).float().numpy() for layer in linear]
    return np.stack(recurrent), np.stack([layer.conv_states[0][0].float().numpy() for layer in linear])


def distance(own: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest distance of a layer's state from the expected one, relative to the latter's size."""
    size = np.linalg.norm(expected.reshape(len(expected), -1), axis=1)
    return float((np.linalg.norm((own - expected).reshape(len(expected), -1), axis=1) / size).max())


def branches(engine: Engine, stem: list[int], tails: list[list[int]]) -> Script[Asked]:
    """Prompts with one beginning, one after the other."""
    yield from engine.flush()
    asked = []
    for tail in tails:
        (answer,) = yield from ask(engine, stem + tail, tokens=24)
        asked.append((stem + tail, answer))
    return asked


def test_text_of_branches_from_a_shared_beginning(reference: Reference, texts: list[list[int]], setup: Setup) -> None:
    """The second branch finds the first one's tokens but no state among them; it leaves one for the third."""
    stem = texts[0][:245]
    asked = setup.engine.run(branches, stem, [text[:80] for text in texts[1:4]])
    assert_text(reference, asked)
    kept = len(stem) // PREFILL_GRID_TOKENS * PREFILL_GRID_TOKENS if setup.keeps_states_of_prefixes else 0
    assert [answer.cached_tokens for _, answer in asked] == [0, 0, kept]


def crowd(engine: Engine, prompts: list[list[int]], turn: list[int]) -> Script[Asked]:
    """Requests at once, and each then continued at once."""
    yield from engine.flush()
    first = yield from ask(engine, *prompts, tokens=120)
    continued = [prompt + answer.token_ids + turn for prompt, answer in zip(prompts, first, strict=True)]
    second = yield from ask(engine, *continued, tokens=48)
    return list(zip([*prompts, *continued], [*first, *second], strict=True))


def test_text_of_requests_at_once(reference: Reference, texts: list[list[int]], setup: Setup) -> None:
    prompts = [text[:length] for text, length in zip(texts[:4], (3, 90, 300, 700), strict=True)]
    asked = setup.engine.run(crowd, prompts, texts[4][:9])
    assert len(asked) == 8
    assert_text(reference, asked)


def states(engine: Engine) -> tuple[int, int]:
    """How many states running requests hold and how many the prefix cache keeps."""
    stats = engine.scheduler.pool_stats_observer.get_pool_stats()
    return stats.mamba_num_used, stats.mamba_evictable_size


def dropped(engine: Engine, prompts: list[list[int]]) -> Script[dict[str, tuple[int, int]]]:
    """Abort one request while it decodes and one between two chunks of its prompt, then empty the cache."""
    yield from engine.flush()
    seen = {"before": states(engine)}
    engine.submit("decoding", prompts[0], max_new_tokens=400)
    yield from engine.until(lambda: any(len(request.output_ids) > 40 for request in engine.running()))
    engine.submit("prefilling", prompts[1], max_new_tokens=8)
    yield from engine.until(lambda: engine.scheduler.chunked_req is not None)
    yield
    seen["running"] = states(engine)
    engine.abort("decoding")
    engine.abort("prefilling")
    yield from engine.until_idle()
    seen["aborted"] = states(engine)
    yield from engine.flush()
    seen["flushed"] = states(engine)
    return seen


def test_states_come_back_from_dropped_requests(texts: list[list[int]], setup: Setup) -> None:
    seen = setup.engine.run(dropped, [texts[0][:100], texts[1][:1100]])
    assert seen["before"] == seen["flushed"] == (0, 0)
    assert seen["running"][0] >= 2, "each running request holds a state"
    assert seen["aborted"][0] == 0


def retracted(engine: Engine, prompts: list[list[int]]) -> Script[Asked]:
    """Requests at once, with a retraction every 20 steps as under SGLANG_TEST_RETRACT."""
    from sglang.srt.managers import scheduler

    yield from engine.flush()
    # The process that engines are forked from has read the variable already.
    scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL = True, 20
    try:
        answers = yield from ask(engine, *prompts, tokens=200)
    finally:
        scheduler.TEST_RETRACT = False
    return list(zip(prompts, answers, strict=True))


def test_text_of_retracted_requests(reference: Reference, texts: list[list[int]], setup: Setup) -> None:
    """A retracted request loses its state and gets it back from the cache and by prefilling what it had written."""
    asked = setup.engine.run(retracted, [text[:length] for text, length in zip(texts, (200, 330), strict=False)])
    assert sum(answer.retractions for _, answer in asked) > 0
    assert_text(reference, asked)


def pressure(engine: Engine, prompts: list[list[int]]) -> Script[tuple[Asked, list[tuple[int, int]]]]:
    """Prompts one after the other, then the last and the first again, and the states after each."""
    asked, seen = [], []
    for prompt in [*prompts, prompts[-1], prompts[0]]:
        (answer,) = yield from ask(engine, prompt, tokens=16)
        asked.append((prompt, answer))
        seen.append(states(engine))
    return asked, seen


@pytest.mark.parametrize("strategy", ["extra_buffer, page 1", "extra_buffer, page 64"])
def test_text_when_states_are_evicted(
    reference: Reference, texts: list[list[int]], engines: Engines, strategy: str
) -> None:
    """Ten prompts pass through a pool of eight states."""
    prompts = [text[start : start + 200] for text in texts[:5] for start in (0, 300)]
    options = {"max_mamba_cache_size": 8, "max_running_requests": 1, **STRATEGIES[strategy]}
    asked, seen = engines.get(pair="gdn", **options).run(pressure, prompts)
    assert_text(reference, asked)
    held, kept = zip(*seen, strict=True)
    assert set(held) == {0}, "a finished request holds a state"
    assert max(kept) <= 8
    *_, last_again, first_again = (answer for _, answer in asked)
    assert last_again.cached_tokens == 192, "the newest state went first"
    assert first_again.cached_tokens == 0, "a state outlived its eviction"
