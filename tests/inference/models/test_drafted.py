"""A target with a draft model attached: its words for drafts, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_heads import DraftedModel, TargetModel
from medusa_heads.checkpoint.draft_checkpoint import DRAFT_FILE, read_draft_sidecar, save_draft
from medusa_heads.inference.models.assisted import AssistedModel
from medusa_heads.inference.models.named_target import named_target
from tests.conftest import TinyLlama

PROMPT = torch.arange(1, 12)[None]


@pytest.fixture(scope="module")
def pair(tiny_llama: TinyLlama) -> tuple[Any, Any]:
    """A target, and a draft that knows most of it."""
    target, draft = tiny_llama(num_layers=2), tiny_llama(num_layers=2)
    noise = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=noise))
    return target, draft


@pytest.mark.parametrize(
    ("tree", "nodes"),
    [
        ("auto", 64),
        pytest.param("chain", 5, marks=pytest.mark.slow),
        ("chain:2", 3),
        ("dynamic:9", 10),
        pytest.param("sampled:3", 4, marks=pytest.mark.slow),
        ("sampled:3x2x1", 16),
    ],
)
def test_the_words_for_drafts(pair: tuple[Any, Any], tree: str, nodes: int) -> None:
    target, draft = pair
    model = DraftedModel(target, draft, tree=tree)
    assert isinstance(model, AssistedModel) and model.drafter.num_nodes == nodes
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 18}
    expected = target.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **settings)
    got = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **settings)
    assert isinstance(got, torch.Tensor) and torch.equal(got, expected)
    # Of models this small and equal in size, drafts do not pay: adaptive ones may so be none.
    assert tree == "auto" or model.last_stats.tokens_per_step > 1.2


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ("static:4", "dynamic:N, sampled:N or sampled:AxBx.., got 'static:4'"),
        ("dynamic", "must be auto, chain, chain:N"),
        ("sampled", "must be auto, chain, chain:N"),
        ("sampled:2x0", "at least 1 token"),
        ("sampled:2x200", "1 to 199 tokens behind each node"),
        ("chain:0", "at least 1 token"),
        ("chain:x", "at least 1 token"),
        ("chain:\N{SUPERSCRIPT TWO}", "at least 1 token"),
        ("dynamic:99999", "at most 1024 drafted nodes"),
    ],
)
def test_other_words_are_refused(pair: tuple[Any, Any], tree: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        DraftedModel(*pair, tree=tree)
    model = DraftedModel(*pair, tree="chain:2")
    with pytest.raises(ValueError, match=sentence):
        model.use_tree(tree)  # what was drafted before stays
    ids_BT = PROMPT.repeat(2, 1)
    got = model.generate(ids_BT, attention_mask=torch.ones_like(ids_BT), max_new_tokens=4)
    assert model.tree == "chain:2" and isinstance(got, torch.Tensor)


def test_a_depth_that_no_memory_holds_is_refused(pair: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="at most 1024 drafted nodes, got 'depth 1025'"):
        DraftedModel(*pair, tree="chain", depth=1025)


def test_another_vocabulary_is_refused(pair: tuple[Any, Any], tiny_llama: TinyLlama) -> None:
    with pytest.raises(ValueError, match="a vocabulary of 150 tokens, the target one of 199"):
        DraftedModel(pair[0], tiny_llama(vocab_size=150))


def test_a_folder_that_names_its_target_needs_nothing_else(
    pair: tuple[Any, Any], tmp_path: Path
) -> None:
    target, draft = pair
    target.save_pretrained(tmp_path / "target")
    loaded = TargetModel.from_pretrained(str(tmp_path / "target"))
    save_draft(tmp_path / "draft", draft, loaded)
    model = DraftedModel.from_pretrained(tmp_path / "draft", tree="chain")
    got = model.generate(PROMPT, do_sample=False, max_new_tokens=20)
    assert isinstance(got, torch.Tensor) and got.shape == (1, 31)
    assert model.last_stats.tokens_per_step > 1.2
    # A plain model folder names none.
    with pytest.raises(ValueError, match="does not name its target"):
        DraftedModel.from_pretrained(tmp_path / "target")
    DraftedModel.from_pretrained(tmp_path / "target", target=loaded, tree="chain")
    with pytest.raises(ValueError, match="leave them out"):
        DraftedModel.from_pretrained(tmp_path / "draft", target=loaded, dtype="float32")


def test_several_folders_must_draft_for_one_target(pair: tuple[Any, Any], tmp_path: Path) -> None:
    target, draft = pair
    for name in ("one", "other"):
        target.save_pretrained(tmp_path / name)
        loaded = TargetModel.from_pretrained(str(tmp_path / name))
        save_draft(tmp_path / f"for-{name}", draft, loaded)
    folders = [tmp_path / "for-one", tmp_path / "for-other"]
    with pytest.raises(ValueError, match="for-other' drafts for another target"):
        DraftedModel.from_pretrained(folders)
    with pytest.raises(ValueError, match="given twice"):
        DraftedModel.from_pretrained([folders[0], f"{folders[0]}/"])
    # A plain model folder names none, and a target that is given settles it.
    beside = DraftedModel.from_pretrained([folders[0], tmp_path / "other"], tree="chain:2")
    told = DraftedModel.from_pretrained(folders, target=tmp_path / "other", tree="chain:2")
    for model in (beside, told):
        expected = target.generate(PROMPT, do_sample=False, max_new_tokens=24)
        got = model.generate(PROMPT, do_sample=False, max_new_tokens=24)
        assert isinstance(got, torch.Tensor) and torch.equal(got, expected)
        assert sum(model.draft_steps) > 0


def test_the_target_is_named_with_the_revision_it_taught_at(
    pair: tuple[Any, Any], tmp_path: Path
) -> None:
    target = TargetModel(pair[0])
    name, revision = target.model.config._name_or_path, "0" * 40
    target.model.config._name_or_path, target.model.config._commit_hash = "alice/target", revision
    try:
        save_draft(tmp_path, pair[1], target)
    finally:
        target.model.config._name_or_path, target.model.config._commit_hash = name, None
    assert named_target(tmp_path, read_draft_sidecar) == ("alice/target", revision)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object"),
        ('{"format_version": 2}', "format version 2, this package reads 1: upgrade medusa-heads"),
        ('{"format_version": 0}', "format version 0, this package reads 1: it is damaged"),
        ('{"format_version": 1, "target": "x"}', "has no 'target' part: it is damaged"),
    ],
)
def test_a_damaged_story_of_a_draft_model(content: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / DRAFT_FILE).write_text(content)
    with pytest.raises(ValueError, match=sentence):
        DraftedModel.from_pretrained(tmp_path)


def test_sampling_with_the_same_seed_gives_the_same_text(pair: tuple[Any, Any]) -> None:
    target, draft = pair
    model = DraftedModel(target, draft, tree="chain", rng="transformers")
    settings: dict[str, Any] = {"do_sample": True, "temperature": 0.5, "max_new_tokens": 24}
    torch.manual_seed(3)
    expected = target.generate(PROMPT, **settings)
    torch.manual_seed(3)
    got = model.generate(PROMPT, **settings)
    assert isinstance(got, torch.Tensor) and torch.equal(got, expected)


@pytest.mark.slow
def test_a_compiled_target_reads_the_same_drafts(pair: tuple[Any, Any]) -> None:
    """Finished rows stay in its batch, and in the draft's."""
    target, draft = pair
    model = DraftedModel(target, draft, compile=True, compile_backend="eager")
    ids_BT = torch.randint(1, 199, (3, 9), generator=torch.Generator().manual_seed(1))
    settings: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": 18,
        "eos_token_id": list(range(3, 30)),
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(ids_BT),
    }
    got = model.generate(ids_BT, **settings)
    assert isinstance(got, torch.Tensor)
    assert torch.equal(got, target.generate(ids_BT, **settings))
