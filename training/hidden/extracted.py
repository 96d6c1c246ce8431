"""Hidden states that vLLM computes (`extract_hidden_states`), in place of transformers.

vLLM batches and spreads the target as it does in serving, and writes what comes out of some layers
to a file for each text, which is read and removed here. What its lm_head reads it does not hand on:
that is made of the last layer's output by the target's own final norm, on the CPU.

Shapes: T tokens, G layers, D hidden, X = G * D.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from medusa_heads.errors import first_line
from medusa_heads.files import staging
from medusa_heads.interop.vllm_engine import import_vllm, open_engine, that_matter
from medusa_heads.target.layers import behind_layers, decoder_layers
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.target import TargetArguments
from medusa_heads.training.hidden.meta_target import meta_target
from medusa_heads.training.hidden.prepare import Forwards

_OTHERWISE = "leave --backend vllm out"
_EXCEPTIONS = "vllm.v1.engine.exceptions"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"
_COMPARED, _LOOKED_AT = 256, 16  # tokens, at most; of one of the first rows
_PASSING = 1 << 28  # bytes of vLLM's files at a time, about
# Of arguments: these change no hidden state, beside those that change nothing vLLM computes.
_NO_MATTER = ("max_model_len", "revision", "seed", "skip_tokenizer_init", "trust_remote_code")
# How far from the target's own states vLLM's may be, as a share of their length in the median: both
# round, each in its own way. A layer too early or late, or a norm left out, is farther.
_FAR = {torch.float32: 0.01, torch.float16: 0.1, torch.bfloat16: 0.1}


def load_on_host(arguments: TargetArguments, device: torch.device) -> TargetModel:
    """The target on the CPU, in the dtype that a run on this device has it in. Raises ValueError:
    there is no such target."""
    return TargetModel.from_pretrained(
        arguments.model_name_or_path,
        dtype=meta_target(arguments, device).dtype,
        device="cpu",
        use=None,
        **arguments.source(),
        **arguments.attention(),
    )


@contextmanager
def extracting(target: TargetModel, folder: Path, **engine: Any) -> Iterator[VllmStates]:
    """vLLM running a target, with whose weights on the CPU it is compared. Its files pass through a
    hidden folder in `folder`, which is made. Further arguments are those of `vllm.LLM`. Raises
    ValueError: vLLM is not installed, cannot run the target, or hands on no such states of it."""
    folder.mkdir(parents=True, exist_ok=True)
    with staging(folder) as passing:
        states = VllmStates(target, passing, engine)
        try:
            yield states
        finally:
            states.close()


class VllmStates(Forwards):
    """vLLM's own extraction of hidden states; see `extracting`."""

    whole_shards = True
    passing_bytes = _PASSING

    def __init__(self, target: TargetModel, passing: Path, engine: Mapping[str, Any]) -> None:
        super().__init__(target)
        self._vllm = import_vllm()
        self.computed_by = f"vLLM {self._vllm.__version__}"
        if said := that_matter(engine, _NO_MATTER):
            digest = hashlib.sha256(json.dumps(said, default=str).encode()).hexdigest()
            self.computed_by += f" (engine_args {digest[:8]})"
        self._behind = behind_layers(target.model, _OTHERWISE)
        # vLLM counts what goes into a layer; each is handed on once, in order.
        wanted = [*target.features, len(decoder_layers(target.model, _OTHERWISE)) - 1]
        layers = sorted(set(wanted))
        self._columns = [layers.index(layer) for layer in wanted]
        self._token_bytes = len(layers) * target.hidden_size * target.dtype.itemsize
        transfer = {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(passing)},
        }
        if import_vllm("vllm.platforms").current_platform.is_cpu():
            transfer["kv_connector"] = "UnpinnedHiddenStatesConnector"
            transfer["kv_connector_module_path"] = "medusa_heads.training.hidden.vllm_connector"
        self._llm = open_engine(
            target.name_or_path,
            dtype=str(target.dtype).removeprefix("torch."),
            speculative_config={
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {
                    "hf_config": {"eagle_aux_hidden_state_layer_ids": [n + 1 for n in layers]}
                },
            },
            kv_transfer_config=transfer,
            **{"disable_log_stats": True} | dict(engine),
        )
        if type(self._core).__name__ == "InprocClient":
            raise ValueError(
                "vLLM writes hidden states in a process of its own, and is told to work in this "
                "one: leave VLLM_ENABLE_V1_MULTIPROCESSING unset"
            )
        self._longest = self._llm.llm_engine.vllm_config.model_config.max_model_len - 1
        self._parameters = self._vllm.SamplingParams(max_tokens=1, detokenize=False)

    @property
    def _core(self) -> Any:
        return self._llm.llm_engine.engine_core

    def close(self) -> None:
        self._core.shutdown()

    def forget(self) -> None:
        self._llm.reset_prefix_cache()

    def of(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[Tensor]:
        """hidden_TX of each row, on the CPU, of packed documents each for itself. Raises ValueError
        where a text is too long for vLLM, or it broke down; OSError where it could not write."""
        texts = [documents(row) for row in rows]
        if (most := max(len(ids) for text in texts for ids in text)) > self._longest:
            raise ValueError(
                f"vLLM reads texts of at most {self._longest} tokens here, and one has {most}: "
                "lower max_length, or give engine_args a larger max_model_len, if the target has it"
            )
        for group in self._groups(texts):
            prompts = [{"prompt_token_ids": ids} for text in group for ids in text]
            try:
                made = iter(self._llm.generate(prompts, self._parameters, use_tqdm=False))
            except (RuntimeError, import_vllm(_EXCEPTIONS).EngineDeadError) as error:
                raise ValueError(f"{self.computed_by} broke down: {first_line(error)}") from error
            for text in group:
                yield torch.cat([self._read(next(made), ids) for ids in text])

    def _groups(self, texts: Sequence[list[list[int]]]) -> Iterator[Sequence[list[list[int]]]]:
        """Rows whose files may lie on disk together."""
        first = held = 0
        for place, text in enumerate(texts):
            if place > first and held >= self.passing_bytes:
                yield texts[first:place]
                first, held = place, 0
            held += self._token_bytes * sum(map(len, text))
        yield texts[first:]

    def compare(self, rows: Dataset) -> str:
        """A sentence on how far vLLM's states are from the target's own, at the beginning of the
        longest document of a few rows. Raises ValueError where that is farther than rounding goes.
        """
        few = rows.__getitems__(list(range(min(len(rows), _LOOKED_AT))))
        texts = (ids for row in few for ids in documents(row))
        ids = max(texts, key=len)[:_COMPARED]
        (found_TX,) = self.of([{"input_ids": ids}])
        own_TX = self.target.hidden(torch.tensor([ids], device=self.target.device))[0].cpu()
        found_TGD, own_TGD = (
            x.float().unflatten(1, (len(self._columns), -1)) for x in (found_TX, own_TX)
        )
        far = (found_TGD - own_TGD).norm(dim=2) / own_TGD.norm(dim=2)
        share = float(far.median(dim=0).values.max())
        said = f"{share:.2%} from the target's own on {len(ids)} tokens, in the median"
        if not share <= _FAR[self.target.dtype]:
            raise ValueError(f"{self.computed_by}'s hidden states are {said}: {_OTHERWISE}")
        return f"{self.computed_by} computes the hidden states: {said}"

    def _read(self, made: Any, ids: Sequence[int]) -> Tensor:
        """hidden_TX of a text, whose file is removed."""
        connector, path = import_vllm(_CONNECTOR), made.kv_transfer_params["hidden_states_path"]
        try:
            found = connector.load_hidden_states(path)  # waits until it is written
            connector.cleanup_hidden_states(path)
        except Exception as error:  # safetensors has errors of its own
            raise OSError(
                f"{self.computed_by} did not write the hidden states of a text to "
                f"{Path(path).parent}: it broke down, or the disk is full ({first_line(error)})"
            ) from error
        hidden_TGD = found["hidden_states"].to(self.target.dtype)
        if found["token_ids"].tolist() != list(ids):
            raise OSError(f"{self.computed_by} wrote the hidden states of another text to {path}")
        layers = [hidden_TGD[:, column] for column in self._columns]
        with torch.no_grad():
            return torch.cat([*layers[:-1], self._behind(layers[-1][None])[0]], dim=1)


def documents(row: Mapping[str, Any]) -> list[list[int]]:
    """The token ids of each document packed in a row, one alone where there are no positions."""
    ids = np.asarray(row["input_ids"])
    starts = np.flatnonzero(np.asarray(row.get("position_ids", ())) == 0)[1:]
    return [part.tolist() for part in np.split(ids, starts)]
