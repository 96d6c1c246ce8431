"""YAML that makes plain data, of whatever somebody has written."""

from __future__ import annotations

from typing import Any

MOST_VALUES = 100_000
"""Of a YAML file, its aliases spelt out: a few lines of them can stand for billions."""

MOST_BRACKETS = 200
"""Within each other. PyYAML looks at every open one again at each token, and would only run out of
stack far behind them all."""


def parse_yaml(text: str) -> Any:
    """YAML that names a key once and makes plain data; of several values for one key, a plain
    `safe_load` would take the last. Raises ValueError: it is none, is nested too deeply, holds
    itself, or holds far more than it says."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
            return super().construct_mapping(node, deep)

        def fetch_flow_collection_start(self, TokenClass: Any) -> None:
            if self.flow_level == MOST_BRACKETS:
                raise RecursionError
            super().fetch_flow_collection_start(TokenClass)

    try:
        loader = Loader(text)
        root = loader.get_single_node()
        if root is None:
            return None
        if _spelt_out(root, {}) > MOST_VALUES:
            raise ValueError(f"its aliases stand for more than {MOST_VALUES} values")
        return loader.construct_document(root)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    # A tag asks for a reader of its own, and each fails in its own way on what does not fit.
    except (LookupError, AttributeError, TypeError, ArithmeticError) as error:
        raise ValueError(f"a value is not what its tag says ({error})") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(" ".join(str(error).split())) from error


def scalars_as_said(text: str) -> dict[str, Any]:
    """The top level of YAML that `parse_yaml` has read, every scalar as it is written: `off`, not
    False. Empty where it is no mapping."""
    import yaml

    said = yaml.load(text, yaml.BaseLoader)
    return said if isinstance(said, dict) else {}


def _spelt_out(node: Any, known: dict[int, int]) -> int:
    """How many values a YAML node stands for, each alias written out. Raises ValueError: it holds
    itself."""
    place = id(node)
    if place not in known:
        known[place] = -1  # not known yet: whoever comes here again has come around
        inner = [] if isinstance(node.value, str) else node.value
        parts = [part for each in inner for part in (each if isinstance(each, tuple) else (each,))]
        known[place] = 1 + sum(_spelt_out(part, known) for part in parts)
    elif known[place] < 0:
        raise ValueError("a value holds itself")
    return known[place]
