"""What a drafter's GGUF file holds, and what it is refused for."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from safetensors.torch import load_file

from medusa_heads import HeadsConfig, new_heads
from medusa_heads.checkpoint.checkpoint import save_heads
from medusa_heads.contents import SIDECAR_FILE
from medusa_heads.decoder_shape import BlockShape, DecoderShape
from medusa_heads.interop.export import export_heads
from medusa_heads.interop.gguf_target import TargetFile
from tests.llama_cpp.target_file import turning_neighbours, write_target
from tests.vllm.partly_trained import load_target

USUAL = DecoderShape.of_width(384)
HELD = replace(USUAL, feature_norm="all")
EAGLE3: dict[str, Any] = {"kind": "eagle3", "features": [0, 2, 4], "decoder": HELD}
BLOCK: dict[str, Any] = {"kind": "block", "features": [1, 4], "correction_rank": 8}
YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 512}
LLAMA3 = YARN | {"rope_type": "llama3", "factor": 8.0}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
Heads = Callable[..., Path]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "target.gguf", "BF16")


the_target = cache(load_target)  # which nobody changes


@pytest.fixture
def heads(tmp_path: Path) -> Heads:
    """A checkpoint of heads whose every weight is another."""

    def make(dtype: torch.dtype = torch.float32, **config: Any) -> Path:
        model, size = the_target(), config.get("draft_vocab_size")
        tokens_V = None if size is None else torch.arange(2, 2 + 5 * size, 5)
        made = new_heads(model, HeadsConfig(num_heads=3, **config), tokens_V)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        save_heads(tmp_path / "heads", made.to(dtype), model)
        return tmp_path / "heads"

    return make


def written(heads: Path, target: Path, to: str = "gguf") -> GGUFReader:
    exported = export_heads(heads, heads.parent / to, "gguf", target_gguf=str(target))
    (file,) = exported.folder.iterdir()
    return GGUFReader(file)


def said(reader: GGUFReader, name: str) -> Any:
    return reader.fields[name].contents()


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16]
)
def test_an_eagle3_layer_keeps_its_values(heads: Heads, target: Path, dtype: torch.dtype) -> None:
    checkpoint = heads(dtype, draft_vocab_size=300, **EAGLE3)
    reader = written(checkpoint, target)
    assert said(reader, "general.architecture") == "eagle3"
    assert said(reader, "eagle3.target_layers") == [1, 3, 5]  # counted by what goes into them
    assert said(reader, "eagle3.norm_before_residual") and said(reader, "eagle3.norm_before_fc")
    assert said(reader, "eagle3.rope.freq_base") == 10_000.0
    ours = load_file(checkpoint / "medusa_lm_head.safetensors")
    theirs = {tensor.name: tensor for tensor in reader.tensors}

    def values(name: str) -> torch.Tensor:
        tensor = theirs[name]
        raw = torch.from_numpy(np.array(tensor.data))
        is_half = dtype == torch.bfloat16 and tensor.tensor_type.name == "BF16"
        assert is_half or raw.dtype == torch.float32
        return raw.view(torch.bfloat16) if is_half else raw

    layer = "decoder.midlayer."
    for name, own in (
        ("fc.weight", ours["decoder.fc.weight"]),
        ("blk.0.attn_v.weight", ours[f"{layer}self_attn.v_proj.weight"]),
        ("blk.0.ffn_down.weight", ours[f"{layer}mlp.down_proj.weight"]),
        ("blk.0.attn_norm_2.weight", ours[f"{layer}hidden_norm.weight"].float()),
        ("blk.0.ffn_norm.weight", ours[f"{layer}post_attention_layernorm.weight"].float()),
        ("enc.output_norm.weight", ours["decoder.input_norm.weight"].float()),
        ("output_norm.weight", ours["decoder.norm.weight"].float()),
    ):
        assert torch.equal(values(name), own), name
    for part in "qk":
        turned = turning_neighbours(ours[f"{layer}self_attn.{part}_proj.weight"], USUAL.head_dim)
        assert torch.equal(values(f"blk.0.attn_{part}.weight"), turned)
    assert theirs["d2t"].data.tolist() == list(range(2, 2 + 5 * 300, 5))
    assert len(theirs) == 15  # and nothing else


def test_a_block_says_how_it_drafts(heads: Heads, target: Path) -> None:
    reader = written(heads(**BLOCK), target)
    assert said(reader, "general.architecture") == "dflash"
    assert said(reader, "dflash.target_layers") == [2, 5]
    assert said(reader, "dflash.block_size") == 3 and said(reader, "dflash.sample_from_anchor")
    assert not said(reader, "dflash.attention.causal")
    model = load_target()
    mask = new_heads(model, HeadsConfig(num_heads=3, **BLOCK)).config.decoder
    assert isinstance(mask, BlockShape)
    assert said(reader, "tokenizer.ggml.mask_token_id") == mask.mask_token_id
    names = {tensor.name for tensor in reader.tensors}
    assert {"markov_w1.weight", "markov_w2.weight", "blk.0.attn_q_norm.weight"} < names
    assert not names & {"output.weight", "d2t", "token_embd.weight"}  # the target's are read
    of_target = GGUFReader(target)
    for name in of_target.fields:
        if name.startswith("tokenizer."):
            assert said(reader, name) == said(of_target, name)


@pytest.mark.parametrize("rule", [pytest.param("linear", marks=pytest.mark.slow), "yarn"])
def test_positions_that_are_stretched_are_said(heads: Heads, target: Path, rule: str) -> None:
    rope = YARN | {"rope_type": rule, "rope_theta": 2e4, "factor": 2.0}
    if rule == "linear":
        del rope["original_max_position_embeddings"]
    shape = replace(HELD, rope_parameters=rope)
    reader = written(heads(**EAGLE3 | {"decoder": shape}), target)
    assert said(reader, "eagle3.rope.scaling.type") == rule
    assert said(reader, "eagle3.rope.scaling.factor") == 2.0
    if rule == "yarn":
        assert said(reader, "eagle3.rope.scaling.original_context_length") == 512
    assert said(reader, "eagle3.rope.freq_base") == 2e4


def test_frequencies_of_llama3_are_written_as_divisors(heads: Heads, target: Path) -> None:
    shape = replace(HELD, rope_parameters=LLAMA3)
    reader = written(heads(**EAGLE3 | {"decoder": shape}), target)
    (divisors,) = (each.data for each in reader.tensors if each.name == "rope_freqs.weight")
    assert len(divisors) == HELD.head_dim // 2
    assert divisors[0] == 1 and np.isclose(divisors[-1], 8)  # short waves stay, long ones stretch
    assert (np.diff(divisors) >= -1e-5).all()
    assert "eagle3.rope.scaling.type" not in reader.fields


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EAGLE3 | {"decoder": USUAL}, "holds no norm for each feature .fc_norm.: train with feat"),
        (EAGLE3 | {"decoder": None}, "holds no norm for each feature"),
        (
            EAGLE3 | {"features": [1, 4]},
            "read 3 layers of the target, and these read 2",
        ),
        (EAGLE3 | {"features": [1, 3, 5]}, "no output of the target's last layer .5.: train with"),
        (EAGLE3 | {"decoder": replace(HELD, norm_output=True)}, "knows no norm_output"),
        (
            EAGLE3 | {"decoder": replace(HELD, rope_parameters=YARN | {"beta_fast": 16.0})},
            "holds no beta_fast of the positions",
        ),
        (EAGLE3 | {"decoder": replace(HELD, attention_bias=True)}, "no biases in the attention"),
        (
            BLOCK | {"decoder": replace(BlockShape.of_width(384), rope_parameters=LLAMA3)},
            "linear and yarn, and these heads' turn by llama3",
        ),
        (BLOCK | {"features": [1, 5]}, "no output of the target's last layer"),
        (BLOCK | {"features": None}, "layers that read features, and these read the target's last"),
        (
            {"kind": "hydra"},
            "holds no hydra heads: train kind 'eagle3' or 'block'",
        ),
    ],
)
def test_heads_that_it_cannot_hold_are_refused(
    heads: Heads, target: Path, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    checkpoint = heads(**config)
    with pytest.raises(ValueError, match=message):
        export_heads(checkpoint, tmp_path / "out", "gguf", target_gguf=str(target))
    assert not (tmp_path / "out").exists()


def test_other_targets_are_refused(heads: Heads, target: Path, tmp_path: Path) -> None:
    checkpoint = heads(**EAGLE3)
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="--to gguf wants the target's GGUF file: give target_g"):
        export_heads(checkpoint, out, "gguf")
    with pytest.raises(ValueError, match="target_gguf is for --to gguf, and eagle3 reads none"):
        export_heads(checkpoint, out, "eagle3", target_gguf=str(target))
    with pytest.raises(ValueError, match=r"expected the target's GGUF file at 'nowhere.gguf'"):
        export_heads(checkpoint, out, "gguf", target_gguf="nowhere.gguf")
    broken = tmp_path / "broken.gguf"
    for content in (b"", b"GGUF", b"no such file", target.read_bytes()[:3000]):
        broken.write_bytes(content)
        with pytest.raises(ValueError, match="is no GGUF file of a language model"):
            export_heads(checkpoint, out, "gguf", target_gguf=str(broken))
    # Another matrix of the same sizes.
    tensor = next(t for t in GGUFReader(target).tensors if t.name == "token_embd.weight")
    other = bytearray(target.read_bytes())
    other[tensor.data_offset + 1] ^= 1
    broken.write_bytes(other)
    with pytest.raises(ValueError, match="another target: the vocabulary matrix of the GGUF file"):
        export_heads(checkpoint, out, "gguf", target_gguf=str(broken))
    for key, sizes in (("a vocabulary of 4096", (6, 384, 7)), ("a hidden size", (6, 64, 4096))):
        write_sizes(broken, *sizes)
        with pytest.raises(ValueError, match=key):
            export_heads(checkpoint, out, "gguf", target_gguf=str(broken))
    write_sizes(broken, 4, 384, 4096)
    with pytest.raises(ValueError, match="read layer 4 of their target, and that of the GGUF file"):
        export_heads(checkpoint, out, "gguf", target_gguf=str(broken))
    assert not out.exists()


def test_without_the_library_it_is_named(
    heads: Heads, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = heads(**EAGLE3)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match="by a library that is not installed: pip install gguf"):
        export_heads(checkpoint, tmp_path / "out", "gguf", target_gguf=str(target))


def test_what_is_not_known_of_a_target_is_said(heads: Heads, target: Path, tmp_path: Path) -> None:
    """Its matrix may lie in another of several files, and heads that others trained do not say
    what they know; layers that predict more tokens are none that drafters are handed."""
    checkpoint = heads(**BLOCK)
    file = tmp_path / "one.gguf"

    def notices(**of: Any) -> tuple[str, ...]:
        write_sizes(file, 6, 384, 4096, **of)
        out = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        return export_heads(checkpoint, out, "gguf", target_gguf=str(file)).notices

    split = notices(split=2, embeddings=True)
    assert "it does not hold its vocabulary matrix" in split[0] and len(split) == 2
    assert "llama.cpp of October 2026 hands drafters no layers of qwen2" in notices(kind="qwen2")[1]
    with pytest.raises(ValueError, match=r"no output of the target's last layer .4.: train with"):
        notices(modules=1)
    said_of_heads = json.loads((checkpoint / SIDECAR_FILE).read_text())
    said_of_heads["target"]["lm_head_sha256"] = None
    (checkpoint / SIDECAR_FILE).write_text(json.dumps(said_of_heads))
    exported = export_heads(checkpoint, tmp_path / "unknown", "gguf", target_gguf=str(target))
    assert "sizes alone: nothing more is known of that of the heads" in exported.notices[0]


def test_a_list_of_the_tokenizer_may_be_empty(heads: Heads, tmp_path: Path) -> None:
    file, name = tmp_path / "one.gguf", "tokenizer.ggml.merges"
    write_sizes(file, 6, 384, 4096, merges="four")
    before, after = file.read_bytes().split(name.encode(), 1)
    array, of_strings, no_bytes = 9, 8, 0
    empty = struct.pack("<IIQ", array, of_strings, no_bytes)  # as long as a string of four letters
    file.write_bytes(before + name.encode() + empty + after[len(empty) :])
    reader = written(heads(**BLOCK), file)
    assert name not in reader.fields and len(said(reader, "tokenizer.ggml.tokens")) == 4096


def write_sizes(
    file: Path,
    layers: int,
    hidden_size: int,
    vocab_size: int,
    *,
    kind: str = "llama",
    modules: int = 0,
    split: int = 0,
    embeddings: bool = False,
    merges: str | None = None,
) -> None:
    """A target that has nothing but sizes, and perhaps random embeddings."""
    writer = GGUFWriter(file, kind)
    writer.add_block_count(layers)
    writer.add_embedding_length(hidden_size)
    writer.add_token_list([f"t{i}" for i in range(vocab_size)])
    if modules:
        writer.add_uint32(f"{kind}.nextn_predict_layers", modules)
    if merges is not None:
        writer.add_string("tokenizer.ggml.merges", merges)
    if split:
        writer.add_uint16("split.count", split)
    if embeddings:
        matrix = np.random.default_rng(0).normal(size=(vocab_size, hidden_size))
        writer.add_tensor("token_embd.weight", matrix.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert TargetFile.read(str(file)).vocab_size == vocab_size
