"""Files and folders as a corpus: read whole, told what is left out, indexed once."""

from __future__ import annotations

import errno
import gzip
import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from medusa_heads import TargetModel
from medusa_heads.data import encoding
from medusa_heads.inference.lookup import corpus_files
from medusa_heads.inference.lookup.corpus_files import find_corpus, index_files, vocabulary_sha256
from medusa_heads.inference.lookup.corpus_index import CorpusIndex
from medusa_heads.target.fingerprint import file_sha256
from tests.conftest import TinyLlama

DEMO = Path(__file__).parents[3] / "assets" / "demo-target"


pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(DEMO)
    return loaded


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "corpus" / "deep").mkdir(parents=True)
    return tmp_path / "corpus"


def continued(index: CorpusIndex, tokenizer: Any, text: str) -> str:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return str(tokenizer.decode(index.continuation(ids, 40).tokens))


def test_large_documents_are_not_encoded_together(
    folder: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoding takes two hundred times the memory of its text."""
    most = 1 << 14
    monkeypatch.setattr(encoding, "_CHARACTERS_AT_ONCE", most)
    texts = [f"value_{number} = {number}\n" * 140 for number in range(16)]
    (folder / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    expected = CorpusIndex.build(tokenizer(texts, add_special_tokens=False)["input_ids"])
    monkeypatch.setattr(encoding, "_fast_tokenizer", lambda _: None)
    together, usual = list[int](), type(tokenizer).__call__

    def counted(self: Any, texts: list[str], **options: Any) -> Any:
        together.append(sum(map(len, texts)))
        return usual(self, texts, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", counted)
    assert index_files(folder, tokenizer).digest == expected.digest
    assert max(together) < most + max(map(len, texts)) < sum(map(len, texts))


def test_reads_every_kind_of_file(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    (folder / "a.txt").write_text("def alpha(self): return 1", encoding="utf-8")
    (folder / "deep" / "b.py").write_bytes(b"def beta(self):\r\n    return 2")
    rows: list[dict[str, Any]] = [
        {"text": "import gamma as three"},
        {"prompt": "import delta ", "completion": "as four"},
        {"input_ids": tokenizer("raise epsilon(five)")["input_ids"]},
    ]
    (folder / "c.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    (folder / ".hidden").write_text("def zeta(self): return 6", encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        index = index_files(folder, tokenizer)
    assert continued(index, tokenizer, "def alpha(self):") == " return 1"
    assert continued(index, tokenizer, "def beta(self):") == "\n    return 2"
    assert continued(index, tokenizer, "import gamma as") == " three"
    assert continued(index, tokenizer, "import delta") == " as four"
    assert continued(index, tokenizer, "raise epsilon") == "(five)"
    assert continued(index, tokenizer, "zeta(self):") != " return 6"


def test_conversations_go_through_the_template(
    folder: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"messages": [{"role": "user", "content": "import this"}]}
    (folder / "chat.jsonl").write_text(json.dumps(row), encoding="utf-8")
    with pytest.raises(ValueError, match=r"chat\.jsonl:1: the target's chat template refuses"):
        index_files(folder / "chat.jsonl", tokenizer)
    template = "{% for m in messages %}class {{ m['role'] }}: {{ m['content'] }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    index = index_files(folder / "chat.jsonl", tokenizer)
    assert continued(index, tokenizer, "class user:") == " import this"
    monkeypatch.setattr(tokenizer, "chat_template", template.replace("class", "def"))
    index = index_files(folder / "chat.jsonl", tokenizer)  # not as the one before had it
    assert continued(index, tokenizer, "def user:") == " import this"


def test_tells_what_is_left_out(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    (folder / "a.txt").write_text("def alpha(self): return 1", encoding="utf-8")
    (folder / "b.bin").write_bytes(b"\xff\xfe\x00")
    (folder / "c.jsonl").write_text(
        '{"txet": "x"}\n[1]\n{"input_ids": [-1]}\n{"text": "\\ud800"}\n{"input_ids": [9999]}\n',
        encoding="utf-8",
    )
    (folder / "d.json").write_text("[", encoding="utf-8")
    (folder / "e.jsonl").write_text('{"text": "import this"}\n[1]\n{}\n', encoding="utf-8")
    with pytest.warns(
        UserWarning, match=r"left out of the corpus: 5 rows or files, such as .*b\.bin: not"
    ):
        index_files(folder, tokenizer)
    with pytest.raises(
        ValueError,
        match=r"'.*c\.jsonl' cannot be indexed.*none of 5 rows.*c\.jsonl:1: expected 'text'",
    ):
        index_files(folder / "c.jsonl", tokenizer)


def test_a_file_without_a_row_is_one_thing_left_out(
    folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    (folder / "a.txt").write_text("def alpha(self): return 1", encoding="utf-8")
    (folder / "package.json").write_text(json.dumps({"name": "x", "version": 1}, indent=2))
    with pytest.warns(
        UserWarning,
        match=r"corpus: 1 row or file, such as .*package\.json: none of 4 rows.*json:1:",
    ):
        index_files(folder, tokenizer)


def test_files_that_cannot_be_read_are_left_out(
    folder: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "a.txt").write_text("def alpha(self): return 1", encoding="utf-8")
    (folder / "b.py").write_text("def beta(self): return 2", encoding="utf-8")

    def digest(file: Path) -> str:  # whoever runs tests may read all files
        if file.name == "b.py":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
        return file_sha256(file)

    monkeypatch.setattr(corpus_files, "file_sha256", digest)
    with pytest.warns(
        UserWarning, match=r"left out of the corpus: 1 row or file, such as .*b\.py: Permission"
    ):
        index = index_files(folder, tokenizer)
    assert continued(index, tokenizer, "def alpha(self):") == " return 1"
    assert continued(index, tokenizer, "def beta(self):") != " return 2"
    with pytest.raises(ValueError, match=r"b\.py' cannot be indexed: .*b\.py: Permission denied\)"):
        index_files(folder / "b.py", tokenizer)


def test_what_is_neither_file_nor_folder(tokenizer: PreTrainedTokenizerBase) -> None:
    target = TargetModel.from_pretrained(str(DEMO))
    with pytest.raises(
        ValueError, match="expected a corpus, a file or a folder, got an empty path"
    ):
        find_corpus("", target)
    with pytest.raises(ValueError, match=r"'/dev/null' is neither a file nor a folder"):
        index_files("/dev/null", tokenizer)


def test_is_indexed_once(
    folder: Path, cache: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "a.txt").write_text("def alpha(self): return 1", encoding="utf-8")
    index_files(folder, tokenizer)
    (kept,) = (cache / "corpora").iterdir()
    with monkeypatch.context() as reading:
        reading.setattr(corpus_files, "_documents", lambda *_: pytest.fail("read again"))
        index = index_files(folder, tokenizer)
    assert continued(index, tokenizer, "def alpha(self):") == " return 1"
    kept.write_bytes(kept.read_bytes()[:-1])
    assert continued(index_files(folder, tokenizer), tokenizer, "alpha(self):") == " return 1"
    (folder / "a.txt").write_text("def alpha(self): return 2", encoding="utf-8")
    assert continued(index_files(folder, tokenizer), tokenizer, "def alpha(self):") == " return 2"


def test_a_file_is_read_as_its_name_says(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Also where the same bytes were indexed under another name."""
    content = '{"text": "def alpha(self): return 1"}'
    for name, behind in (("a.txt", ' return 1"}'), ("a.jsonl", " return 1")):
        (folder / name).write_text(content, encoding="utf-8")
        index = index_files(folder / name, tokenizer)
        assert continued(index, tokenizer, "def alpha(self):") == behind


def test_the_latest_indexes_are_kept(
    folder: Path, cache: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every change of a file makes another one, of eight bytes a token."""
    monkeypatch.setattr(corpus_files, "_MOST_KEPT", 2)

    def index_anew(number: int) -> None:
        (folder / "a.txt").write_text(f"def alpha(self): return {number}", encoding="utf-8")
        index_files(folder, tokenizer)

    for number in (0, 1, 0, 2):  # the first is looked up once more
        index_anew(number)
        kept = sorted((cache / "corpora").iterdir(), key=lambda file: file.stat().st_mtime)
        for age, file in enumerate(kept[::-1], start=1):
            os.utime(file, (time.time() - 60 * age,) * 2)
    assert len(kept) == 2
    monkeypatch.setattr(corpus_files, "_documents", lambda *_: pytest.fail("read again"))
    index_anew(0)
    index_anew(2)


def test_a_read_only_home(folder: Path, cache: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    cache.write_text("a file, where a folder would be made")
    (folder / "a.txt").write_text("def alpha(self): return 1", encoding="utf-8")
    assert continued(index_files(folder, tokenizer), tokenizer, "alpha(self):") == " return 1"


def test_a_target_finds_its_tokenizer(
    folder: Path, tmp_path: Path, tiny_llama: TinyLlama, tokenizer: PreTrainedTokenizerBase
) -> None:
    target = TargetModel.from_pretrained(str(DEMO))
    (folder / "a.txt").write_text("def alpha(self): return 1", encoding="utf-8")
    found = find_corpus(folder / "a.txt", target)
    assert found is not None and continued(found, tokenizer, "alpha(self):") == " return 1"
    assert found.tokenizer == vocabulary_sha256(tokenizer)
    saved = tmp_path / "saved.safetensors"
    found.save(saved)
    again = find_corpus(str(saved), target)
    assert again is not None and again.largest == found.largest
    CorpusIndex.build([[1, 2]], "another").save(saved)
    with pytest.raises(ValueError, match="another tokenizer than the target's"):
        find_corpus(saved, target)
    with pytest.raises(ValueError, match=r"expected a corpus at .*nowhere.*, found nothing"):
        find_corpus("nowhere", target)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="is an empty folder"):
        find_corpus(tmp_path / "empty", target)
    with pytest.raises(ValueError, match="needs the tokenizer beside the target"):
        find_corpus(folder, TargetModel(tiny_llama()))
    assert find_corpus(None, target) is None
