"""The targets of the proof: the demo's, and a tiny random one of every architecture.

Shapes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from medusa_heads import TargetModel
from medusa_heads.errors import MedusaWarning, UnsupportedArchitecture
from medusa_heads.inference.bench.prompts import held_out_prompts
from medusa_heads.inference.engine.capability import capability, check_batch
from medusa_heads.target.graphs.scripted import ScriptedTarget, scripts
from scripts.prove.architecture_check import ATTEMPTS
from scripts.prove.tiny_configs import tiny_config
from scripts.prove.tiny_models import VARIANTS, Widths, builder, random_weights
from tests.inference.processor_kinds import VOCAB

ASSETS = Path(__file__).resolve().parents[3] / "assets"
DEMO, PROCESSORS = "demo", "processors"
PROMPT = 24  # tokens, of random targets
LONG_PROMPT = 80  # of those with a state or an index: longer than any window or chunk of theirs
REAL_PROMPT = 64  # of the demo's target

Prompts = Callable[[int, int], dict[str, Tensor]]


@dataclass
class ProofTarget:
    """A frozen target in fp32.

    Attributes:
        name: of its architecture, or of what it is for.
        model: transformers' model.
        tree: whether it verifies trees, or chains alone.
        batches: whether it decodes batches.
        recurrent: whether it keeps a state that is put back.
        indexed: whether an indexer chooses what its attention reads.
        prompts: makes inputs of generate(), by rows and seed.
        options: that generate() is given with every text.
        note: what is said of it in the record.
    """

    name: str
    model: Any
    tree: bool
    prompts: Prompts
    batches: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    def __post_init__(self) -> None:
        self.view = TargetModel(self.model)
        self.view.freeze()
        cache = self.view.new_cache()
        self.recurrent, self.indexed = not cache.can_go_back, cache.keeps_index
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    @cached_property
    def scripted(self) -> ScriptedTarget | None:
        """Its view whose forwards are scripts; None where none can be."""
        view = ScriptedTarget(self.model) if scripts(self.view) else None
        try:
            if view is not None:
                capability(view)
        except UnsupportedArchitecture:  # a cache of fixed size, or a mask that is given
            return None
        return view

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.view.vocab_size

    @cached_property
    def spread(self) -> float:
        """How far its logits are apart, as a standard deviation: of some targets so little that all
        tokens are drawn alike, whatever the text."""
        with torch.no_grad():
            logits_TV = self.model(self.prompts(1, 0)["input_ids"]).logits[0]
        return float(logits_TV.std(dim=-1).mean())

    @cached_property
    def convolves(self) -> bool:
        """Whether a part of its state is that of a convolution."""
        cache = self.view.new_cache()
        given = {self.view.cache_argument: cache, "use_cache": True}
        with torch.no_grad():
            self.model(self.prompts(1, 0)["input_ids"], **given)
        made = [getattr(layer, "conv_states", {}).get(0) for layer in cache.layers]
        return any(state is not None for state in made)

    @cached_property
    def attends(self) -> bool:
        """Whether any of its layers keeps keys and values of tokens."""
        return bool(self.view.new_cache().row_layers)

    @property
    def positions(self) -> bool:
        """Whether its forward is told where tokens stand."""
        return "position_ids" in inspect.signature(self.model.forward).parameters


def all_targets() -> list[str]:
    """Names of all targets, also of those that cannot be built here or are not decoded."""
    return [DEMO, *sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), *VARIANTS, PROCESSORS]


def demo_target() -> ProofTarget:
    """The demo's target, on pieces of real programs that it was not trained on."""
    target = TargetModel.from_pretrained(
        str(ASSETS / "demo-target"), dtype=torch.float32, device="cpu", use=None
    )
    tokenizer = AutoTokenizer.from_pretrained(str(ASSETS / "demo-target"))

    def prompts(batch: int, seed: int) -> dict[str, Tensor]:
        texts = held_out_prompts(
            tokenizer, num_prompts=batch, prompt_length=REAL_PROMPT, seed=1 + seed
        )
        return _padded(torch.tensor(texts), unlike=True)

    return ProofTarget(DEMO, target.model, tree=True, prompts=prompts)


def random_target(kind: str, widths: Widths) -> ProofTarget:
    """A tiny random target of an architecture, or of a variant of one.

    Raises:
        UnsupportedArchitecture: it is not decoded with drafts.
        Exception: whatever its own code objects to, where it cannot be built here.
    """
    model = builder(kind)(widths)
    view = TargetModel(model)
    view.freeze()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MedusaWarning)  # of chains, which the record names
        tree = capability(view) == "tree"
    cache = view.new_cache()
    length = PROMPT if cache.can_go_back and not cache.keeps_index else LONG_PROMPT
    prompts = partial(_random_prompts, view.vocab_size, length)
    made = ProofTarget(kind, view.model, tree, prompts(unlike=True))
    _find_batches(made, prompts(unlike=False))
    return made


def _find_batches(target: ProofTarget, alike: Prompts) -> None:
    """Whether it takes batches of unlike rows, of equally long ones, or none; it notes why not."""
    for padding in ([0, 1], [0, 0]):
        try:
            check_batch(target.view, padding)
            if not any(padding) or _pads_rightly(target):
                return
            reason = "generate() itself is wrong on padded rows"
        except UnsupportedArchitecture as error:
            reason = error.reason
        target.prompts = alike
        target.note = f"{reason}: rows of a batch are equally long"
    target.batches, target.note = False, reason


def _pads_rightly(target: ProofTarget) -> bool:
    """Whether generate() writes the same of a row with padding and without."""
    inputs = target.prompts(3, 0)
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    batch_BT = target.model.generate(**inputs, **options)
    for row, mask_T in enumerate(inputs["attention_mask"].bool()):
        alone_1T = inputs["input_ids"][row : row + 1, mask_T]
        mask_1T = torch.ones_like(alone_1T)
        got_1T = target.model.generate(alone_1T, attention_mask=mask_1T, **options)
        if got_1T[0, -16:].tolist() != batch_BT[row, -16:].tolist():
            return False
    return True


def processors_target() -> ProofTarget:
    """A tiny random Llama with few tokens, as processors that count tokens want them."""
    config: Any = tiny_config("llama")
    config.vocab_size = VOCAB
    model = random_weights(LlamaForCausalLM(config), ATTEMPTS[0][0])
    return ProofTarget(
        PROCESSORS, model, tree=True, prompts=_random_prompts(VOCAB, PROMPT, unlike=True)
    )


def _random_prompts(vocab_size: int, length: int, *, unlike: bool) -> Prompts:
    def prompts(batch: int, seed: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(1 + seed)
        ids_BT = torch.randint(1, vocab_size, (batch, length), generator=random)
        return _padded(ids_BT, unlike=unlike)

    return prompts


def _padded(ids_BT: Tensor, *, unlike: bool) -> dict[str, Tensor]:
    """The second and later rows cut at their beginning, and padded on the left, where they are to
    be unlike."""
    mask_BT = torch.ones_like(ids_BT)
    for row in range(len(ids_BT) if unlike else 0):
        mask_BT[row, : row * 5 % (ids_BT.shape[1] - 4)] = 0
    return {"input_ids": ids_BT * mask_BT, "attention_mask": mask_BT}
