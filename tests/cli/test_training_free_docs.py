"""The commands and the program of docs/training-free.md, as they stand there, in small."""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path

import pytest

from medusa_heads.cli.main import main
from medusa_heads.inference.models.training_free import DRAFTERS, OWN_MODULES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "training-free.md").read_text(encoding="utf-8")
LIBRARY = {"path": "library.py", "text": "def read(file):\n    return file.read()\n" * 9}
SMALLER = {
    "generate": ["--max_new_tokens", "8", "--dtype", "float32"],
    "chat": ["--max_new_tokens", "8", "--dtype", "float32"],
    "benchmark": [
        "--num_prompts", "1", "--max_new_tokens", "4", "--prompt_length", "8",
        "--dtypes", "float32", "--decodings", "greedy",
    ],
}  # fmt: skip


@pytest.mark.slow
def test_the_page_is_true(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("medusa_heads.inference.drafters.extra.skip_search._TOKENS", 16)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    blocks = {name: re.findall(rf"```{name}\n(.*?)```", PAGE, re.S) for name in ("bash", "python")}
    with monkeypatch.context() as small:
        small.setattr("medusa_heads.data.corpus._read_sources", lambda *_, **__: [LIBRARY])
        for python in blocks["python"]:
            exec(python, {})
    assert capsys.readouterr().out.strip()
    ran = set()
    # Modules learn on a small target in test_train_modules.py.
    small_enough = [block for block in blocks["bash"] if not block.startswith("train-heads")]
    for line in "".join(small_enough).splitlines():
        program, verb, *arguments = shlex.split(line)
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
        assert program == "medusa-heads"
        assert main([verb, *arguments, *SMALLER[verb]]) == 0, capsys.readouterr().err
        ran.add(verb)
    assert ran == set(SMALLER)
    assert all(f"`{drafter}`" in PAGE for drafter in DRAFTERS + OWN_MODULES)
