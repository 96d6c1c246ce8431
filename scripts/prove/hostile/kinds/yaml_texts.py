"""YAML that is none, or does to a reader what nobody asked for."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from scripts.prove.hostile.values import deep, draw, many_digits, words

TAGS = (
    "!!python/object/apply:os.mkdir [{marker}]",
    "!!python/object/new:os.mkdir [{marker}]",
    "!!python/name:os.system ''",
    "!!python/module:os ''",
    "!!python/object:pathlib.Path {{}}",
    "!!python/tuple [1, 2]",
    "!!python/bytes 'aGk='",
    "!!bool maybe",
    "!!int ''",
    "!!int abc",
    "!!int 0b",
    "!!float ''",
    "!!float 1e",
    "!!timestamp yesterday",
    "!!timestamp 2001-13-40",
    "2001-13-40",
    "!!binary '\N{SNOWMAN}'",
    "!!binary abc",
    "!!set [a]",
    "!!omap {{a: 1}}",
    "!!pairs 5",
    "!!map 5",
    "!!seq {{a: 1}}",
    "!!unheard-of 5",
    "*nowhere",
)
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)


def as_yaml(settings: dict[str, Any]) -> str:
    """One key a line, each value as JSON, which YAML is."""
    return "".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items())


def without(text: str, key: str) -> str:
    """The same without a key."""
    return "".join(line for line in text.splitlines(True) if not line.startswith(f"{key}:"))


def no_yaml(rng: random.Random, base: str, key: str, marker: Path) -> tuple[str, str]:
    """What is wrong, and good YAML with that behind it; where it is a value, then that of `key`."""
    tag = rng.choice(TAGS).format(marker=json.dumps(str(marker)))
    nested = "&b0 [x, x, x, x, x, x, x, x, x]"
    for n in range(1, 8):
        nested = f"&b{n} [{nested}, {', '.join([f'*b{n - 1}'] * 8)}]"
    values = {
        "a bomb in a value": nested,
        "a list that holds itself": "&a [*a]",
        "a mapping that holds itself": "&a {x: *a}",
        "nested too deeply": deep(rng.randint(900, 20_000)),
        "a key given twice inside": "{mse: 1, mse: 2}",
        "a date in a mapping": "{x: 2001-01-01}",
        "a date as a key": "{2001-01-01: x}",
        "a number too long": many_digits(rng),
        "a tag": tag,
    }
    lines = {
        "a bomb of anchors": BOMB,
        "a key given twice": "seed: 1\nseed: 2\n",
        "a key given twice, spelt otherwise": "eval_rows: 1\neval-rows: 2\n",
        "a list as a key": "? [a, b]\n: 1\n",
        "a merge of nothing": "<<: 5\n",
        "two documents": f"---\n{base}",
        "a tab": "\tseed: 1\n",
        "a NUL": "run_name: a\0b\n",
        "a control character": "run_name: a\x07b\n",
        "half a character": "run_name: \udcff\n",
        "an open quote": 'run_name: "abc\n',
        "an open bracket": "loss: [\n",
    }
    whole = {
        "a list": f"- {words(rng)}\n- b\n",
        "a text": words(rng),
        "a number": str(rng.random()),
        "a directive": f"%YAML 9.9\n---\n%{base}",
    }
    label = draw(rng, [(8, "a tag"), *((1, each) for each in (*values, *lines, *whole))])
    if label in values:
        return label, f"{without(base, key)}{key}: {values[label]}\n"
    return label, whole.get(label) or base + lines[label]
