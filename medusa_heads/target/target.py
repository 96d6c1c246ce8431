"""The target: a thin view over an UNMODIFIED transformers causal LM.

Shapes: B batch, T tokens, N tree nodes, S cache slots, V vocabulary, X columns of hidden states
(features.py).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from medusa_heads.cache_names import cache_argument
from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.machine.choice import Choice
from medusa_heads.machine.products import Use
from medusa_heads.target.attention import (
    SUPPORTED_ATTENTION,
    TreeMask,
    take_tree_masks,
    tree_attention,
)
from medusa_heads.target.cache import RowCache
from medusa_heads.target.features import HiddenReader
from medusa_heads.target.fingerprint import lm_head_sha256, weights_sha256
from medusa_heads.target.loading import load_causal_lm, unwrapped
from medusa_heads.target.packed.matrices import UNPACKED, PackedMatrices
from medusa_heads.target.positions import take_text_slots, text_slots
from medusa_heads.target.recurrent import RecurrentCache, is_recurrent
from medusa_heads.target.scans import has_scans, scans_go_on
from medusa_heads.trees.tree import TokenTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TargetModel(HiddenReader):
    """The frozen causal LM whose output must not change.

    Logits come from the model's own forward, because some architectures scale or cap them behind
    the lm_head (Gemma 2, Cohere, Granite).

    Attributes:
        model: the causal LM.
        packs: whether it reads few tokens by packed matrices, on a CPU that is faster so.
        looks: whether the last read was the first of its shape in a compiled text, and took longer.
        one_shape: whether trees of another size take long to make ready for.

    Raises:
        ValueError: the model has no lm_head, or its peft adapter adds prompt tokens.
    """

    packs = True
    looks = False
    one_shape = False

    def __init__(self, model: PreTrainedModel) -> None:
        model = unwrapped(model)
        lm_head = getattr(model, "get_output_embeddings", lambda: None)()
        if not isinstance(getattr(lm_head, "weight", None), Tensor):
            raise ValueError(
                f"{type(model).__name__} has no lm_head that is a matrix: load one that has it"
            )
        self.model = model
        take_tree_masks()  # before the model is compiled: graphs would not outlive it
        self._scales_by_slot, self._scans = take_text_slots(model), has_scans(model)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        trust_remote_code: bool = False,
        use: Use | None = "tree",
        on_choice: Callable[[Choice], object] | None = None,
        **kwargs: Any,
    ) -> TargetModel:
        """Load a causal LM by hub id or local path; further arguments go to transformers.

        Args:
            name_or_path: hub id or folder.
            dtype: of the weights; "auto": the fastest here that holds them exactly.
            device: where to; by default the best there is, unless a `device_map` says.
            trust_remote_code: run the Python code that the repository brings.
            use: what the choice is made for; None: as stored, where transformers puts it.
            on_choice: told what was chosen before anything is loaded; threads are chosen for it
                alone, and it may set them.

        Raises:
            ValueError: nothing loadable stands at `name_or_path`, or there is no such device.
        """
        given: Any = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
        given |= {"use": use, "on_choice": on_choice}
        target = cls(load_causal_lm(str(name_or_path), **given, **kwargs))
        target.freeze()
        return target

    def freeze(self) -> None:
        """Evaluation mode, no gradients: the target is never trained by heads."""
        self.model.eval()
        self.model.requires_grad_(False)
        for module in self.model.modules():
            if hasattr(getattr(module, "weight", None), "quant_state"):
                # Says nothing, but to bitsandbytes: told of evaluation on a CPU, it packs its 4-bit
                # matrices, unpacks them whenever they are read, and rounds them each time.
                module.training = True

    def get_input_embeddings(self) -> Any:
        """The model's token embeddings."""
        return self.model.get_input_embeddings()

    @property
    def config(self) -> Any:
        """The configuration of the text decoder (of a multimodal model, its text part)."""
        return self.model.config.get_text_config(decoder=True)

    def without_packed(self) -> TargetModel:
        """A view of the same model that multiplies by its own matrices alone."""
        if not self.packs:
            return self
        view = copy.copy(self)
        view.packs = False
        return view

    @property
    def packed(self) -> PackedMatrices | None:
        """Its large matrices for few tokens; None: its own alone."""
        return PackedMatrices.of(self.model) if self.packs and not UNPACKED.get() else None

    def packed_for(self, rows: int) -> AbstractContextManager[None]:
        """Within the block, so many tokens are read by packed matrices, if that is faster."""
        packed = self.packed
        return nullcontext() if packed is None else packed.instead(rows)

    @property
    def packed_bytes(self) -> int:
        """What packed matrices take now, besides the model's own."""
        packed = self.packed
        return 0 if packed is None else packed.held_bytes

    @property
    def vocab_size(self) -> int:
        """V: the rows of the lm_head, which may be padded beyond the tokenizer's size."""
        return int(self.get_output_embeddings().weight.shape[0])

    @property
    def readable(self) -> int:
        """Token ids that can be read: a prompt's may be more than those that can be written."""
        return max(self.vocab_size, len(self.get_input_embeddings().weight))

    @property
    def max_positions(self) -> int | None:
        """The longest context the target was made for, where its configuration says so."""
        value = getattr(self.config, "max_position_embeddings", None)
        return value if isinstance(value, int) and value > 0 else None

    def within(self, positions: Tensor) -> Tensor:
        """Positions that the context has: in place of those before it 0, and of those beyond it the
        last one."""
        limit = self.max_positions
        return positions.clamp(min=0, max=None if limit is None else limit - 1)

    def check_length(
        self, tokens: int, what: str, instead: str = "ask for fewer new tokens or shorter text"
    ) -> None:
        """Raises ValueError where so many tokens of `what` do not fit the target's context, which
        says what to do `instead`."""
        limit = self.max_positions
        if limit is not None and tokens > limit:
            raise ValueError(
                f"{tokens} tokens ({what}) do not fit the target's context of {limit}: {instead}"
            )

    @property
    def device(self) -> torch.device:
        """Where the input goes; weights that accelerate keeps elsewhere come there to be used."""
        hook = getattr(self.get_input_embeddings(), "_hf_hook", None)
        execution = getattr(hook, "execution_device", None)
        return self.model.device if execution is None else torch.device(execution)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype the target computes in."""
        return self.model.dtype

    @property
    def name_or_path(self) -> str:
        """The hub id or path the target was loaded from; empty for a model made in memory."""
        return str(self.model.config._name_or_path or "")

    @property
    def revision(self) -> str | None:
        """The commit of the hub that the target was loaded from, where it came from there."""
        return getattr(self.model.config, "_commit_hash", None)

    def new_cache(self, batch_size: int = 1, slots: int = 0) -> RowCache:
        """An empty cache for this target, which grows as needed: up to `slots`, or beyond.

        Raises:
            UnsupportedArchitecture: the target cannot be decoded with a tree, and why.
        """
        attention = self.config._attn_implementation
        if attention not in SUPPORTED_ATTENTION:
            raise UnsupportedArchitecture(
                f"attention implementation {attention!r} takes no tree mask",
                "load the target with attn_implementation='sdpa'",
            )
        if self.model.config.is_encoder_decoder:
            raise UnsupportedArchitecture(f"{self.config.model_type} is an encoder-decoder")
        if (packed := self.packed) is not None:  # a text begins
            packed.look_again()
        return (RecurrentCache if is_recurrent(self.config) else RowCache)(self.config, slots)

    def verify(self, tree: TokenTree, cache: RowCache, mask: TreeMask) -> Tensor:
        """Logits [B, N, V] of every node, in ONE forward. The nodes' rows are appended to the cache
        in node order; the caller keeps the accepted ones."""
        return self.read(tree.tokens_BN, cache, mask)

    def read(
        self, tokens_BN: Tensor, cache: RowCache, mask: TreeMask, last: int | None = None
    ) -> Tensor:
        """Logits [B, N, V] of new tokens that see what the mask says, or of the `last` so many;
        their rows are appended to the cache."""
        fewer = {} if last is None or not self._can_leave_out else {"logits_to_keep": last}
        few = self.packed_for(tokens_BN.numel())
        # Not asked of where none scans: what all models are known by would guard a graph.
        scans = scans_go_on(self.model, cache.layers) if self._scans else nullcontext()
        with tree_attention(mask), scans, few:
            logits_BNV: Tensor = self.model(
                input_ids=tokens_BN,
                position_ids=mask.query_positions_BN,
                use_cache=True,
                **{self.cache_argument: cache},
                **self.text_slots(mask),
                **fewer,
            ).logits
        return logits_BNV if last is None else logits_BNV[:, -last:]

    def text_slots(self, mask: TreeMask) -> dict[str, Tensor]:
        """What its forward over a tree is given besides, where it scales queries by slots."""
        return text_slots(mask) if self._scales_by_slot else {}

    @cached_property
    def _can_leave_out(self) -> bool:
        """Whether the forward can do without the logits of the first tokens."""
        return "logits_to_keep" in inspect.signature(self.model.forward).parameters

    @cached_property
    def cache_argument(self) -> str:
        """The name by which its forward takes a cache."""
        return cache_argument(self.model.forward)

    @cached_property
    def keeps_states_alone(self) -> bool:
        """Whether its cache has no rows of tokens, as that of Mamba."""
        return is_recurrent(self.config) and not RecurrentCache(self.config).row_layers

    def hidden_with_grad(
        self,
        input_ids_BT: Tensor,
        attention_mask_BT: Tensor | None = None,
        position_ids_BT: Tensor | None = None,
        cache: RowCache | None = None,
        **media: Tensor,
    ) -> Tensor:
        """What the lm_head would read at every position, with the features [B, T, X], without
        running it; gradients flow through it, to an adapter that learns within the target. Where a
        cache is given, the text is appended to it. `media` are its images, as the model takes them.
        """
        optional = {"position_ids": position_ids_BT, self.cache_argument: cache}
        given: Any = {name: value for name, value in optional.items() if value is not None}
        given |= {"input_ids": input_ids_BT, "attention_mask": attention_mask_BT, **media}
        with self.instead_of_logits() as hidden:
            self.model(use_cache=cache is not None, **given)
        return hidden()

    # The same without gradients, which is what nearly everybody wants.
    hidden = torch.no_grad()(hidden_with_grad)

    def fingerprint(self) -> dict[str, Any]:
        """Which target heads belong to: sizes and a hash of the lm_head."""
        return {
            "model_type": self.config.model_type,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "lm_head_sha256": lm_head_sha256(self.get_output_embeddings().weight),
        }

    def weights_digest(self, *, with_adapter: bool = True) -> str:
        """sha256 over every weight and buffer, bit for bit: equal before and after training;
        without the adapter, that of the target before a LoRA adapter was put into it."""
        return weights_sha256(self.model, with_adapter=with_adapter)
