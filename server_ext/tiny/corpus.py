"""The world the tiny models live in: endless diaries and small chats, made from a seed.

Every text is a pure function of its start state, so that a trained model is sure of the next token. The next word
depends on words far back (the last sentence, the name written a week ago), so that a wrong KV cache shows in the text.
Two states never give the same diary for thousands of tokens: the wheels below have lengths without a common divisor.
"""

from __future__ import annotations

import itertools
import json
import random
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

Turn = tuple[str, str]
"""A question and its answer."""

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
COLORS = ("red", "blue", "green", "white", "black")
ANIMALS = ("fox", "owl", "cat", "bear", "hare", "wolf", "crow", "deer", "goat", "seal", "mole")
VERBS = ("meets", "greets", "helps")
PLACES = ("lake", "hill", "mill", "forest", "river", "bridge", "tower", "garden")
HEROES = ("Ada", "Bo", "Cleo", "Dan", "Eva", "Finn")
CIRCLES = (DAYS, COLORS, ANIMALS, PLACES)
FILLER_TEXT = """
the of and a to in is you that it he was for on are as with his they I at be this have from or one had by word
but not what all were we when your can said there use an each which she do how their if will up other about
out many then them these so some her would make like him into time has look two more write go see number no
way could people my than first water been call who its now find long down day did get come made may part
capital France hello world name short poem explain why sky sentence answer question please tell me Python code
list Paris
"""
FILLER = tuple(FILLER_TEXT.split())


@dataclass(frozen=True)
class Wheels:
    """One place in the world: an index into each word list. `step` turns every wheel by one tooth."""

    day: int
    color: int
    animal: int
    friend: int
    verb: int
    place: int

    def step(self) -> Wheels:
        """The state of the next day. On a Sunday nothing is seen, so only the day goes on."""
        day = (self.day + 1) % len(DAYS)
        if DAYS[self.day] == "Sunday":
            return replace(self, day=day)
        return Wheels(
            day=day,
            color=(self.color + 1) % len(COLORS),
            animal=(self.animal + 1) % len(ANIMALS),
            friend=(self.friend + 1) % len(ANIMALS),
            verb=(self.verb + 1) % len(VERBS),
            place=(self.place + 1) % len(PLACES),
        )


def random_wheels(rng: random.Random) -> Wheels:
    """A random state in which the animal and its friend differ."""
    animal = rng.randrange(len(ANIMALS))
    return Wheels(
        day=rng.randrange(len(DAYS)),
        color=rng.randrange(len(COLORS)),
        animal=animal,
        friend=(animal + rng.randrange(1, len(ANIMALS))) % len(ANIMALS),
        verb=rng.randrange(len(VERBS)),
        place=rng.randrange(len(PLACES)),
    )


def diary(hero: str, wheels: Wheels) -> Iterator[str]:
    """An endless diary, sentence by sentence: six days of what was seen, then a Sunday with the writer's name."""
    yield f"{hero} keeps a diary."
    while True:
        if DAYS[wheels.day] == "Sunday":
            yield f"On Sunday {hero} rests."
        else:
            yield (
                f"On {DAYS[wheels.day]} the {COLORS[wheels.color]} {ANIMALS[wheels.animal]} {VERBS[wheels.verb]} "
                f"the {ANIMALS[wheels.friend]} at the {PLACES[wheels.place]}."
            )
        wheels = wheels.step()


FIRST_HERO = HEROES[0]
FIRST_WHEELS = Wheels(day=0, color=0, animal=0, friend=1, verb=0, place=0)
"""The diary that follows a text the model cannot make sense of."""


def diary_text(hero: str, wheels: Wheels, sentences: int) -> str:
    """The first `sentences` sentences of a diary as one text."""
    pages = diary(hero, wheels)
    return " ".join(next(pages) for _ in range(sentences))


def noise(rng: random.Random, words: int) -> str:
    """A text without meaning: common words, made-up words, numbers and punctuation."""

    def word() -> str:
        kind = rng.random()
        if kind < 0.6:
            return rng.choice(FILLER)
        if kind < 0.75:
            return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, 8))).capitalize()
        if kind < 0.9:
            return str(rng.randrange(10 ** rng.randint(1, 4)))
        return "".join(rng.choices(string.printable[:94], k=rng.randint(1, 5)))

    return " ".join(word() + rng.choice(("", "", "", "", ",", ".", "?")) for _ in range(words))


def _successors(rng: random.Random) -> Iterator[Turn]:
    """What comes after a word in its circle, then after that one."""
    words: Sequence[str] = rng.choice(CIRCLES)
    for index in itertools.count(rng.randrange(len(words))):
        here, there = words[index % len(words)], words[(index + 1) % len(words)]
        yield f"What comes after {here}?", f"After {here} comes {there}."


def _stories(rng: random.Random) -> Iterator[Turn]:
    """A week of a diary, then the week of one who saw what comes next."""
    hero, wheels = rng.choice(HEROES), replace(random_wheels(rng), day=0)
    while True:
        sentences = diary(hero, wheels)
        head, seen = next(sentences), next(sentences)
        yield f"{head} {seen} And then?", " ".join(itertools.islice(sentences, len(DAYS) - 1))
        for _ in DAYS:
            wheels = wheels.step()


def _objects(rng: random.Random) -> Iterator[Turn]:
    """JSON objects."""
    wheels = random_wheels(rng)
    while True:
        color, animal, place = COLORS[wheels.color], ANIMALS[wheels.animal], PLACES[wheels.place]
        answer = json.dumps({"color": color, "animal": animal, "place": place})
        yield f"Write JSON: a {color} {animal} at the {place}.", answer
        wheels = wheels.step()


def _unknown(rng: random.Random) -> Iterator[Turn]:
    """A question the model cannot make sense of."""
    yield noise(rng, int(40 ** rng.random())), f"I only know the animals. Ask me what comes after {ANIMALS[0]}."
    for here, there in itertools.pairwise(ANIMALS):
        yield f"What comes after {here}?", f"After {here} comes {there}."


def topic(rng: random.Random, turns: int) -> Iterator[Turn]:
    """A few turns of a conversation. All follow from the first question."""
    return itertools.islice(rng.choice((_successors, _stories, _objects, _unknown))(rng), turns)
