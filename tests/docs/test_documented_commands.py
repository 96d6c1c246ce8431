"""Every command that a page names exists, with every flag that it is given.

`test_readme.py`, `test_hub_docs.py` and `test_training_free_docs.py` run whole pages. Here the
commands of all pages, configurations and module docstrings are parsed by the real parsers, not run.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from medusa_heads.cli.main import VERBS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
SOURCES = [
    *(ROOT / "medusa_heads" / "cli").rglob("*.py"),
    *(ROOT / "scripts").rglob("*.py"),
]
COMMANDS = {
    "train-heads": "medusa_heads.cli.train_heads",
    "train-draft": "medusa_heads.cli.train_draft",
    **{f"medusa-heads {verb}": module for verb, (module, _) in VERBS.items()},
}
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
INLINE = re.compile(r"`([^`]+)`")
LAUNCHED = re.compile(
    r"^accelerate launch .*-m medusa_heads\.cli\.(train_heads|train_draft|verbs\.prepare_hidden)\b"
)
PYTHON = re.compile(r"^python (?:-m (scripts(?:\.\w+)+)|(scripts(?:/\w+)+)\.py)")
# Flags of vLLM, of argparse and of launchers.
FOREIGN = {
    "additional_config",
    "data_parallel_size",
    "distributed_executor_backend",
    "enable_lora",
    "help",
    "machine_rank",
    "model_loader_extra_config",
    "num_processes",
    "pipeline_parallel_size",
    "spec_type",
    "speculative_config",
    "tensor_parallel_size",
    "version",
}


class Parsed(Exception):
    """The command line was understood; nothing of it is run."""


def commands_of(text: str) -> Iterator[str]:
    """Lines of a shell that run a command of this repository."""
    for line in re.sub(r"\\\n[#\s]*", " ", text).splitlines():
        words = line.strip().lstrip("#").strip().removeprefix(".venv/bin/")
        if find_command(words) is not None:
            yield words


def find_command(line: str) -> tuple[str, str] | None:
    """The module behind a command line, and its arguments."""
    if found := LAUNCHED.match(line):
        return f"medusa_heads.cli.{found[1]}", line[found.end() :]
    if found := PYTHON.match(line):
        module = found[1] or found[2].replace("/", ".")
        runs_whole = (ROOT / module.replace(".", "/") / "__main__.py").is_file()
        return f"{module}.__main__" if runs_whole else module, line[found.end() :]
    program, _, rest = line.partition(" ")
    if program == "medusa-heads" and re.match(r"[a-z]", rest):
        verb, _, rest = rest.partition(" ")
        return COMMANDS.get(f"medusa-heads {verb}", f"medusa_heads.cli has no {verb}"), rest
    return (COMMANDS[program], rest) if program in COMMANDS and rest else None


def documented() -> Iterator[tuple[str, str, bool]]:
    """Where a command stands, the command, and whether it is whole."""
    for page in PAGES:
        name, text = page.relative_to(ROOT).as_posix(), page.read_text(encoding="utf-8")
        for _, block in FENCED.findall(text):
            yield from ((name, command, True) for command in commands_of(block))
        for inline in INLINE.findall(FENCED.sub("", text)):
            command = " ".join(inline.split())
            if find_command(command) is not None:
                yield name, command, False
    for config in CONFIGS:
        comments = re.sub(r"^[^#\n].*\n", "", config.read_text(encoding="utf-8"), flags=re.M)
        yield from ((config.name, command, True) for command in commands_of(comments))
    for source in SOURCES:
        docstring = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
        yield from ((source.name, command, True) for command in commands_of(docstring))


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that parsing a documented command reads."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("configs", "assets", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    template = folder / "runs" / "corpora" / "chat.jinja"  # docs/data.md makes it
    template.parent.mkdir(parents=True)
    template.write_text("{{ messages }}")
    tutorial = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    ((_, config),) = [block for block in FENCED.findall(tutorial) if block[0] == "yaml"]
    (folder / "my-heads.yaml").write_text(config)
    return folder


@pytest.mark.parametrize(("place", "command", "whole"), sorted(set(documented())))
def test_a_command_is_understood(
    place: str, command: str, whole: bool, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = find_command(command)
    assert found is not None
    module: Any = import_module(found[0])
    is_ours = found[0].startswith("medusa_heads.cli") or hasattr(module, "command")
    parsing = import_module("medusa_heads.cli.flags.arguments") if is_ours else module
    arguments = shlex.split(found[1], comments=True)
    if not hasattr(parsing, "parse_arguments") and not hasattr(parsing, "HfArgumentParser"):
        assert not any(word.startswith("-") for word in arguments), f"{place}: takes no flags"
        return
    stop_after_parsing(parsing, whole, monkeypatch)
    monkeypatch.chdir(clone)
    monkeypatch.setattr("sys.argv", ["command", *arguments])
    with pytest.raises(Parsed):
        module.main(arguments) if "cli" in found[0] else module.main()


def stop_after_parsing(module: Any, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the module's own parser read its arguments, and nothing else happen.

    A command inside a sentence may leave out what is required, and hold a blank.
    """
    if hasattr(module, "parse_arguments"):
        parse = module.parse_arguments

        def read(*given: Any, **named: Any) -> None:
            try:
                parse(*given, **named)
            except ValueError as error:
                assert not whole and "unknown argument" not in str(error), error
            raise Parsed

        monkeypatch.setattr(module, "parse_arguments", read)
        return
    parser = module.HfArgumentParser
    into_dataclasses = parser.parse_args_into_dataclasses

    def read_all(self: Any, *given: Any, **named: Any) -> None:
        into_dataclasses(self, *given, **named)
        raise Parsed

    monkeypatch.setattr(parser, "parse_args_into_dataclasses", read_all)


def test_a_flag_named_in_a_sentence_is_one() -> None:
    heads_config = ROOT / "medusa_heads" / "config.py"
    code = "".join(
        path.read_text(encoding="utf-8")
        for folder in ("training", "inference", "medusa_heads", "scripts")
        for path in sorted((ROOT / folder).rglob("*.py"))
    )
    code += heads_config.read_text(encoding="utf-8")
    fields = set(re.findall(r"^    (\w+): ", code, re.M)) | set(re.findall(r'"--(\w+)"', code))
    for page in PAGES:
        text = FENCED.sub("", page.read_text(encoding="utf-8"))
        for inline in INLINE.findall(text):
            if re.match(r"(vllm|ray|pip|pytest|hf|make|accelerate) ", inline):
                continue
            for flag in re.findall(r"(?<![\w-])--([a-z][\w-]*)", inline):
                name = flag.replace("-", "_")
                assert name in fields | FOREIGN, f"{page.name}: --{flag} in `{inline}`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_python_example_imports_is_there(page: Path) -> None:
    for language, block in FENCED.findall(page.read_text(encoding="utf-8")):
        if language != "python":
            continue
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("medusa_heads"):
                module = import_module(str(node.module))
                assert all(hasattr(module, alias.name) for alias in node.names), block


def test_no_page_advises_a_package_that_is_not_published() -> None:
    published = "pip install medusa-heads", "pip install 'medusa-heads"
    code = [path for top in ("training", "inference") for path in (ROOT / top).rglob("*.py")]
    code += [path for path in (ROOT / "medusa_heads").rglob("*.py") if path.is_file()]
    for path in [*PAGES, *CONFIGS, *code]:
        text = path.read_text(encoding="utf-8")
        assert not any(words in text for words in published), path
