"""Values of a YAML file, which are of the types of their flags."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from medusa_heads.cli.flags.config_file import read_config
from tests.cli.flags.test_arguments import write


@dataclass
class Words:
    """Fields whose values are words that YAML reads as something else."""

    cache: Literal["off", "auto"] = "auto"
    each: Literal["yes", "no", "on"] | None = None
    revision: str | None = None
    kinds: list[str] = field(default_factory=list)
    loud: bool = True


def test_a_file_in_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves --config=~/run.yaml as it is."""
    write(tmp_path, "kinds: a")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_config("~/run.yaml", (Words,)) == {"kinds": ["a"]}


def test_a_word_is_what_stands_in_the_file_whatever_yaml_makes_of_it(tmp_path: Path) -> None:
    lines = "cache: off\neach: yes\nrevision: 2024-01-01\nkinds: [no, 1.10, 0x10]\nloud: off\n"
    said = read_config(write(tmp_path, lines), (Words,))
    expected = {"cache": "off", "each": "yes", "revision": "2024-01-01"}
    assert said == expected | {"kinds": ["no", "1.10", "0x10"], "loud": False}
    said = read_config(write(tmp_path, "kinds: on\nrevision: 007\neach: null\n"), (Words,))
    assert said == {"kinds": ["on"], "revision": "007", "each": None}
    with pytest.raises(ValueError, match=r"cache must be one of \['off', 'auto'\], got False"):
        read_config(write(tmp_path, "cache: no"), (Words,))
