"""Tools: the chat template is told of them, and calls in an answer are found."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from medusa_heads.inference.endpoint import scheduler
from medusa_heads.inference.endpoint.conversation import Calls, answers_of
from medusa_heads.inference.endpoint.protocol import Reader
from medusa_heads.inference.endpoint.server import Server
from medusa_heads.inference.endpoint.text import Text
from tests.inference.endpoint.asking import ask
from tests.inference.speaking import make_tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
        },
    }
]
TEMPLATE = (
    "{% if tools %}{% for t in tools %}[{{ t.function.name }}]{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role[0] + ':' + m.content }}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "<{{ c.function.name }} {{ c.function.arguments.x + 1 }}>{% endfor %}{% endif %}"
    "{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
ANSWERS: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "a:",
    "fields": {
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<end>", "content": "text"},
    },
}
THOUGHTS = {"open": "<think>", "close": "</think>", "content": "text"}
CALL = '<call>{"name": "add", "arguments": {"x": 3}}</call>'
USER = {"role": "user", "content": "hi"}
ASK: dict[str, Any] = {"messages": [USER], "tools": TOOLS, "max_tokens": 200}
CALLED = {"function": {"name": "add", "arguments": '{"x": 3}'}, "type": "function", "id": "c1"}


def tokenizer_of(answers: Any) -> Any:
    made = make_tokenizer(TEMPLATE)
    made.response_template = answers
    return made


def rendered(model: Any, tokenizer: Any, **body: Any) -> str:
    asked = Reader(model.target, tokenizer).read(json.dumps(ASK | body).encode(), chat=True)
    text: str = tokenizer.decode(asked.texts[0].prompt)
    return text


def test_the_template_is_told(model: Any) -> None:
    made = tokenizer_of(None)
    assert rendered(model, made) == "[add]u:hia:"
    assert rendered(model, made, tool_choice="auto", parallel_tool_calls=True) == "[add]u:hia:"
    for name, value in (("tools", []), ("tools", None), ("tool_choice", "none")):
        # Of no calls, there is one at most.
        more: dict[str, Any] = {name: value, "parallel_tool_calls": False}
        assert rendered(model, made, **more) == "u:hia:"
    talk = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
    ]
    # Arguments are an object in the template.
    assert rendered(model, made, messages=talk) == "[add]u:xa:<add 4>t:4#c1a:"


@pytest.mark.parametrize("nothing", ["", " ", "{}", {}])
def test_a_call_without_arguments_is_told(model: Any, nothing: Any) -> None:
    """Some servers and clients write no JSON there, where a function takes nothing."""
    made = tokenizer_of(None)
    made.chat_template = TEMPLATE.replace("c.function.arguments.x + 1", "c.function.arguments")
    called = {**CALLED, "function": {"name": "add", "arguments": nothing}}
    talk = [USER, {"role": "assistant", "content": None, "tool_calls": [called]}, USER]
    assert rendered(model, made, messages=talk) == "[add]u:hia:<add {}>u:hia:"


def test_an_answer_can_be_sent_back(model: Any) -> None:
    """With its thoughts, which some templates write."""
    answers = {**ANSWERS, "fields": {"reasoning_content": THOUGHTS, **ANSWERS["fields"]}}
    made = tokenizer_of(answers)
    made.chat_template = TEMPLATE.replace("m.content", "(m.reasoning_content or '') + m.content")
    told = Calls(made, answers, TOOLS).of("u:hia:", "<think>so</think>" + CALL + "<end>")
    assert told is not None and told["reasoning_content"] == "so"
    assert rendered(model, made, messages=[*ASK["messages"], told]) == "[add]u:hia:so<add 4>a:"
    told["reasoning_content"] = 3
    with pytest.raises(ValueError, match="reasoning_content must be a text"):
        rendered(model, made, messages=[*ASK["messages"], told])


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let texts be what a test says, whatever the target writes."""
    put = Text.put

    def script(said: str, tokenizer: Any) -> None:
        ids = tokenizer(said)["input_ids"]

        def put_other(text: Text, token: torch.Tensor) -> None:
            if text.tokens < len(ids):
                put(text, torch.tensor(ids[text.tokens : text.tokens + 1]))
                text.stopped = False

        monkeypatch.setattr(Text, "put", put_other)
        monkeypatch.setattr(scheduler, "stop_ids", lambda _: set(range(999)))

    return script


@pytest.mark.parametrize("before", [pytest.param("", marks=pytest.mark.slow), "so "])
def test_calls_are_found(before: str, endless: Any, writes: Any) -> None:
    made = tokenizer_of(ANSWERS)
    writes(before + CALL + CALL.replace("3", "5") + "<end>", made)
    with Server(endless, made, port=0) as server:
        status, answer = ask(server, "/v1/chat/completions", ASK)
        raw = ask(server, "/v1/chat/completions", ASK | {"stream": True})[1]
    (choice,) = answer["choices"]
    message = choice["message"]
    assert status == 200 and choice["finish_reason"] == "tool_calls"
    assert (message["role"], (message["content"] or "").strip()) == ("assistant", before.strip())
    calls = message["tool_calls"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"x": 3}, {"x": 5}]
    assert {call["function"]["name"] for call in calls} == {"add"}
    assert len({call["id"] for call in calls}) == 2 and calls[0]["type"] == "function"
    events = [json.loads(line.removeprefix("data: ")) for line in raw.split("\n\n")[:-2]]
    first, last = (event["choices"][0] for event in events)
    assert first["delta"] == {"role": "assistant"} and last["finish_reason"] == "tool_calls"
    streamed = last["delta"]["tool_calls"]
    assert [call["index"] for call in streamed] == [0, 1]
    assert [call["function"] for call in streamed] == [call["function"] for call in calls]


NO_CALLS = [
    "no call<end>",
    '<call>{"name": "add", "argum<end>',  # no JSON
    "<call>[3]</call><end>",
    CALL.replace("3", r'"\ud800"') + "<end>",  # half of a character
    CALL.replace("add", r"a\ud800") + "<end>",
    CALL.replace('{"x": 3}', '"three"') + "<end>",  # no object
    CALL.replace('{"x": 3}', "[3]") + "<end>",
    CALL.replace("3", "NaN") + "<end>",
]


@pytest.mark.parametrize("said", NO_CALLS)
def test_what_is_no_call(said: str) -> None:
    assert Calls(tokenizer_of(ANSWERS), ANSWERS, TOOLS).of("u:hia:", said) is None


@pytest.mark.parametrize(
    ("said", "answers"),
    [
        (NO_CALLS[0], ANSWERS),
        *(pytest.param(said, ANSWERS, marks=pytest.mark.slow) for said in NO_CALLS[1:]),
        (CALL + "<end>", None),  # nobody says how it calls
    ],
)
def test_what_is_no_call_is_text(said: str, answers: Any, endless: Any, writes: Any) -> None:
    made = tokenizer_of(answers)
    writes(said, made)
    with Server(endless, made, port=0) as server:
        choice = ask(server, "/v1/chat/completions", ASK)[1]["choices"][0]
        raw = ask(server, "/v1/chat/completions", ASK | {"stream": True})[1]
    plain = said.removesuffix("<end>")
    assert choice["message"] == {"role": "assistant", "content": plain}
    assert choice["finish_reason"] == "stop"
    events = [json.loads(line.removeprefix("data: ")) for line in raw.split("\n\n")[:-2]]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content", "") for delta in deltas) == plain


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"tools": {}}, "tools must be a list of objects"),
        ({"tools": [{"type": "function"}]}, "tools must be a list of objects"),
        ({"tools": [{"type": "web", "function": {"name": "a"}}]}, "tools must be a list"),
        ({"tool_choice": "required"}, "tool_choice must be 'auto' or 'none'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice must be 'auto' or 'none'"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls must be true"),
        ({"calls": [{}]}, "tool_calls must be a list of functions"),
        ({"calls": 3}, "tool_calls must be a list of functions"),
        ({"calls": [{"function": {"name": "a", "arguments": "{"}}]}, "tool_calls must be a list"),
        ({"calls": [{"function": {"name": "a", "arguments": "3"}}]}, "tool_calls must be a list"),
    ],
    ids=str,
)
def test_what_is_refused(model: Any, body: dict[str, Any], sentence: str) -> None:
    if "calls" in body:
        said = {"role": "assistant", "content": None, "tool_calls": body["calls"]}
        body = {"messages": [*ASK["messages"], said]}
    with pytest.raises(ValueError, match=sentence):
        rendered(model, tokenizer_of(None), **body)


def test_a_template_without_tools(model: Any, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="chat template knows no tools: leave them out"):
        rendered(model, tokenizer)
    said = {"role": "assistant", "content": "x", "tool_calls": [CALLED]}
    with pytest.raises(ValueError, match="chat template knows no tool_calls"):
        rendered(model, tokenizer, tools=[], messages=[said])


def test_a_template_that_quotes_half_of_a_character(model: Any) -> None:
    """No answer can have it: nothing writes it as bytes."""
    made = make_tokenizer("{{ raise_exception('no tool ' + tools[0].function.name) }}")
    tools = [{"type": "function", "function": {"name": "a\ud800"}}]
    with Server(model, made, port=0) as server:
        status, answer = ask(server, "/v1/chat/completions", ASK | {"tools": tools})
    assert status == 400 and r"no tool a\ud800" in answer["error"]["message"]


def test_architectures_whose_calls_transformers_knows() -> None:
    """Where the tokenizer says nothing of them."""
    pytest.importorskip("transformers.cli.serving.utils")
    made = make_tokenizer()
    model: Any = SimpleNamespace(config=SimpleNamespace(model_type="qwen3"))
    call = '<tool_call>\n{"name": "add", "arguments": {"x": "3"}}\n</tool_call>'
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    for name in ("reasoning_content", "thinking", "reasoning"):  # which versions differ in
        template = answers_of(made, model)
        (own,) = {"reasoning_content", "thinking"} & {*template["fields"]}
        fields = {name if key == own else key: told for key, told in template["fields"].items()}
        calls = Calls(made, template | {"fields": fields}, TOOLS)
        message = calls.of(prompt, f"<think>\nso\n</think>\n\n{call}<|im_end|>")
        assert message is not None and message["reasoning_content"].strip() == "so"
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"x": 3}
    assert calls.of(prompt, "<think>\nso\n</think>\n\nno call<|im_end|>") is None
    model.config.model_type = "llama"
    assert answers_of(made, model) is None
