"""Requests as OpenAI's clients make them, and those that are refused in one sentence."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from medusa_heads.inference.endpoint.answers import Answer
from medusa_heads.inference.endpoint.protocol import Reader
from medusa_heads.inference.endpoint.text import Text
from tests.inference.speaking import make_tokenizer


@pytest.fixture(scope="module")
def reader(model: Any, tokenizer: Any) -> Reader:
    return Reader(model.target, tokenizer)


def read(reader: Reader, chat: bool = False, **body: Any) -> Any:
    usual: dict[str, Any] = {"prompt": "abc"}
    if chat:
        usual = {"messages": [{"role": "user", "content": "hi"}]}
    return reader.read(json.dumps(usual | body).encode(), chat=chat)


def test_what_is_asked_for(reader: Reader, tokenizer: Any) -> None:
    asked = read(reader, temperature=0.5, top_p=0.9, seed=7, stop="x", max_tokens=9, stream=True)
    (text,) = asked.texts
    assert text.prompt == tokenizer("abc")["input_ids"] and text.max_tokens == 9
    assert text.options == {"do_sample": True, "temperature": 0.5, "top_p": 0.9}
    assert (text.seed, list(text.stop), asked.stream) == (7, ["x"], True)
    assert read(reader, temperature=0).texts[0].options == {"do_sample": False}
    beyond = read(reader, temperature=0.5, top_k=-1, min_p=0.1, repetition_penalty=1.2)
    assert beyond.texts[0].options == {
        "do_sample": True, "temperature": 0.5, "top_k": 0, "min_p": 0.1, "repetition_penalty": 1.2
    }  # fmt: skip
    greedy = read(reader, temperature=0, top_k=5, repetition_penalty=1.2).texts[0].options
    assert greedy == {"do_sample": False, "repetition_penalty": 1.2}
    assert read(reader, repetition_penalty=2).texts[0].options == {"repetition_penalty": 2.0}
    assert read(reader).texts[0].options == {} and read(reader).texts[0].max_tokens == 16
    for left, most in ((20, 16), (5, 5)):  # what is left of the context, where that is less
        assert read(reader, prompt=[4] * (512 - left)).texts[0].max_tokens == most
    seeds = {read(reader).texts[0].seed for _ in range(4)}
    assert len(seeds) == 4  # who names no seed gets another text each time
    for prompt in ([4, 5, 6], [[4, 5, 6]]):
        assert read(reader, prompt=prompt).texts[0].prompt == [4, 5, 6]
    assert read(reader, prompt=["abc"]).texts[0].prompt == text.prompt
    # What asks for nothing is no reason to refuse.
    assert read(reader, n=1, logprobs=None, echo=False, user="me", frequency_penalty=0.0)
    assert read(reader, parallel_tool_calls=True, modalities=["text"], service_tier="auto")
    assert read(reader, prompt_cache_key="k", stream_options={"include_obfuscation": False})


def test_a_conversation_is_rendered(reader: Reader, tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    for content in ("hi", parts):
        asked = read(reader, chat=True, messages=[{"role": "user", "content": content}])
        assert tokenizer.decode(asked.texts[0].prompt) == "u:hia:"
    assert asked.texts[0].max_tokens == 512 - len(
        asked.texts[0].prompt
    )  # what is left of the context
    assert read(reader, chat=True, max_completion_tokens=5).texts[0].max_tokens == 5
    assert read(reader, chat=True, max_completion_tokens=5, max_tokens=5).texts[0].max_tokens == 5
    with pytest.raises(ValueError, match="max_completion_tokens and max_tokens say different"):
        read(reader, chat=True, max_completion_tokens=5, max_tokens=6)


def test_a_template_is_told_what_the_request_says(model: Any) -> None:
    thinking = make_tokenizer("{{ messages[0].content }}{% if think is false %}!{% endif %}")
    reader = Reader(model.target, thinking)
    for told, written in (({}, "hi"), ({"think": False}, "hi!"), ({"other": [1]}, "hi")):
        asked = read(reader, chat=True, chat_template_kwargs=told)
        assert thinking.decode(asked.texts[0].prompt) == written
    for name in ("chat_template", "tokenize", "tools", "conversation"):
        with pytest.raises(ValueError, match="is not among what chat_template_kwargs tell"):
            read(reader, chat=True, chat_template_kwargs={name: None})
    with pytest.raises(ValueError, match="chat_template_kwargs must be an object"):
        read(reader, chat=True, chat_template_kwargs=3)


def test_an_answer_comes_back_with_all_that_it_has_not(reader: Reader, tokenizer: Any) -> None:
    """As `message.model_dump()` of OpenAI's client makes it."""
    lacks = dict.fromkeys(["refusal", "annotations", "audio", "function_call", "tool_calls"])
    for none in [None, list[Any]()]:
        said = {"role": "assistant", "content": "x", **lacks, "tool_calls": none}
        talk = [said, {"role": "user", "content": "y", "name": None}]
        asked = read(reader, chat=True, messages=talk)
        assert tokenizer.decode(asked.texts[0].prompt) == "a:x<end>u:ya:"


def test_a_template_that_writes_names_is_told_them(model: Any) -> None:
    names = make_tokenizer("{% for m in messages %}{{ m.name or '?' }}:{{ m.content }}{% endfor %}")
    reader, talk = Reader(model.target, names), {"role": "user", "content": "hi"}
    asked = read(reader, chat=True, messages=[talk | {"name": "bob"}, talk])
    assert names.decode(asked.texts[0].prompt) == "bob:hi?:hi"
    with pytest.raises(ValueError, match="name must be a text"):
        read(reader, chat=True, messages=[talk | {"name": 3}])


def test_a_special_token_to_stop_at(reader: Reader, tokenizer: Any) -> None:
    text = read(reader, stop=["<end>", "x"]).texts[0]
    assert text.stop_ids == {tokenizer.eos_token_id} and list(text.stop) == ["<end>", "x"]
    assert not read(reader, stop="<en").texts[0].stop_ids


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"n": 0}, "n must be at least 1"),
        ({"n": 1.5}, "n must be a whole number"),
        ({"n": 1 << 60}, r"128 texts here \(prompts times n\), and this one asks for 1152921"),
        ({"prompt": ["a", "b"], "n": 65}, "this one asks for 130: ask for fewer"),
        ({"n": 2, "best_of": 2}, "best_of is not supported"),
        ({"logprobs": 21}, "logprobs must be from 0 to 20, got 21"),
        ({"logprobs": -1}, "logprobs must be from 0 to 20"),
        ({"logprobs": True}, "logprobs must be a whole number"),
        ({"top_logprobs": 2}, "'top_logprobs' is no option"),
        ({"n": True}, "n must be a whole number"),
        ({"frequency_penalty": 0.5}, "frequency_penalty is not supported"),
        ({"best": 5}, "'best' is no option"),
        ({"chat_template_kwargs": {}}, "'chat_template_kwargs' is no option"),
        ({"top_k": -2}, "top_k must be from -1"),
        ({"top_k": 2.5}, "top_k must be a whole number"),
        ({"min_p": 1.5}, "min_p must be from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty must be from 0.01 to 100"),
        ({"prompt": None}, "prompt is missing"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": ["a", ""]}, "the prompt is empty"),
        ({"prompt": ["a", 5]}, "prompt must be a text, or the token ids of one, or a list of such"),
        ({"prompt": [["a"]]}, "prompt must be a text"),
        ({"prompt": [1, True]}, "prompt must be a text"),
        ({"prompt": [[4], [9999]]}, "the target has no token 9999"),
        ({"prompt": [4, 9999]}, "the target has no token 9999"),
        ({"prompt": [-1]}, "the target has no token -1"),
        ({"prompt": "\ud800"}, "half of a character"),
        ({"prompt": "a" * 512}, "do not fit the target's context of 512"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": 1.5}, "max_tokens must be a whole number"),
        ({"max_tokens": True}, "max_tokens must be a whole number"),
        ({"max_tokens": 600}, "do not fit the target's context"),
        ({"temperature": -1}, "temperature must be from 0 to 2"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"temperature": float("nan")}, "temperature must be from 0 to 2, got nan"),
        ({"temperature": 10**400}, "temperature must be from 0 to 2"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"top_p": 1.1}, "top_p must be from 0 to 1"),
        ({"seed": 1 << 70}, "seed must be a number of 64 bits"),
        ({"stop": ""}, "none of them empty"),
        ({"stop": ["x"] * 17}, "at most 16"),
        ({"stop": 3}, "stop must be a text"),
        ({"stream": "yes"}, "stream must be true or false"),
        ({"stream_options": {"x": 1}}, "include_usage"),
        ({"stream_options": {"include_obfuscation": True}}, "not 'include_obfuscation'"),
        ({"model": 3}, "model must be a text"),
    ],
    ids=str,
)
def test_what_cannot_be_had(reader: Reader, body: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read(reader, **body)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"logprobs": 3}, "logprobs must be true or false"),
        ({"top_logprobs": 3}, "top_logprobs is of logprobs: true, which is not asked for"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be from 0 to 20, got 21"),
        ({"logprobs": True, "top_logprobs": "3"}, "top_logprobs must be a whole number"),
    ],
    ids=str,
)
def test_what_a_conversation_cannot_have(
    reader: Reader, body: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        read(reader, chat=True, **body)


def test_how_many_likeliest_tokens_are_told(reader: Reader) -> None:
    for asked, told in ((None, None), (False, None), (0, 0), (5, 5)):
        assert read(reader, logprobs=asked).texts[0].logprobs == told
    assert read(reader, chat=True, top_logprobs=0).texts[0].logprobs is None
    assert read(reader, chat=True, logprobs=True).texts[0].logprobs == 0
    assert read(reader, chat=True, logprobs=True, top_logprobs=20).texts[0].logprobs == 20


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "at least one message"),
        ("hi", "must be a list"),
        ([{"content": "hi"}], "a role and a content"),
        ([{"role": "bot", "content": "hi"}], "there is no role 'bot' here, only system, developer"),
        ([{"role": "\udc00" * 99, "content": "hi"}], "no role '.{240}' here"),
        ([{"role": "user", "content": 3}], "content must be text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "content must be text"),
        ([{"role": "user", "content": "\udc00"}], "half of a character"),
        ([{"role": "user", "content": "a", "tool_calls": [{}]}], "tool_calls"),
    ],
)
def test_conversations_that_cannot_be_answered(
    reader: Reader, messages: Any, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        read(reader, chat=True, messages=messages)


@pytest.mark.parametrize("raw", [b"", b"{", b"[" * 100_000, b"\xff", b"3", b"9" * 5000, b"[]"])
def test_bodies_that_are_no_request(reader: Reader, raw: bytes) -> None:
    with pytest.raises(ValueError, match="the body"):
        reader.read(raw, chat=False)


def test_without_a_template_nobody_talks(model: Any) -> None:
    reader = Reader(model.target, make_tokenizer(template=None))
    with pytest.raises(
        ValueError, match=r"no chat template: ask /v1/comp.* a chat_template\.jinja"
    ):
        read(reader, chat=True)


def test_what_the_tokenizer_has_and_the_target_has_not(model: Any, tokenizer: Any) -> None:
    """In token ids, in a text and in a conversation alike."""
    larger = make_tokenizer()
    larger.add_tokens(["<extra>"])
    reader, extra = Reader(model.target, larger), len(tokenizer)
    talk = [{"role": "user", "content": "a<extra>"}]
    for chat, body in (
        (False, {"prompt": [4, extra]}),
        (False, {"prompt": "a<extra>"}),
        (True, {"messages": talk}),
    ):
        with pytest.raises(ValueError, match=f"the target has no token {extra}"):
            read(reader, chat=chat, **body)


def test_what_the_target_reads_and_does_not_write_can_be_asked(model: Any, tokenizer: Any) -> None:
    reads: Any = SimpleNamespace(
        max_positions=None,
        vocab_size=9,
        readable=12,
        check_length=lambda *_: None,
        model=model.target.model,
    )
    assert read(Reader(reads, tokenizer), prompt=[11]).texts[0].prompt == [11]
    with pytest.raises(ValueError, match="the target has no token 12"):
        read(Reader(reads, tokenizer), prompt=[12])


def test_a_conversation_without_tokens_is_refused(model: Any) -> None:
    bare = make_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(ValueError, match="makes no tokens of it"):
        read(Reader(model.target, bare), chat=True, messages=[{"role": "user", "content": ""}])


def test_a_target_without_limits_has_one_here(model: Any, tokenizer: Any) -> None:
    def check_length(*_: Any) -> None:
        """Nothing is too long."""

    endless: Any = SimpleNamespace(
        max_positions=None, readable=97, check_length=check_length, model=model.target.model
    )
    assert read(Reader(endless, tokenizer), chat=True).texts[0].max_tokens == 4096
    with pytest.raises(ValueError, match="max_tokens must be at most 2147483648"):
        read(Reader(endless, tokenizer), max_tokens=1 << 70)


def test_the_form_of_answers() -> None:
    texts = [Text([1, 2, 3], 9) for _ in range(2)]
    texts[0].tokens, texts[0].begun, texts[0].ending = 2, 1, "stop"
    texts[1].tokens, texts[1].begun, texts[1].ending = 5, 1, "length"
    usage: dict[str, Any] = {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10}
    usage["prompt_tokens_details"] = {"cached_tokens": 1}  # a prompt counts once
    plain, chat = (Answer("m", texts, 2, chat=chat, now=5) for chat in (False, True))
    whole = plain.whole(["hi", "ho"])
    assert whole["object"] == "text_completion" and whole["usage"] == usage
    told = [(each["index"], each["text"], each["finish_reason"]) for each in whole["choices"]]
    assert told == [(0, "hi", "stop"), (1, "ho", "length")]
    said = chat.whole(["hi", "ho"])["choices"][1]
    assert said["message"] == {"role": "assistant", "content": "ho"} and said["index"] == 1
    piece = plain.piece(1, "h")
    assert (piece["choices"][0]["text"], piece["choices"][0]["index"]) == ("h", 1)
    assert piece["id"] == whole["id"]
    assert chat.piece(0, "h")["choices"][0]["delta"] == {"content": "h"}
    assert chat.piece(0, "", role="assistant")["choices"][0]["delta"] == {"role": "assistant"}
    assert chat.piece(0, "", "stop")["choices"][0] | {"delta": 0} == {
        "index": 0, "delta": 0, "logprobs": None, "finish_reason": "stop"
    }  # fmt: skip
    assert chat.last()["choices"] == [] and chat.last()["usage"] == usage
