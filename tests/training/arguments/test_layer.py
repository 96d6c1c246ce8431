"""The shape of an eagle3 layer as a run is told of it, and that such layers learn."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from datasets import Dataset

from medusa_heads.config import HeadsConfig
from medusa_heads.decoder_shape import DecoderShape
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.layer import LayerArguments
from medusa_heads.training.runs.heads import train_heads
from tests.training.runs.test_heads import quick

EAGLE3 = HeadsConfig(kind="eagle3", num_heads=3, vocab_matrix="own")


def test_what_is_not_asked_for_leaves_the_configuration_as_it_is() -> None:
    assert LayerArguments().shaped(EAGLE3, 16) is EAGLE3
    assert LayerArguments().shaped(HeadsConfig(), 7) == HeadsConfig()


def test_a_shape_that_is_given_keeps_its_sizes() -> None:
    usual = DecoderShape.of_width(16)
    shaped = LayerArguments(norm_output=True).shaped
    assert shaped(EAGLE3, 16) == replace(EAGLE3, decoder=replace(usual, norm_output=True))
    narrow = replace(usual, intermediate_size=8)
    given = replace(EAGLE3, decoder=narrow)
    assert shaped(given, 16).decoder == replace(narrow, norm_output=True)


def test_what_is_normalised_of_features_can_be_said() -> None:
    config = replace(EAGLE3, features=[0, 1])
    shaped = LayerArguments(feature_norm="all").shaped
    assert shaped(config, 16).decoder == replace(DecoderShape.of_width(16), feature_norm="all")
    with pytest.raises(ValueError, match="feature_norm is said of features, and these heads read"):
        shaped(EAGLE3, 16)
    with pytest.raises(ValueError, match=r"feature_norm must be one of .* got 'some'"):
        LayerArguments(feature_norm="some").shaped(config, 16)  # type: ignore[arg-type]


def test_usual_features_are_named_by_the_depth_of_the_target() -> None:
    for layers, expected in (
        (5, (1, 2, 3)),
        (6, (1, 3, 4)),
        (9, (1, 4, 7)),
        (10, (1, 4, 6)),
        (32, (1, 15, 28)),  # what goes into layers 2, 16 and 29 there
    ):
        named = LayerArguments(usual_features=True).reading(EAGLE3, lambda: layers).features  # noqa: B023
        assert named == expected and max(expected) < layers - 1
    given = replace(EAGLE3, features=[0, 3])
    assert LayerArguments(usual_features=True).reading(given, lambda: 6) is given
    assert LayerArguments().reading(EAGLE3, lambda: 6) is EAGLE3
    assert LayerArguments(usual_features=True).shaped(EAGLE3, 16) is EAGLE3
    LayerArguments(usual_features=True, feature_norm="all").check(EAGLE3)
    with pytest.raises(ValueError, match="of five or more, and the target has 4: name"):
        LayerArguments(usual_features=True).reading(EAGLE3, lambda: 4)


def test_heads_and_widths_without_such_a_layer_are_refused() -> None:
    shaped = LayerArguments(norm_output=True).shaped
    with pytest.raises(ValueError, match="and hydra heads have none: leave it out, or set kind"):
        shaped(HeadsConfig(kind="hydra"), 16)
    with pytest.raises(ValueError, match="an even hidden size, this target's is 7"):
        shaped(EAGLE3, 7)


@pytest.mark.slow
def test_training_makes_heads_better(
    target: TargetModel, make_rows: Callable[..., Dataset], tmp_path: Path
) -> None:
    losses, rows = [], make_rows(16)
    for steps in (1, 36):
        heads = train_heads(
            target,
            rows,
            eval_dataset=rows,
            config=LayerArguments(norm_output=True).shaped(EAGLE3, target.hidden_size),
            output_dir=tmp_path / str(steps),
            training_args=quick(tmp_path, steps, learning_rate=2e-2),
        )
        assert isinstance(heads.config.decoder, DecoderShape) and heads.config.decoder.norm_output
        metrics = json.loads((tmp_path / str(steps) / "metrics.json").read_text())
        losses.append(metrics["eval_loss"])
    assert losses[1] < 0.75 * losses[0]
