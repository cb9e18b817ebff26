"""Training sequences: texts of the corpus, told apart into what a model must learn and what it only reads."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from server_ext.tiny import chat, corpus

Segment = tuple[str, bool]
"""A stretch of text, and whether its tokens follow from what stands before them."""

_SEGMENTS = 2000


def _count(rng: random.Random, most: int) -> int:
    """A number from 1 to `most`, small ones more often."""
    return int(most ** rng.random() + 0.5)


def plain(rng: random.Random) -> Iterator[Segment]:
    """An endless plain text: stretches of diaries, each of which starts anew in a way that cannot be foreseen."""
    hero = ""
    while True:
        kind = rng.choices(("noise", "named", "unnamed"), weights=(15, 70, 15 if hero else 0))[0]
        gap = " " if hero else ""
        wheels, length = corpus.random_wheels(rng), _count(rng, 30)
        if kind == "noise":
            yield corpus.noise(rng, _count(rng, 120)), False
            hero, wheels = corpus.FIRST_HERO, corpus.FIRST_WHEELS
            sentences = corpus.diary(hero, wheels)
            yield "\n" + next(sentences), True
        else:
            if kind == "named":
                # A Sunday is within reach, however short the stretch: the writer's name is the hardest word to learn.
                hero = rng.choice(corpus.HEROES)
                sunday = len(corpus.DAYS) - 1
                wheels = replace(wheels, day=sunday - rng.randint(1, min(sunday, length)))
            sentences = corpus.diary(hero, wheels)
            head = next(sentences)
            seen = list(itertools.islice(sentences, 2 if corpus.DAYS[wheels.day] == "Sunday" else 1))
            yield gap + " ".join([head, *seen] if kind == "named" else seen), False
        for sentence in itertools.islice(sentences, length):
            yield f" {sentence}", True


def conversation(rng: random.Random) -> Iterator[Segment]:
    """An endless conversation: some questions follow from the one before, the others cannot be foreseen."""
    if rng.random() < 0.4:
        text = rng.choice(("You are a helpful assistant.", corpus.noise(rng, _count(rng, 20))))
        yield chat.render([chat.system(text)]), False
    while True:
        for turn, (question, answer) in enumerate(corpus.topic(rng, _count(rng, 4))):
            yield f"{chat.IM_START}user\n", True
            yield question, turn > 0
            yield f"{chat.IM_END}\n{chat.IM_START}assistant\n", turn > 0
            yield f"{answer}{chat.IM_END}\n", True


def documents(rng: random.Random) -> Iterator[Iterator[Segment]]:
    """Endless documents of all kinds, each long enough for any training length and made as it is read."""
    while True:
        kind = rng.choices((plain, conversation), weights=(45, 55))[0]
        yield itertools.islice(kind(rng), _SEGMENTS)


def texts(rng: random.Random, count: int, length: int = 2000) -> Iterator[str]:
    """`count` documents as plain text, each cut at the segment that makes it `length` characters long."""
    for document in itertools.islice(documents(rng), count):
        text = ""
        while len(text) < length:
            text += next(document)[0]
        yield text


def batch(
    source: Iterator[Iterator[Segment]], tokenizer: PreTrainedTokenizerFast, sequences: int, tokens: int
) -> tuple[Tensor, Tensor]:
    """Token ids and labels, both [sequences, tokens]; each sequence is the beginning of one document.

    Labels are the ids of the next position, -100 where there is nothing to learn.
    """
    ids = torch.empty(sequences, tokens + 1, dtype=torch.int64)
    learned = torch.empty(sequences, tokens + 1, dtype=torch.bool)
    for row in range(sequences):
        flat: list[tuple[int, bool]] = []
        for text, learn in next(source):
            flat += [(token, learn) for token in tokenizer(text)["input_ids"]]
            if len(flat) > tokens:
                break
        ids[row] = torch.tensor([token for token, _ in flat[: tokens + 1]])
        learned[row] = torch.tensor([learn for _, learn in flat[: tokens + 1]])
    return ids[:, :-1], torch.where(learned, ids, -100)[:, 1:]
