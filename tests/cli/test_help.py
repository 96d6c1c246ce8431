"""The helps of all commands: one style, each flag once, no default that says nothing."""

from __future__ import annotations

from importlib import import_module, metadata
from typing import Any

import pytest

from medusa_heads.cli.flags import arguments
from medusa_heads.cli.main import VERBS
from medusa_heads.inference.acceptance import RULES
from medusa_heads.inference.bench.methods import COMPILE, CORPUS, KERNELS, STEPS, STREAM

COMMANDS = {
    "train-heads": "medusa_heads.cli.train_heads",
    "train-draft": "medusa_heads.cli.train_draft",
    **{f"medusa-heads {verb}": module for verb, (module, _) in VERBS.items()},
}


@pytest.fixture
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The parser that a command makes."""
    made = []
    make = arguments.make_parser

    def keep(*given: Any) -> Any:
        made.append(make(*given))
        return made[0]

    monkeypatch.setattr(arguments, "make_parser", keep)
    with pytest.raises(SystemExit):
        import_module(COMMANDS[request.param]).main(["--help"])
    return made[0]


@pytest.mark.parametrize("parser", COMMANDS, indirect=True)
def test_every_flag_is_explained_in_a_sentence(parser: Any) -> None:
    for action in parser._actions[1:]:  # the first is argparse's own --help
        sentence = action.help or ""
        assert sentence.endswith("."), (action.dest, sentence)
        assert sentence[0].isupper() or sentence.startswith("torch"), (action.dest, sentence)
        assert not sentence.startswith("Of "), (action.dest, sentence)


@pytest.mark.parametrize("parser", COMMANDS, indirect=True)
def test_the_help_shows_each_flag_once_and_no_empty_default(parser: Any) -> None:
    shown = parser.format_help()
    assert "(default: None)" not in shown and "(default: [])" not in shown
    # As Python 3.13 shows them, only the last one is followed by its value.
    words = shown.replace(",", " ").split()
    for action in parser._actions[1:]:
        both = [flag for flag in action.option_strings if flag in words]
        assert both[:1] == action.option_strings[:1]
        assert not any("-" in flag[2:] for flag in both)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_the_version(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        import_module(COMMANDS[command]).main(["--version"])
    assert not end.value.code
    assert capsys.readouterr().out == f"medusa-heads {metadata.version('medusa-heads')}\n"


@pytest.mark.parametrize("parser", ["train-heads"], indirect=True)
def test_the_opposite_of_a_switch_says_so(parser: Any) -> None:
    shown = " ".join(parser.format_help().split())
    assert "--no_load_best_model_at_end Switch --load_best_model_at_end off." in shown
    assert shown.startswith("usage: train-heads --model_name_or_path MODEL_NAME_OR_PATH --dataset")


@pytest.mark.parametrize("parser", ["medusa-heads generate", "medusa-heads chat"], indirect=True)
def test_a_flag_that_begins_as_the_opposite_of_a_switch_is_no_such(parser: Any) -> None:
    shown = " ".join(parser.format_help().split())
    assert "--no_repeat_ngram_size NO_REPEAT_NGRAM_SIZE Never repeat a sequence of this" in shown


@pytest.mark.parametrize("parser", ["medusa-heads generate"], indirect=True)
def test_the_help_tells_the_defaults_of_lossy_rules(parser: Any) -> None:
    told = {action.dest: action.help for action in parser._actions}
    for rule in RULES.values():
        for name, (default, _) in rule.settings.items():
            assert told[name].endswith(f" Default: {default:g}."), name


@pytest.mark.parametrize("parser", ["medusa-heads benchmark"], indirect=True)
def test_the_help_names_every_ending_of_a_method(parser: Any) -> None:
    shown = " ".join(parser.format_help().split())
    for ending in (CORPUS, STREAM, COMPILE, STEPS, KERNELS):
        assert f"NAME{ending}" in shown, ending


@pytest.mark.parametrize("parser", ["train-heads", "train-draft"], indirect=True)
def test_a_switch_that_is_neither_on_nor_off_is_switched_on_by_its_name(parser: Any) -> None:
    for given, told in (([], None), (["--bf16"], True), (["--bf16", "false"], False)):
        assert parser.parse_known_args(given)[0].bf16 is told
