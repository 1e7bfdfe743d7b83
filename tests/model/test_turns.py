"""What a chat template puts behind a drawn turn."""

from __future__ import annotations

import pytest

from lowroll.model.tokenizer import ChatTokenizer
from lowroll.runs import demo
from lowroll.types import Turn

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "<|begin|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
# thoughts of all turns but the last are left out
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ROUNDS = (
    "{% for m in messages %}{% if m.role == 'user' %}[Round {{ loop.index }}]{% endif %}"
    "{{ m.content }}<|im_end|>{% endfor %}"
)
FORGETS = "{{ messages[-1].content }}<|im_end|>"
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|begin|>", "<|endoftext|>", "</s>", "<s>"]


def chat(source: str, eos: str = "<|im_end|>") -> ChatTokenizer:
    tokenizer = demo.build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.eos_token = eos
    tokenizer.chat_template = source
    return ChatTokenizer(tokenizer)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def after(one: ChatTokenizer, stop: str | None) -> Turn:
    """A turn that ended by this token; None: by a stop string."""
    token = "!" if stop is None else one.tokenizer.convert_tokens_to_ids(stop)
    return Turn(0, 3, "stop", token)


@pytest.mark.parametrize(
    ("source", "end"),
    [(CHATML, "<|im_end|>"), (LLAMA, "<|eot_id|>"), (MISTRAL, "</s>"), (THINKS, "<|im_end|>")],
    ids=["chatml", "llama", "mistral", "thinks"],
)
@pytest.mark.parametrize("by_token", [True, False])
def test_prompt_and_turns_are_the_template_of_the_whole(source, end, by_token) -> None:
    one = chat(source, end)
    one.check_turns()
    messages = [user("a b"), said("c  d"), user("e LOWROLLMARK"), said("f"), user("g\n")]
    ids = one.encode_chat(messages[:1])
    for spoken, news in zip(messages[1::2], messages[2::2], strict=True):
        ids += one.tokenizer.encode(spoken["content"] + end * by_token, add_special_tokens=False)
        ids += one.encode_turn([news], after(one, end if by_token else None), spoken)
    assert ids == one.encode_chat(messages)


def test_thoughts_stay_as_they_were_drawn() -> None:
    one = chat(THINKS)
    ids = one.encode_turn([user("b")], after(one, "<|im_end|>"))
    assert one.tokenizer.decode(ids) == "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"


def test_an_end_that_was_drawn_stands_for_the_templates() -> None:
    one = chat(CHATML)
    for stop in ("<|im_end|>", "<|endoftext|>"):
        assert one.tokenizer.decode(one.encode_turn([user("b")], after(one, stop)))[0] == "\n"
    plain = after(one, None)
    assert one.tokenizer.decode(one.encode_turn([user("b")], plain)).startswith("<|im_end|>\n")
    assert one.encode_turn([user("b")], Turn(0, 1, "stop", 40)) == one.encode_turn(
        [user("b")], plain
    )


def test_a_template_without_an_end_of_its_own_goes_on_behind_the_text() -> None:
    one = chat(PLAIN, "<|endoftext|>")
    one.check_turns()
    ids = one.encode_turn([user("b")], after(one, "<|endoftext|>"))
    assert one.tokenizer.decode(ids) == "\nuser: b\nassistant: "


@pytest.mark.parametrize(
    ("source", "why"), [(ROUNDS, "another text in a longer"), (FORGETS, "does not show what an")]
)
def test_a_template_that_cannot_go_on_is_refused(source, why) -> None:
    with pytest.raises(ValueError, match=why):
        chat(source).check_turns()
