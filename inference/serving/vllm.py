"""Medusa heads in vLLM 0.33 and later, which knows no Medusa of its own any more.

vllm serve TARGET \
    --speculative-config '{"method": "custom_class", "num_speculative_tokens": 4,
                           "model": "medusa_heads.inference.serving.vllm.MedusaProposer"}' \
    --additional-config '{"medusa_heads": "FOLDER"}'

FOLDER is a checkpoint folder of this package, on every machine that serves. vLLM drafts a chain,
each head's best token, and verifies no trees. vLLM itself is imported when it asks for a proposer.

Shapes: R requests, S sampled positions of all requests, K drafted tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from medusa_heads.checkpoint.stored_heads import DRAFT_TOKENS, check_target, read_stored
from medusa_heads.heads import MedusaHeads
from medusa_heads.heads.correction import Correction
from medusa_heads.inference.serving.chain import check_chain
from medusa_heads.target.fingerprint import lm_head_sha256

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_log = logging.getLogger(__name__)


class MedusaProposer:
    """What vLLM makes in every process that samples, by `method="custom_class"`. Residual blocks
    lie in every process. A vocabulary matrix that the heads share is the target's own, read through
    its `compute_logits`; matrices of their own are spread over the processes of tensor parallelism
    by rows, and their best tokens compared. Raises ValueError: no checkpoint, one whose heads vLLM
    cannot draft with, or another target's."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        assert vllm_config.speculative_config is not None
        self._stored = read_stored(_folder(vllm_config))
        self._num_tokens: int = vllm_config.speculative_config.num_speculative_tokens
        check_chain(self._stored.config, self._num_tokens)
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise ValueError(
                "vLLM's runner looks for a proposer in every stage of a pipeline and makes one in "
                "the last only: spread the target by --tensor-parallel-size"
            )
        if vllm_config.lora_config is not None:
            raise ValueError(
                "heads do not follow LoRA modules that change between requests: merge the adapter "
                "into the target and serve that"
            )
        model = vllm_config.model_config
        sizes = {"hidden_size": model.get_hidden_size(), "vocab_size": model.get_vocab_size()}
        check_target(self._stored, sizes, "serve")
        if self._stored.adapter is not None:
            _log.warning(
                "These heads were trained together with an adapter of their target. Serve the "
                "target with the adapter merged, or few of their tokens are accepted."
            )
        self._dtype: torch.dtype = model.dtype
        # No logits are wider than the target's own, whose memory vLLM has reckoned with.
        self._most_rows: int = vllm_config.scheduler_config.max_num_seqs
        # What vLLM's runner knows when it asks for drafts: the hidden state of every position it
        # sampled at, and how many drafted tokens each request had; None where none had any.
        self.hidden_SD: Tensor | None = None
        self.num_drafted_R: Sequence[int] | None = None
        _hand_over_hidden_states()

    def load_model(self, target: nn.Module) -> None:
        """Put the heads beside the loaded target. Raises ValueError: its vocabulary matrix is not
        the one the heads were trained with."""
        from vllm import distributed

        model: Any = target
        weight_VD = getattr(getattr(_language_model(model), "lm_head", None), "weight", None)
        if weight_VD is None or weight_VD.ndim != 2 or not weight_VD.is_floating_point():
            _log.warning("The target's lm_head cannot be read, so the heads' target is unproved.")
        elif self._stored.target["lm_head_sha256"] is not None:
            vocab_size = self._stored.config.vocab_size
            found = lm_head_sha256(_gather(weight_VD)[:vocab_size])
            check_target(self._stored, {"lm_head_sha256": found}, "serve")
        device = next(target.parameters()).device
        config, tensors = self._stored.config, self._stored.tensors
        # The blocks of those heads that draft; their vocabulary is looked after here.
        blocks = replace(config, num_heads=self._num_tokens, vocab_matrix="shared")
        self._blocks = MedusaHeads(replace(blocks, draft_vocab_size=None, correction_rank=None))
        self._blocks.load_state_dict({name: tensors[name] for name in self._blocks.state_dict()})
        self._blocks.to(device=device, dtype=self._dtype).eval().requires_grad_(False)
        drafted_V = tensors.get(DRAFT_TOKENS)
        self._draft_tokens_V = None if drafted_V is None else drafted_V.to(device)
        self._compute_logits: Callable[[Tensor], Tensor | None] = model.compute_logits
        rank = distributed.get_tensor_model_parallel_rank()
        world = distributed.get_tensor_model_parallel_world_size()
        self._first_row, end = (config.num_candidates * n // world for n in (rank, rank + 1))
        own = [
            {
                part: tensors[name][self._first_row : end].to(device, self._dtype, copy=True)
                for part in ("weight", "bias")
                if (name := f"{i}.{config.num_layers}.{part}") in tensors
            }
            for i in range(self._num_tokens)
        ]
        self._own = own if config.vocab_matrix == "own" else []
        self._correction = None
        if config.correction_rank is not None:
            if not self._own:
                check_bare_logits(model)
            rows = slice(self._first_row, end) if self._own else slice(None)
            with torch.device("meta"):
                self._correction = Correction(1, 1, config.correction_rank)
            parts = {"before": tensors["correction.before.weight"]}
            parts["after"] = tensors["correction.after.weight"][rows]
            for name, weight in parts.items():
                held = nn.Parameter(weight.to(device, self._dtype, copy=True), requires_grad=False)
                self._correction.get_submodule(name).weight = held
        del self._stored  # and with it the other processes' rows

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft tokens of every request, none for those that sampled none; called by vLLM."""
        assert self.hidden_SD is not None, "the runner hands over hidden states first"
        device = self.hidden_SD.device
        rows = last_rows(sampled_token_ids, self.num_drafted_R)
        last_R = torch.tensor([[0, *sampled][-1] for sampled in sampled_token_ids], device=device)
        chains = self.draft(self.hidden_SD[torch.tensor(rows, device=device)], last_R)
        self.hidden_SD = None
        pairs = zip(chains.tolist(), sampled_token_ids, strict=True)
        return [chain if sampled else [] for chain, sampled in pairs]

    @torch.inference_mode()
    def draft(self, hidden_RD: Tensor, last_R: Tensor) -> Tensor:
        """Each head's best token behind the last one and those before its own, [R, K], the same in
        every process."""
        features_RKD = self._blocks.features(hidden_RD)
        if self._correction is not None:
            chain = []
            for i, features_RD in enumerate(features_RKD.unbind(dim=1)):
                logits_RV = self._correction.add_to(self._logits(i, features_RD), last_R)
                last_R = self._token_ids(self._agreed(*self._best(logits_RV)))
                chain.append(last_R)
            return torch.stack(chain, dim=1)
        if self._own:
            heads = enumerate(features_RKD.unbind(dim=1))
            best = [self._best(self._logits(i, features_RD)) for i, features_RD in heads]
            values_RK, tokens_RK = (torch.stack(part, dim=1) for part in zip(*best, strict=True))
            return self._token_ids(self._agreed(values_RK, tokens_RK))
        parts = features_RKD.flatten(0, 1).split(self._most_rows)
        drafted_N = torch.cat([self._logits(0, part_RD).argmax(dim=-1) for part_RD in parts])
        return self._token_ids(drafted_N.view(features_RKD.shape[:2]))

    def _logits(self, head: int, features_RD: Tensor) -> Tensor:
        """Over this process's rows of an own matrix, or over all that the heads can draft."""
        if self._own:
            return nn.functional.linear(features_RD, **self._own[head])
        logits_RV = self._compute_logits(features_RD)
        assert logits_RV is not None, "vLLM gathers logits in every process that samples"
        return logits_RV if self._draft_tokens_V is None else logits_RV[:, self._draft_tokens_V]

    def _best(self, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        value_R, token_R = logits_RV.max(dim=-1)
        return value_R, token_R + self._first_row if self._own else token_R

    def _agreed(self, values: Tensor, tokens: Tensor) -> Tensor:
        """The tokens with the largest values of all processes."""
        if not self._own:
            return tokens
        # One gather of small floats, which hold any token id exactly; of equal values the first
        # process's wins, as the first of equal logits does.
        pairs = torch.stack([values.float(), tokens.float()])
        of_all = _gather(pairs).view(-1, *pairs.shape)
        process = of_all[:, 0].argmax(dim=0, keepdim=True)
        return of_all[:, 1].gather(0, process)[0].long()

    def _token_ids(self, drafted: Tensor) -> Tensor:
        return drafted if self._draft_tokens_V is None else self._draft_tokens_V[drafted]


def _language_model(model: Any) -> Any:
    """Of a multimodal target the part that makes logits."""
    if getattr(model, "lm_head", None) is None and hasattr(model, "get_language_model"):
        return model.get_language_model()
    return model


def check_bare_logits(model: Any) -> None:
    """Raises ValueError where a target does more with its vocabulary matrix's product than heads
    have learnt to correct."""
    processor = getattr(_language_model(model), "logits_processor", None)
    scale, cap = (getattr(processor, name, None) for name in ("scale", "soft_cap"))
    if scale not in (None, 1, 1.0) or cap is not None:
        raise ValueError(
            f"this target scales its logits by {scale} and caps them at {cap}, which corrected "
            "heads have not learnt: train heads with vocab_matrix 'own', or without "
            "correction_rank"
        )


def _folder(vllm_config: VllmConfig) -> str:
    settings = vllm_config.additional_config
    folder = settings.get("medusa_heads") if isinstance(settings, dict) else None
    if not isinstance(folder, str):
        raise ValueError(
            "expected the heads' checkpoint folder under 'medusa_heads' in additional_config, got "
            f'{folder!r}: pass --additional-config \'{{"medusa_heads": "FOLDER"}}\''
        )
    return folder


def last_rows(
    sampled_token_ids: Sequence[Sequence[int]], num_drafted_R: Sequence[int] | None
) -> list[int]:
    """Where, among all sampled positions, each request's last token was chosen. A request with n
    drafted tokens has n + 1 positions, and its last token comes from the first that disagreed with
    its draft, or from the bonus position."""
    if num_drafted_R is None:
        return list(range(len(sampled_token_ids)))
    rows, start = [], 0
    for sampled, num_drafted in zip(sampled_token_ids, num_drafted_R, strict=True):
        rows.append(start + max(len(sampled) - 1, 0))
        start += num_drafted + 1
    return rows


def _hand_over_hidden_states() -> None:
    """Let vLLM's runner, which hands a custom proposer sampled tokens alone, show ours the hidden
    states: they are arguments of the method that asks it, and are read there on their way."""
    from vllm import __version__
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # the CPU's runner is one as well

    ask = GPUModelRunner.propose_draft_token_ids
    if getattr(ask, "shows_hidden_states", False):
        return
    signature = inspect.signature(ask)
    needed = {"sample_hidden_states", "spec_decode_metadata"}
    if missing := sorted(needed - set(signature.parameters)):
        raise ValueError(
            f"vLLM {__version__} does not hand {missing} to the drafting method any more, which "
            "heads need: use a release that docs/serving.md names"
        )

    @functools.wraps(ask)
    def ask_with_hidden_states(runner: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(runner.drafter, MedusaProposer):
            given = signature.bind(runner, *args, **kwargs).arguments
            metadata = given["spec_decode_metadata"]
            runner.drafter.hidden_SD = given["sample_hidden_states"]
            runner.drafter.num_drafted_R = metadata and metadata.num_draft_tokens
        return ask(runner, *args, **kwargs)

    ask_with_hidden_states.shows_hidden_states = True  # type: ignore[attr-defined]
    GPUModelRunner.propose_draft_token_ids = ask_with_hidden_states


def _gather(tensor: Tensor) -> Tensor:
    """The tensors of all processes of tensor parallelism, one after the other along dimension 0."""
    from vllm import distributed

    if distributed.get_tensor_model_parallel_world_size() == 1:
        return tensor
    return distributed.tensor_model_parallel_all_gather(tensor, 0)
