"""Texts of a server become the tokens that a model writes behind its prompt, whatever the tokenizer
does with the first word that it is given, and end as the target ends its answers."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, load_from_disk
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from medusa_heads.cli.verbs.regenerate import main
from medusa_heads.data.chat import ChatTemplate
from medusa_heads.inference.regeneration.answers import Sampling
from medusa_heads.inference.regeneration.prompts import Prompt
from medusa_heads.inference.regeneration.replies import ends_of_answers, spelling
from medusa_heads.inference.regeneration.server_backend import ServerBackend
from tests.conftest import TinyLlama
from tests.inference.regeneration.completion_server import serving
from tests.inference.speaking import END, TEMPLATE, make_tokenizer

MERGES = [("\u2581", "H"), ("\u2581H", "i"), ("\u2581", "w"), ("o", "k"), ("\u2581", "\u2581")]

TURN = "<turn>"
# As Gemma's: the tokenizer's end is another one than that of a turn.
TURNS = TEMPLATE.replace(END, TURN)
# As Phi's: behind a conversation stands the tokenizer's end as well.
DOUBLE = TURNS.replace("a:{% endif %}", "a:{% else %}" + END + "{% endif %}")
# As GLM's: a turn ends where the next one begins.
OPENING = TEMPLATE.replace("{{ '" + END + "' }}", "").replace(
    "{{ m['role'][0] + ':'", "{% if m['role'] == 'user' %}" + TURN + "{% endif %}{{ m['role'][0]"
)
# As DeepSeek's: a prompt opens a thought, which no earlier turn has.
THINKING = TURNS.replace("a:{% endif %}", "a:(?){% endif %}")
SILENT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
STRICT = "{{ raise_exception('no') }}"


def of_llama(spaces: str) -> Any:
    """A tokenizer that writes spaces as SentencePiece does, and puts one before the first word and
    behind each special token ("all", Llama 2's), before the first word ("first"), or none."""
    pieces = [*dict.fromkeys(["<unk>", "<s>", "</s>", *string.printable[:-5], "\u2581", "\n"])]
    pieces += ["".join(pair) for pair in MERGES]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=MERGES, unk_token="<unk>", fuse_unk=True))
    if spaces == "all":
        marks = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        made.normalizer = normalizers.Sequence(marks)
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=spaces, split=False)
    back = [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(back)
    made.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", vocab["<s>"])])
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


@pytest.mark.parametrize("asked", ["Hi", "[I] Hi [/I]", "Hi\n"])
@pytest.mark.parametrize("spaces", ["all", "first", "never"])
def test_no_space_is_put_before_an_answer(spaces: str, asked: str) -> None:
    tokenizer = of_llama(spaces)
    prompt = Prompt(tokenizer(asked)["input_ids"], greedy=True)
    answers = {
        " wok": ["\u2581w", "ok"],
        "wok": ["w", "ok"],
        " wok\nHi wok": ["\u2581w", "ok", "\n", "H", "i", "\u2581w", "ok"],
    }
    for text, pieces in answers.items():
        tokens = spelling(tokenizer, prompt, text)
        assert tokens is not None and tokenizer.convert_ids_to_tokens(tokens) == pieces


def with_turns(template: str) -> Any:
    tokenizer = make_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": [TURN]})
    return tokenizer


@pytest.mark.parametrize(
    ("template", "end"),
    [
        *((TURNS, TURN), (DOUBLE, TURN), (OPENING, TURN), (THINKING, TURN)),
        *((TEMPLATE, END), (SILENT, END), (STRICT, END)),
    ],
)
def test_the_end_of_an_answer_is_that_which_the_template_writes(template: str, end: str) -> None:
    tokenizer = with_turns(template)
    first, *others = ends_of_answers(ChatTemplate(tokenizer), [96, 97])
    assert (tokenizer.decode([first]), len(others)) == (end, 1)


def test_an_answer_ends_as_the_template_ends_a_turn(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    tokenizer = with_turns(TURNS)
    model = tiny_llama(vocab_size=len(tokenizer))
    turn: Any = tokenizer.convert_tokens_to_ids(TURN)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, turn]
    folder = tmp_path / "target"
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    model.generation_config.eos_token_id = turn  # the only one that is written
    model.lm_head.weight.data[turn] *= 3
    talks = [[{"role": "user", "content": f"{word}?"}] for word in ("how", "why", "where", "who")]
    Dataset.from_dict({"messages": talks}).to_json(tmp_path / "talks.jsonl")
    asked = ["--model_name_or_path", str(folder), "--dataset", str(tmp_path / "talks.jsonl")]
    asked += ["--output_dir", str(tmp_path / "own"), "--max_new_tokens", "32"]
    with serving(model, tokenizer) as server:
        more = ["--backend", "server", "--base_url", server.url, "--greedy_share", "1"]
        assert main([*asked, *more]) == 0
    lasts = {row["labels"][-1] for row in load_from_disk(str(tmp_path / "own"))}
    assert lasts & {tokenizer.eos_token_id, turn} == {turn}


@pytest.mark.parametrize("name", ["stop_reason", "matched_stop"])
@pytest.mark.parametrize(("told", "end"), [(97, 97), (96, 96), (5, 96), (None, 96), ("\n", 96)])
def test_a_server_that_says_what_ended_a_text_is_believed(name: str, told: Any, end: int) -> None:
    """vLLM names an end that is not the tokenizer's, SGLang any."""
    tokenizer = with_turns(TURNS)
    backend = ServerBackend("http://host/v1", "tiny", tokenizer, ends=[96, 97], endpoint="chat")
    choice = {"message": {"content": "abc"}, "finish_reason": "stop", name: told}
    answer = backend._read(Prompt([1], greedy=True), {"choices": [choice]}, Sampling(9))
    assert list(answer.tokens) == [*tokenizer("abc")["input_ids"], end]
