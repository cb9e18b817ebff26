"""Chat messages, the special tokens around them, and the template that turns one into the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
MASK = "<|MASK|>"
"""SGLang's own default name for the token that stands for a position to be drafted (`speculative/dflash_utils.py`)."""

SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END, MASK)

TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
"""Jinja template for `tokenizer_config.json`, the ChatML layout."""


class Message(TypedDict):
    """One chat message in the form of the OpenAI API."""

    role: str
    content: str


def system(content: str) -> Message:
    """A system message."""
    return {"role": "system", "content": content}


def user(content: str) -> Message:
    """A user message."""
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    """An assistant message."""
    return {"role": "assistant", "content": content}


def render(messages: Sequence[Message]) -> str:
    """The text of a conversation, as `TEMPLATE` gives it without a generation prompt."""
    return "".join(f"{IM_START}{m['role']}\n{m['content']}{IM_END}\n" for m in messages)
