"""Tiny random models: one for every causal-LM type, and variants with adapters, quantised weights
and other attention implementations.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

from scripts.prove.tiny_configs import tiny_config

# Standard deviations of the token embeddings and of all other matrices. Wide weights make varied
# text; which widths do is a matter of the architecture's own scales.
Widths = tuple[float, float]
Build = Callable[[Widths], Any]


def builder(kind: str) -> Build:
    """What makes a model of this type or variant, in fp32 and evaluation mode."""
    return VARIANTS.get(kind) or (lambda widths: _random_model(tiny_config(kind), widths))


def _random_model(config: Any, widths: Widths, **options: Any) -> Any:
    torch.manual_seed(0)
    return random_weights(AutoModelForCausalLM.from_config(config, **options), widths)


# Of zaya, doge and inkling2: zeros in fresh models, which switch off what they scale.
_SWITCHES = ("qk_norm.temp", "self_attn.A", "_input.query")


def random_weights(model: Any, widths: Widths) -> Any:
    """This model in fp32 and evaluation mode, its matrices drawn."""
    model = model.float()
    generator = torch.Generator().manual_seed(0)
    embeddings = model.get_input_embeddings().weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(_SWITCHES):
                parameter.copy_(1.0 + 0.3 * torch.randn(parameter.shape, generator=generator))
            elif parameter.ndim >= 2:
                width = widths[0] if parameter is embeddings else widths[1]
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * width)
    return model.eval()


def _with_attention(kind: str, implementation: str) -> Build:
    return lambda widths: _random_model(
        tiny_config(kind), widths, attn_implementation=implementation
    )


# The libraries of the next three are optional: where one is missing, its rows say so.


def _with_lora(merged: bool) -> Build:
    def build(widths: Widths) -> Any:
        peft = import_module("peft")
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = peft.get_peft_model(_random_model(tiny_config("llama"), widths), lora)
        return (model.merge_and_unload() if merged else model).eval()

    return build


def _torchao_int8(widths: Widths) -> Any:
    quantization = import_module("torchao.quantization")
    model = _random_model(tiny_config("llama"), widths)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def _bitsandbytes(**bits: Any) -> Build:
    def build(widths: Widths) -> Any:
        import_module("bitsandbytes")
        # Its 4-bit weights come in blocks of 64.
        config = LlamaConfig(**(tiny_config("llama").to_dict() | {"intermediate_size": 128}))
        with tempfile.TemporaryDirectory() as folder:
            _random_model(config, widths).save_pretrained(folder)
            return AutoModelForCausalLM.from_pretrained(
                folder, quantization_config=BitsAndBytesConfig(**bits), dtype=torch.float32
            ).eval()

    return build


BITSANDBYTES_4BIT = "llama, bitsandbytes 4-bit"
BITSANDBYTES_8BIT = "llama, bitsandbytes 8-bit with llm_int8_threshold=0"


def _variants() -> Iterator[tuple[str, Build]]:
    yield "llama, LoRA by peft", _with_lora(merged=False)
    yield "llama, LoRA merged", _with_lora(merged=True)
    yield "llama, torchao int8 weight-only", _torchao_int8
    yield BITSANDBYTES_4BIT, _bitsandbytes(load_in_4bit=True)
    yield "llama, bitsandbytes 8-bit", _bitsandbytes(load_in_8bit=True)
    yield BITSANDBYTES_8BIT, _bitsandbytes(load_in_8bit=True, llm_int8_threshold=0.0)
    for kind in ("llama", "mistral", "gemma2", "gpt2", "mixtral", "gpt_oss", "deepseek_v3"):
        for implementation in ("sdpa", "eager"):
            yield f"{kind}, {implementation} attention", _with_attention(kind, implementation)


VARIANTS = dict(_variants())
