"""Variables of a chat template that a caller sets: `chat_template_kwargs`, such as enable_thinking."""

from __future__ import annotations

from typing import Any

import pytest

from lowroll.model.template import template
from lowroll.model.tokenizer import ChatTokenizer
from lowroll.runs.demo import build_tokenizer

TALK = [{"role": "user", "content": "hi"}]
SOURCE = (
    "{{ messages[0].content }}{% if not enable_thinking | default(true) %}<quiet>{% endif %}"
    "{{ style.tone if style else '' }}"
)


def tokenizer() -> Any:
    made = build_tokenizer()
    made.chat_template = SOURCE
    return made


def test_a_template_reads_the_variables_of_each_conversation() -> None:
    made = template(SOURCE, ())
    assert made.render(TALK) == "hi"
    given = {"enable_thinking": False, "style": {"tone": "!"}}
    assert made.render(TALK, template_kwargs=given) == "hi<quiet>!"
    assert made.render(TALK) == "hi"  # nothing is kept


def test_a_conversation_s_variables_stand_over_those_of_the_tokenizer() -> None:
    plain = ChatTokenizer(tokenizer())
    quiet = ChatTokenizer(tokenizer(), template_kwargs={"enable_thinking": False})
    assert quiet.encode_chat(TALK) != plain.encode_chat(TALK)
    text = plain.render(TALK, True, template_kwargs={"enable_thinking": False})
    assert quiet.render(TALK, True) == text
    over = quiet.render(TALK, True, template_kwargs={"enable_thinking": True})
    assert over == plain.render(TALK, True)


@pytest.mark.parametrize(
    "name", ["messages", "tools", "documents", "add_generation_prompt", "eos_token", "no name"]
)
def test_what_a_template_gets_from_elsewhere_is_not_set(name: str) -> None:
    made = template(SOURCE, (("eos_token", "<|end|>"),))
    with pytest.raises(ValueError, match=f"chat_template_kwargs: .*{name}"):
        made.render(TALK, template_kwargs={name: "x"})
