"""What of YAML is taken."""

from __future__ import annotations

import pytest
import yaml

from medusa_heads.plain_yaml import parse_yaml

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ("a: !!bool maybe", "not what its tag says"),
        ("a: !!int ''", "not what its tag says"),
        ("a: !!float ''", "not what its tag says"),
        ("a: !!timestamp yesterday", "not what its tag says"),
        ("a: 2001-99-99", "month must be in 1..12"),
        ("a: !!int abc", "invalid literal"),
        ("a: 1\na: 2", "the key 'a' is given twice"),
        ("a: {b: 1, b: 2}", "the key 'b' is given twice"),
        ("[" * 5000, "nested too deeply"),
        (BOMB, "more than 100000 values"),
        ("a: &a [*a]", "holds itself"),
        ("a: &a {x: *a}", "holds itself"),
        ("a: *b", "undefined alias"),
        ("a: " + "9" * 5_000, "4300 digits"),
    ],
    ids=lambda value: value[:24],
)
def test_what_is_not_plain_yaml(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as raised:
        parse_yaml(text)
    assert "\n" not in str(raised.value)


def test_plain_yaml_is_read_as_ever() -> None:
    text = "a: &a {x: 1}\nb: *a\nc: [2001-01-01, 1e-4, true, ~]\nd: {<<: *a, y: 2}\n"
    assert parse_yaml(text) == yaml.safe_load(text)
    assert parse_yaml("") is None
    deep = "[" * 60 + "]" * 60
    assert parse_yaml(deep) == yaml.safe_load(deep)
