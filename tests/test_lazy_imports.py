"""`import medusa_heads` and `--help` stay cheap: neither loads torch."""

import os
import subprocess
import sys
from importlib import metadata

import pytest

import medusa_heads

HEAVY = ("torch", "transformers", "datasets", "matplotlib")

WITH_A_MODEL = (
    "accelerate", "bitsandbytes", "datasets", "matplotlib", "pandas", "peft", "pyarrow",
    "psutil", "rich", "sympy", "wandb",
    "torch._dynamo", "torch._inductor", "torch.distributed.tensor",
    "transformers.generation.utils", "transformers.integrations.sdpa_attention",
    "transformers.masking_utils", "transformers.modeling_utils", "transformers.trainer",
)  # fmt: skip


def fresh(program: str) -> str:
    """Stdout of a program in an interpreter of its own."""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_loads_nothing_heavy() -> None:
    program = f"import sys, medusa_heads; print([m for m in {HEAVY} if m in sys.modules])"
    assert fresh(program).strip() == "[]"


@pytest.mark.slow
def test_what_decodes_waits_with_what_only_models_need() -> None:
    """Beyond torch and transformers themselves, no library and no part of them that takes seconds:
    those load with the first model, or never. Heads put on a model in memory import nothing heavy
    that the model did not."""
    program = f"""
import sys, torch, transformers
before = set(sys.modules)
from medusa_heads import DraftedModel, MedusaHeads, MedusaModel, TargetModel, TrainingFreeModel
print(sorted(set({WITH_A_MODEL}) & (set(sys.modules) - before)))
from medusa_heads import HeadsConfig
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
before = set(sys.modules)
target = TargetModel(model)
MedusaModel(target, MedusaHeads.from_target(target, HeadsConfig(num_heads=1)), tree="chain")
print(sorted(set({WITH_A_MODEL}) & (set(sys.modules) - before)))
"""
    assert fresh(program).split() == ["[]", "[]"]


@pytest.mark.parametrize(
    ("module", "flag", "said"),
    [
        *((module, "--help", "usage") for module in ("verbs.calibrate", "main")),
        ("train_heads", "--help", "--self_distill"),
        ("train_draft", "--help", "--on_policy_share"),
        ("main", "--version", f"medusa-heads {metadata.version('medusa-heads')}"),
        ("train_heads", "--version", f"medusa-heads {metadata.version('medusa-heads')}"),
    ],
)
def test_help_and_version_load_nothing_heavy(module: str, flag: str, said: str) -> None:
    program = f"""
import sys
from medusa_heads.cli.{module} import main
sys.argv = ["command", "{flag}"]
try:
    main()
except SystemExit as stop:
    assert stop.code in (0, None), stop.code
print([m for m in {HEAVY} if m in sys.modules])
"""
    before = os.times().children_user
    out = fresh(program)
    seconds = os.times().children_user - before  # its own, however busy the machine
    assert said in out.lower()
    assert out.splitlines()[-1] == "[]"
    assert seconds < 1, f"{flag} took {seconds:.1f} s"


def test_every_public_name_resolves() -> None:
    assert set(medusa_heads.__all__) <= set(dir(medusa_heads))
    for name in medusa_heads.__all__:
        assert getattr(medusa_heads, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'MedusaModle'"):
        _ = medusa_heads.MedusaModle
