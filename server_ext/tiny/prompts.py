"""Prompts that a tiny pair has learned to go on from: some plain, some a chat, some many windows long."""

from server_ext.tiny.chat import IM_START, render, system, user
from server_ext.tiny.corpus import FIRST_HERO, FIRST_WHEELS, HEROES, diary_text


def _chat(question: str, instruction: str | None = None) -> str:
    opening = [system(instruction)] if instruction else []
    return render([*opening, user(question)]) + f"{IM_START}assistant\n"


SAMPLE_PROMPTS: tuple[str, ...] = (
    diary_text(FIRST_HERO, FIRST_WHEELS, 2),
    diary_text(HEROES[1], FIRST_WHEELS.step(), 3),
    diary_text(HEROES[5], FIRST_WHEELS.step().step(), 40),
    _chat("What comes after Monday?"),
    _chat("What comes after fox?", "You are a helpful assistant."),
    _chat("Write JSON: a red fox at the lake."),
    _chat("Eva keeps a diary. On Monday the blue owl meets the cat at the hill. And then?"),
    "hello world",
)
