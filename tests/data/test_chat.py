"""Masks of conversations: exactly what the model writes, under templates of many styles."""

from typing import Any

import pytest

from medusa_heads.data.bad_rows import BadRow
from medusa_heads.data.chat import ChatTemplate, ask_ids, continuation
from medusa_heads.data.formats import Conversation
from tests.inference.speaking import make_tokenizer
from tests.training import templates
from tests.training.templates import rows_of

USER, OTHER = {"role": "user", "content": "Hi there"}, {"role": "user", "content": "And then?"}
ONE = {"role": "assistant", "content": "Hello, you."}
TWO = {"role": "assistant", "content": "Nothing more."}
SYSTEM = {"role": "system", "content": "Be brief."}
NAMED = {"id": "call_1", "function": {"name": "look_up"}}
CALL = {"role": "assistant", "content": "", "tool_calls": [NAMED]}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return templates.chat_tokenizer()


def learnt(tokenizer: Any, template: str, messages: list[Any], **more: Any) -> list[list[str]]:
    """The supervised texts of each row."""
    chat = ChatTemplate(tokenizer, template, **more)
    found = []
    for input_ids, labels in rows_of(chat, Conversation(messages)):
        assert len(input_ids) == len(labels)
        assert all(label in (-100, token) for token, label in zip(input_ids, labels, strict=True))
        texts: list[list[int]] = []
        before = -100
        for label in labels:
            if label != -100:
                if before == -100:
                    texts.append([])
                texts[-1].append(label)
            before = label
        found.append([tokenizer.decode(ids) for ids in texts])
    return found


@pytest.mark.parametrize(
    ("template", "answers"),
    [
        (templates.CHATML, ["Hello, you.<|im_end|>", "Nothing more.<|im_end|>"]),
        (templates.LLAMA3, ["Hello, you.<|eot_id|>", "Nothing more.<|eot_id|>"]),
        (templates.MISTRAL, [" Hello, you.</s>", " Nothing more.</s>"]),
        (templates.GEMMA, ["Hello, you.<end_of_turn>", "Nothing more.<end_of_turn>"]),
        (templates.CLOSED, ["Hello, you.<|end|>", "Nothing more.<|end|>"]),
        (templates.LEADING_NEWLINE, ["Hello, you.</s>", "Nothing more.</s>"]),
        (templates.PLAIN, [" Hello, you.\n", " Nothing more.\n"]),
    ],
    ids=["chatml", "llama3", "mistral", "gemma", "closed", "leading newline", "plain"],
)
def test_answers_with_their_end_are_learnt_and_headers_are_not(
    template: str, answers: list[str], tokenizer: Any
) -> None:
    assert learnt(tokenizer, template, [USER, ONE, OTHER, TWO]) == [answers]


@pytest.mark.parametrize("template", [templates.CHATML, templates.LLAMA3, templates.GEMMA])
def test_a_row_is_what_the_model_saw_followed_by_what_it_wrote(
    template: str, tokenizer: Any
) -> None:
    """Every supervised stretch begins where the prompt's own tokens end."""
    messages = [USER, ONE, OTHER, TWO]
    [(input_ids, labels)] = rows_of(ChatTemplate(tokenizer, template), Conversation(messages))
    for index in (1, 3):
        prompt = tokenizer.apply_chat_template(
            messages[:index], chat_template=template, add_generation_prompt=True, return_dict=False
        )
        assert input_ids[: len(prompt)] == prompt
        assert labels[len(prompt) - 1] == -100 and labels[len(prompt)] == input_ids[len(prompt)]


def test_a_rewritten_history_gives_each_turn_the_context_it_answers(tokenizer: Any) -> None:
    thought = {**ONE, "reasoning_content": "Be kind."}
    rows = learnt(tokenizer, templates.THINKING, [USER, thought, OTHER, TWO])
    assert rows == [
        ["<think>\nBe kind.\n</think>\n\nHello, you.<|im_end|>"],
        ["<think>\n\n</think>\n\nNothing more.<|im_end|>"],
    ]
    chat = ChatTemplate(tokenizer, templates.THINKING)
    [_, (last, _)] = rows_of(chat, Conversation([USER, thought, OTHER, TWO]))
    assert "Be kind." not in tokenizer.decode(last)


def test_a_system_text_that_moves_gives_rows_of_their_own(tokenizer: Any) -> None:
    rows = learnt(tokenizer, templates.MISTRAL, [SYSTEM, USER, ONE, OTHER, TWO])
    assert rows == [[" Hello, you.</s>"], [" Nothing more.</s>"]]


def test_what_the_prompt_supplies_is_not_learnt(tokenizer: Any) -> None:
    """An empty block of thoughts is the prompt's where thinking is switched off."""
    off = learnt(tokenizer, templates.THINKING, [USER, ONE], arguments={"enable_thinking": False})
    assert off == [["Hello, you.<|im_end|>"]]


def test_only_messages_after_the_context_are_learnt(tokenizer: Any) -> None:
    chat = ChatTemplate(tokenizer, templates.CHATML)
    [(_, labels)] = rows_of(chat, Conversation([USER, ONE, OTHER, TWO], context=3))
    assert tokenizer.decode([label for label in labels if label != -100]) == (
        "Nothing more.<|im_end|>"
    )


def test_messages_of_weight_nothing_are_not_learnt(tokenizer: Any) -> None:
    """As OpenAI's form of conversations says it."""
    unlearnt = {**ONE, "weight": 0}
    for first, answers in (
        (unlearnt, ["Nothing more.<|im_end|>"]),
        ({**ONE, "weight": 1}, ["Hello, you.<|im_end|>", "Nothing more.<|im_end|>"]),
    ):
        assert learnt(tokenizer, templates.CHATML, [USER, first, OTHER, TWO]) == [answers]
    with pytest.raises(BadRow, match="no message of an assistant to learn from"):
        learnt(tokenizer, templates.CHATML, [USER, unlearnt])


def test_text_after_the_last_answer_is_left_out(tokenizer: Any) -> None:
    chat = ChatTemplate(tokenizer, templates.CHATML)
    [(input_ids, _)] = rows_of(chat, Conversation([USER, ONE, OTHER]))
    assert tokenizer.decode(input_ids).endswith("Hello, you.<|im_end|>")


def test_a_prompt_that_merges_with_the_answer_keeps_its_own_tokens(tokenizer: Any) -> None:
    """Tokenised together, the space before the answer would belong to the answer's first token."""
    messages = [USER, ONE, OTHER, TWO]
    whole = tokenizer("assistant: Hello")["input_ids"]
    alone = tokenizer("assistant: ")["input_ids"]
    assert whole[: len(alone)] != alone
    chat = ChatTemplate(tokenizer, templates.TRAILING_SPACE)
    rows = rows_of(chat, Conversation(messages))
    assert len(rows) == 2
    for (input_ids, labels), index in zip(rows, (1, 3), strict=True):
        prompt = tokenizer.apply_chat_template(
            messages[:index],
            chat_template=templates.TRAILING_SPACE,
            add_generation_prompt=True,
            return_dict=False,
        )
        assert input_ids[: len(prompt)] == prompt
        assert labels == [-100] * len(prompt) + input_ids[len(prompt) :]
        assert tokenizer.decode(input_ids[len(prompt) :]) == messages[index]["content"] + "\n"


def test_stop_tokens_of_the_target_end_a_turn_before_other_special_tokens(tokenizer: Any) -> None:
    template = templates.CHATML.replace("'<|im_end|>'", "'<|end|><|im_end|>'")
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert learnt(tokenizer, template, [USER, ONE], stop_ids=[stop]) == [
        ["Hello, you.<|end|><|im_end|>"]
    ]
    assert learnt(tokenizer, template, [USER, ONE]) == [["Hello, you.<|end|>"]]


def test_a_stop_token_that_opens_the_next_message_ends_the_turn_before_it(tokenizer: Any) -> None:
    """The template closes no message, and the target writes the head of the next one."""
    template = (
        "{%- for m in messages %}{{- '<|' + m.role + '|>\n' + m.content }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}"
    )
    stops = [tokenizer.convert_tokens_to_ids(token) for token in ("<|user|>", "<|end|>")]
    talk = [USER, ONE, OTHER, TWO]
    assert learnt(tokenizer, template, talk) == [["Hello, you.", "Nothing more."]]
    assert learnt(tokenizer, template, talk, stop_ids=stops) == [
        ["Hello, you.<|user|>", "Nothing more."]
    ]
    assert learnt(tokenizer, template, talk, stop_ids=stops[1:]) == [
        ["Hello, you.", "Nothing more."]
    ]
    closed = template.replace("m.content", "m.content + '<|end|>'")
    for stop_ids in (stops, stops[:1]):  # it ended, with a stop token or another special one
        ends = ["Hello, you.<|end|>", "Nothing more.<|end|>"]
        if stop_ids == stops[:1]:
            ends[0] += "<|user|>"
        assert learnt(tokenizer, closed, talk, stop_ids=stop_ids) == [ends]
    spaced = template.replace("m.content", "m.content + '</s>\n'")
    assert learnt(tokenizer, spaced, talk, stop_ids=stops) == [
        ["Hello, you.</s>", "Nothing more.</s>"]
    ]


def test_white_space_at_the_end_of_an_answer_is_the_answers(tokenizer: Any) -> None:
    spaced = {"role": "assistant", "content": "Yes.\n\n"}
    assert learnt(tokenizer, templates.CHATML, [USER, spaced]) == [["Yes.\n\n<|im_end|>"]]


@pytest.mark.parametrize(("key", "text"), [("function.name", "look_up"), ("id", "call_1")])
def test_tools_and_calls_reach_the_template(key: str, text: str, tokenizer: Any) -> None:
    template = (
        "{{- tools | length ~ ' tools\\n' }}{%- for m in messages %}"
        "{{- '<|im_start|>' + m.role + '\\n' + (m.tool_calls[0].KEY if m.tool_calls else "
        "m.content) + '<|im_end|>' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )
    chat = ChatTemplate(tokenizer, template.replace("KEY", key))
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    [(input_ids, labels)] = rows_of(chat, Conversation([USER, CALL], tools=tools))
    assert tokenizer.decode(input_ids).startswith("1 tools")
    assert tokenizer.decode([n for n in labels if n != -100]) == f"{text}<|im_end|>"


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (templates.GEMMA, [SYSTEM, USER, ONE], "refuses it .*System role not supported"),
        (templates.GEMMA, [USER, OTHER, ONE], "refuses it .*roles must alternate"),
        (templates.CHATML, [USER], "no message of an assistant"),
        (templates.CHATML, [ONE, USER, TWO], "begins with an assistant's message"),
        (templates.OPENED_THOUGHT, [USER, ONE], "asks for message 1 with '<think>"),
        ("{{ messages | length }}", [USER, ONE], "asks for message 1 with '1', and then"),
        ("the same", [USER, ONE], "renders nothing of message 1"),
        (templates.CHATML, [USER, CALL], "leaves out the calls of message 1: give a"),
        (templates.CHATML, [USER, {**CALL, "content": "I see."}], "leaves out the calls of mess"),
    ],
)
def test_conversations_that_cannot_be_masked(
    template: str, messages: list[Any], message: str, tokenizer: Any
) -> None:
    with pytest.raises(BadRow, match=message):
        rows_of(ChatTemplate(tokenizer, template), Conversation(messages))


def test_a_tokenizer_without_a_template(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        ChatTemplate(tokenizer)


def test_a_continuation_under_a_tokenizer_that_puts_a_space_first() -> None:
    """As SentencePiece does: text alone begins with a space, text behind a line break does not."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    # "a" and "b" merge to "ab" where they meet, and so do two line breaks.
    names = ("\u2581", "a", "b", "ab", "\n", "\u2581b", "<unk>", "\n\n")
    merges = [("a", "b"), ("\u2581", "b"), ("\n", "\n")]
    pieces = {name: token for token, name in enumerate(names)}
    inner = Tokenizer(models.BPE(pieces, merges, unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    inner.decoder = decoders.Replace("\u2581", " ")
    spaced = PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False)
    before, whole = spaced("a")["input_ids"], spaced("ab")["input_ids"]
    assert (before, whole, spaced("b")["input_ids"]) == ([0, 1], [0, 3], [5])
    assert continuation(spaced, before, "b", whole) == [0, 1, 2]
    lines = spaced("a\n\nb")["input_ids"]
    assert lines == [0, 1, 7, 2]
    assert continuation(spaced, [0, 1, 4], "\nb", lines) == [0, 1, 4, 4, 2]


def test_half_a_character_is_no_text(tokenizer: Any) -> None:
    said = {"role": "user", "content": "\ud800"}
    with pytest.raises(BadRow, match="it holds half a character"):
        rows_of(ChatTemplate(tokenizer, templates.PLAIN), Conversation([said, ONE]))


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 // (messages | length - 1) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",  # more than a template may
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ messages[9].content.strip() }}",
        "{{ raise_exception('no') }}",
    ],
)
def test_what_fails_in_a_template_is_a_refusal(template: str, tokenizer: Any) -> None:
    with pytest.raises(BadRow, match="the chat template refuses it"):
        ChatTemplate(tokenizer, template).render([USER], None, ask=True)
    both = [Conversation([USER, ONE]), Conversation([USER, TWO])]
    assert all(
        isinstance(each, BadRow) for each in ChatTemplate(tokenizer, template).rendered(both)
    )


def test_a_conversation_without_tokens_cannot_be_answered() -> None:
    tokenizer = make_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(BadRow, match="the chat template makes no tokens of it"):
        ask_ids(tokenizer, [{"role": "user", "content": ""}])


@pytest.mark.parametrize("condition", ["part.type == 'text'", "'text' in part"])
def test_a_template_that_takes_lists_alone_gets_lists(condition: str, tokenizer: Any) -> None:
    """Such as those of models that also see images: of a text they would write nothing."""
    written = (
        "{%- for part in message.content %}{%- if CONDITION %}{{- part.text }}{%- endif %}"
        "{%- endfor %}{{- '<|im_end|>"
    ).replace("CONDITION", condition)
    template = templates.CHATML.replace(" + message.content + '<|im_end|>", " }}" + written)
    assert learnt(tokenizer, template, [USER, ONE]) == [["Hello, you.<|im_end|>"]]
    chat = ChatTemplate(tokenizer, template)
    assert "Hi there" in chat.render([USER], None, ask=True)
