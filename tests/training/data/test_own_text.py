"""Text that a draft model writes itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from medusa_heads.config import IGNORED
from medusa_heads.target.target import TargetModel
from medusa_heads.training.data.own_text import OwnText
from tests.conftest import TinyLlama
from tests.training.conftest import VOCAB

Rows = Callable[..., Dataset]


def test_own_text_goes_on_from_the_prompts(target: TargetModel, make_rows: Rows) -> None:
    rows = make_rows(5)
    own_text = OwnText(target, rows, share=0.5, refresh=4, batches_a_step=2, batch_size=3)
    batches = [own_text.batch(step, number) for step in range(8) for number in range(2)]
    written = [batch for batch in batches if batch is not None]
    assert 2 <= len(written) <= 14 and all(len(batch) == 3 for batch in written)
    prompts = [ids[:4] for ids in rows["input_ids"]]
    for row in (row for batch in written for row in batch):
        assert row["input_ids"][:4] in prompts and row["labels"][:4] == [IGNORED] * 4
        assert row["labels"][4:] == row["input_ids"][4:]
        # As long as the corpus's row, unless the text ended.
        assert len(row["input_ids"]) == 24 or row["input_ids"][-1] == 2
    again = OwnText(target, rows, share=0.5, refresh=4, batches_a_step=2, batch_size=3)
    torch.manual_seed(5)
    assert [again.batch(s, n) for s in range(8) for n in range(2)] == batches


def test_own_text_ends_where_learnt_positions_do(make_rows: Rows) -> None:
    """Of rows as long as the context some are nearly all prompt, and others nearly all text."""
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_positions=40, n_embd=8, n_layer=1, n_head=1)
    )
    rows = Dataset.from_list([*make_rows(3, 40), *make_rows(3, 40, prompt=36, seed=1)])
    own_text = OwnText(
        TargetModel(model), rows, share=1.0, refresh=2, batches_a_step=1, batch_size=8
    )
    written = [*(own_text.batch(0, 0) or []), *(own_text.batch(1, 0) or [])]
    assert [len(row["input_ids"]) for row in written] == [40] * 16
    assert {row["labels"].count(IGNORED) for row in written} == {4, 36}


def test_rotary_positions_go_on_and_all_rows_are_written_at_once(
    tiny_llama: TinyLlama, make_rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = tiny_llama(vocab_size=VOCAB, max_position_embeddings=40)
    rows = Dataset.from_list([*make_rows(3, 40), *make_rows(3, 40, prompt=36, seed=1)])
    told: Any = {"share": 1.0, "refresh": 2, "batches_a_step": 1, "batch_size": 8}
    own_text, generate, asked = OwnText(TargetModel(model), rows, **told), model.generate, []

    def counted(ids_BT: Any, **more: Any) -> Any:
        asked.append(len(ids_BT))
        return generate(ids_BT, **more)

    monkeypatch.setattr(model, "generate", counted)
    assert own_text.batch(0, 0) and asked == [16]


@pytest.mark.parametrize(
    "settings",
    [{"return_dict_in_generate": True}, {"prompt_lookup_num_tokens": 2}],
)
def test_own_text_is_drawn_whatever_the_targets_settings_ask_for(
    settings: dict[str, Any], target: TargetModel, make_rows: Rows
) -> None:
    def written() -> Any:
        told: Any = {"share": 1.0, "refresh": 1, "batches_a_step": 1, "batch_size": 3}
        return OwnText(target, make_rows(5), **told).batch(0, 0)

    expected = written()
    target.model.generation_config.update(**settings)
    assert written() == expected


@pytest.mark.parametrize("batches_a_step", [1, 2])
def test_steps_of_another_shape_write_it_anew(
    batches_a_step: int, target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    """As where a run goes on in fewer processes, each with more rows."""
    before = OwnText(target, make_rows(5), share=0.9, refresh=4, batches_a_step=1, batch_size=2)
    assert before.batch(0, 0) is not None
    before.save(tmp_path / "kept.json")
    now = OwnText(
        target, make_rows(5), share=0.9, refresh=4, batches_a_step=batches_a_step, batch_size=4
    )
    now.load(tmp_path / "kept.json")
    batches = [now.batch(step, number) for step in range(4) for number in range(batches_a_step)]
    assert {len(batch) for batch in batches if batch is not None} == {4}
