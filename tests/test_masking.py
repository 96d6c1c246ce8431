"""No secret is written down: by the name it stands under, or by its shape."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_heads.masking import masked, masked_text, shows_secret

HEX40 = "0123456789abcdef0123456789abcdef01234567"
SHAPES = [
    "hf_abcdefghijkl",
    "api_org_abcdefghijklmnop",
    "sk-proj-abcdef1234567890abcdef",
    "sk-ant-api03-abc_def-123",
    "sk-abcdef123456",
    "ghp_abcdefghijklmnopqrst",
    "github_pat_11ABCDEFG0abcdefghij",
    "glpat-abcdefghij1234567890",
    "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "xoxb-123456789012-abcdef",
    "AIzaSyA1234567890abcdefghijklmnopqrstuv",
    "eyJhbGciOiJIUzI1NiJ9.e30.x_y-z",
    "wandb_v1_abcdefghijklmnopqrstuvwxyz",
    HEX40,
    "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----",
]  # fmt: skip
NAMES = [
    "hub_token", "hub-token", "hubToken", "HF_TOKEN", "token", "password", "db.password",
    "apiKey", "api_key", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "secret", "wandb_key",
    "credentials", "Authorization", "X-Auth", "private_key", "hub_tokens", "\uff54oken",
]  # fmt: skip


@pytest.mark.parametrize("secret", SHAPES, ids=str)
def test_by_shape_wherever_it_stands(secret: str) -> None:
    for text in (secret, f"--x={secret}", f"a {secret}, b", f'{{"a": "{secret}"}}', f"({secret})"):
        assert secret not in masked_text(text) and "***" in masked_text(text)
        assert shows_secret(text)
    deep = {"a": [{"b": ({"c": secret},)}], secret: 1}
    assert secret not in json.dumps(masked(deep))


@pytest.mark.parametrize("name", NAMES)
def test_by_name(name: str) -> None:
    for value in ("x", "abc def", 12, ["x"], {"a": "x"}):
        assert masked({"a": [{name: value}]}) == {"a": [{name: "***"}]}
    assert masked({name: None, "a": {name: False}}) == {name: None, "a": {name: False}}
    assert masked([f"--{name}", "x y", "z"]) == [f"--{name}", "***", "z"]
    if name.isascii():
        for text in (f"--{name}=x", f'{{"{name}": "x"}}', f"https://h/p?a=1&{name}=x&b=2"):
            assert masked_text(text) == text.replace("=x", "=***").replace('"x"', '"***"')
        assert masked_text(f"run --{name} x --b y") == f"run --{name} *** --b y"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://me:pa@ss@host/v1", "http://***@host/v1"),
        ("s3://AKIAIOSFODNN7EXAMPLE:abc@bucket/p", "s3://***@bucket/p"),
        ("https://hf_abcdefghijkl@hub/x", "https://***@hub/x"),
        ("https:/hf_abcdefghijkl@hub/x", "https:/***@hub/x"),  # as a path spells it
        ("https://host/x?token=secretvalue", "https://host/x?token=***"),
        ("Authorization: Basic bWU6cGFzcw==", "Authorization: ***"),
        ("curl -H 'authorization: Bearer abc'", "curl -H 'authorization: ***'"),
        ("Bearer abc.def-123", "Bearer ***"),
        (
            '--training_args={"hub_token": "x", "a": 1}',
            '--training_args={"hub_token": "***", "a": 1}',
        ),
    ],
)
def test_in_text(text: str, expected: str) -> None:
    assert masked_text(text) == expected


@pytest.mark.parametrize(
    "kept",
    [
        {"git_sha": HEX40, "revision": HEX40, "_commit_hash": HEX40},
        {"a": f"user/model@{HEX40}", "b": f'revision="{HEX40}"', "c": f"commit/{HEX40}"},
        {"weights_sha256": "a" * 64, "max_new_tokens": 5, "supervised_tokens": 7, "tokens": [1]},
        {"metric_for_best_model": "tokens_per_step_32", "tokenizer": "x", "monkey": "x"},
        {"api_key_variable": "OPENAI_API_KEY", "hf_device_map": "auto", "task-specific": "sk-x"},
        {"text": "the bearer of news; a token is a word: so are tokens", "n": 3, "none": None},
        {"argv": ["--seed", "3", "--config", "a.yaml"], "a": "key=value, token=None"},
    ],
    ids=str,
)
def test_what_is_no_secret_stays(kept: dict[str, Any]) -> None:
    assert masked(kept) == kept


def test_what_is_nested_without_end_is_cut_off() -> None:
    deep: Any = "hunter2"
    for _ in range(900):
        deep = [{"a": deep}]
    assert "hunter2" not in json.dumps(masked(deep)) and len(json.dumps(masked(deep))) < 1000


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)


@settings(deadline=None)
@given(plain, st.sampled_from(SHAPES), st.sampled_from(NAMES), st.data())
def test_nothing_passes_however_it_is_nested(
    around: Any, secret: str, name: str, data: st.DataObject
) -> None:
    hidden: Any = data.draw(
        st.sampled_from([secret, {name: "hunter2"}, [f"--{name}", "hunter2"], f"--{name}=hunter2"])
    )
    if name == "\uff54oken" and isinstance(hidden, str):
        hidden = secret
    for _ in range(data.draw(st.integers(0, 4))):
        wrap = data.draw(st.sampled_from(["list", "tuple", "dict", "json"]))
        hidden = {
            "list": lambda value: [around, value],
            "tuple": lambda value: (value, around),
            "dict": lambda value: {"x": around, "y": value},
            "json": lambda value: json.dumps(value),
        }[wrap](hidden)
    text = json.dumps(masked(hidden))
    assert "hunter2" not in text and json.dumps(secret)[1:-1] not in text
    assert masked(masked(hidden)) == masked(hidden)


@pytest.mark.parametrize("part", ["a.", "/", "sk-", "A/", "bearer ", "-----BEGIN ", "a=", "x:/"])
def test_a_long_text_takes_no_square_of_its_length(part: str) -> None:
    began = time.process_time()
    masked_text(part * 20_000)
    assert time.process_time() - began < 5.0
