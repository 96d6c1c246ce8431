"""vLLM with our heads: the target's own text, and every counter as simulated.

Equal text proves nothing about heads, since vLLM verifies what they draft. The counters do, as the
negative controls show.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from medusa_heads.checkpoint.files import VOCAB_MATRIX_FILE
from medusa_heads.checkpoint.stored_heads import CONFIG_FILE, SIDECAR_FILE
from medusa_heads.inference.serving.chain import SimulatedChain
from tests.vllm.conftest import Decoded, counters, engine_arguments, has_medusa
from tests.vllm.partly_trained import NUM_HEADS

Checkpoint = Callable[[str], Path]
Simulated = Callable[..., SimulatedChain]
Decode = Callable[..., Decoded]


@pytest.mark.parametrize("kind", ["shared", "own"])
def test_counters_tell_good_heads_from_bad_ones(simulated: Simulated, kind: str) -> None:
    """The heads are partly trained: accepted and rejected at every place of the chain."""
    accepted = simulated(kind).accepted_per_position
    assert all(5 < count < 0.9 * simulated(kind).drafts for count in accepted)
    assert sorted(set(accepted), reverse=True) == accepted


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("method", "kind"),
    [
        pytest.param("medusa", "shared", marks=has_medusa),
        pytest.param("medusa", "own", marks=has_medusa),
        ("custom_class", "shared"),
        ("custom_class", "own"),
        ("custom_class", "reduced-shared"),
        ("custom_class", "reduced-own"),
        ("custom_class", "corrected"),
        ("custom_class", "corrected-own"),
    ],
)
def test_text_and_counters_are_as_simulated(
    checkpoint: Checkpoint,
    simulated: Simulated,
    decode: Decode,
    method: str,
    kind: str,
    processes: int,
) -> None:
    engine = engine_arguments(method, checkpoint(kind), NUM_HEADS)
    decoded = decode(engine | {"tensor_parallel_size": processes})
    assert decoded.texts == simulated(kind).texts
    assert decoded.counters == counters(simulated(kind))


@pytest.mark.parametrize("method", [pytest.param("medusa", marks=has_medusa), "custom_class"])
def test_fewer_tokens_than_heads_and_texts_that_end_early(
    checkpoint: Checkpoint, simulated: Simulated, decode: Decode, method: str
) -> None:
    texts = simulated("own").texts
    ends = frozenset(text[17] for text in texts[:4])
    settings = {"max_new_tokens": 37, "draft_tokens": 2, "end_tokens": ends}
    expected = simulated("own", **settings)
    assert len({len(text) for text in expected.texts}) > 3
    decoded = decode(
        engine_arguments(method, checkpoint("own"), 2),
        max_tokens=37,
        sampling={"ignore_eos": True, "stop_token_ids": sorted(ends)},
    )
    assert decoded.texts == expected.texts
    assert decoded.counters == counters(expected)


@pytest.fixture(params=["vocabulary matrix", "bias flag"])
def robbed(request: pytest.FixtureRequest, checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A checkpoint without a part that only vLLM's own Medusa reads."""
    folder = tmp_path / "heads"
    shutil.copytree(checkpoint("shared"), folder)
    if request.param == "vocabulary matrix":
        (folder / VOCAB_MATRIX_FILE).unlink()
    else:
        config = json.loads((folder / CONFIG_FILE).read_text())
        del config["medusa_fc_bias"]
        (folder / CONFIG_FILE).write_text(json.dumps(config))
    return folder


@has_medusa
def test_lost_parts_show_in_the_counters_and_nowhere_else(
    robbed: Path, simulated: Simulated, decode: Decode
) -> None:
    decoded = decode(engine_arguments("medusa", robbed, NUM_HEADS))
    assert decoded.texts == simulated("shared").texts
    assert decoded.counters != counters(simulated("shared"))


def test_the_plugin_reads_neither(robbed: Path, simulated: Simulated, decode: Decode) -> None:
    """The matrix is the target's own, and the biases stand among the heads."""
    decoded = decode(engine_arguments("custom_class", robbed, NUM_HEADS))
    assert decoded.counters == counters(simulated("shared"))


def test_another_targets_heads_are_refused(
    checkpoint: Checkpoint, decode: Decode, tmp_path: Path
) -> None:
    folder = tmp_path / "heads"
    shutil.copytree(checkpoint("shared"), folder)
    sidecar = json.loads((folder / SIDECAR_FILE).read_text())
    sidecar["target"]["lm_head_sha256"] = "0" * 64
    (folder / SIDECAR_FILE).write_text(json.dumps(sidecar))
    engine = engine_arguments("custom_class", folder, NUM_HEADS)
    with pytest.raises(RuntimeError, match=f"trained for another target.*{'0' * 64}"):
        decode(engine)


def test_more_tokens_than_heads_are_refused(checkpoint: Checkpoint, decode: Decode) -> None:
    engine = engine_arguments("custom_class", checkpoint("shared"), NUM_HEADS + 1)
    with pytest.raises(RuntimeError, match="4 heads draft 1 to 4 tokens, not 5"):
        decode(engine)


def test_pipelines_are_refused(checkpoint: Checkpoint, decode: Decode) -> None:
    engine = engine_arguments("custom_class", checkpoint("shared"), NUM_HEADS)
    # Whichever stage speaks first: the last one, which makes the proposer, or one that misses it.
    refused = "spread the target by --tensor-parallel-size|no attribute 'drafter'"
    with pytest.raises(RuntimeError, match=refused):
        decode(engine | {"pipeline_parallel_size": 2})
