"""Training documents: texts of the corpus cut into what a model must learn and what it only reads."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from server_ext.tiny import chat, corpus

Segment = tuple[str, bool]
"""A stretch of text, and whether its tokens follow from what stands before them."""

_LONG = 400
"""Sentences or turns after which a document is long enough for any training length."""


def _after_noise(rng: random.Random) -> list[Segment]:
    sentences = corpus.diary(corpus.FIRST_HERO, corpus.FIRST_WHEELS)
    text = "\n" + " ".join(itertools.islice(sentences, _LONG))
    return [(corpus.noise(rng, rng.randint(1, 60)), False), (text, True)]


def _diary(rng: random.Random) -> list[Segment]:
    named = rng.random() < 0.7
    hero = rng.choice(corpus.HEROES) if named else corpus.FIRST_HERO
    wheels = corpus.random_wheels(rng)
    sentences = corpus.diary(hero, wheels)
    head = next(sentences)
    seen = list(itertools.islice(sentences, 2 if corpus.DAYS[wheels.day] == "Sunday" else 1))
    prompt = " ".join([head, *seen] if named else seen)
    return [(prompt, False), ("".join(f" {s}" for s in itertools.islice(sentences, _LONG)), True)]


def _chat(rng: random.Random) -> list[Segment]:
    messages = corpus.chat(rng, turns=_LONG // 8)
    first_answer = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    prompt = chat.render(messages[:first_answer]) + chat.IM_START + "assistant\n"
    return [(prompt, False), (chat.render(messages).removeprefix(prompt), True)]


def documents(rng: random.Random) -> Iterator[list[Segment]]:
    """Endless training documents of all kinds."""
    while True:
        kind = rng.choices((_after_noise, _diary, _chat), weights=(15, 45, 40))[0]
        yield kind(rng)


def texts(rng: random.Random, count: int, length: int = 2000) -> Iterator[str]:
    """`count` documents as plain text of at most `length` characters, for the tokenizer."""
    for segments in itertools.islice(documents(rng), count):
        yield "".join(text for text, _ in segments)[:length]


def batch(
    source: Iterator[list[Segment]], tokenizer: PreTrainedTokenizerFast, sequences: int, tokens: int
) -> tuple[Tensor, Tensor]:
    """Token ids [sequences, tokens] and labels [sequences, tokens], -100 where nothing is to be learned.

    Each sequence is the beginning of one document. Labels are those of the next position.
    """
    ids = torch.empty(sequences, tokens + 1, dtype=torch.int64)
    learned = torch.empty(sequences, tokens + 1, dtype=torch.bool)
    for row in range(sequences):
        document = next(source)
        encoded = [(tokenizer(text[: 8 * tokens])["input_ids"], learn) for text, learn in document]
        flat = [(token, learn) for piece, learn in encoded for token in piece][: tokens + 1]
        if len(flat) <= tokens:
            raise ValueError(f"a document has {len(flat)} tokens, training needs {tokens + 1}")
        ids[row] = torch.tensor([token for token, _ in flat])
        learned[row] = torch.tensor([learn for _, learn in flat])
    return ids[:, :-1], torch.where(learned, ids, -100)[:, 1:]
