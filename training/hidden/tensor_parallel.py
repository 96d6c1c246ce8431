"""A frozen target of whose matrices each process of a run has a part: transformers' tensor
parallelism, by its plan for the model. Embeddings and lm_head stay whole: heads read them.

Shapes: B batch, T tokens, X columns of hidden states.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import DistributedConfig

from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.target import TargetArguments
from medusa_heads.training.hidden.meta_target import meta_target


class PartedTarget(TargetModel):
    """Such a target. The processes run it together, on the batch of one after the other, and each
    keeps the hidden states of its own: heads learn as beside a whole target in each process."""

    @classmethod
    def load(cls, arguments: TargetArguments) -> TargetModel:
        """Each process reads its own part of the weights. Raises ValueError: the model cannot be
        cut for so many processes."""
        processes = dist.get_world_size()
        empty = meta_target(arguments)
        for name in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(empty.config, name, None) or processes
            if heads % processes:
                raise ValueError(
                    f"tensor_parallel cannot deal the target's {heads} {name} out to {processes} "
                    "processes: start fewer, or spread it by layers with shard_target"
                )
        names = {module: name for name, module in empty.model.named_modules()}
        kept = empty.get_input_embeddings(), empty.get_output_embeddings()
        plan = {names[module]: "replicate" for module in kept}
        return cls.from_pretrained(
            arguments.model_name_or_path,
            dtype=arguments.dtype,
            use=None,
            distributed_config=DistributedConfig(tp_size=processes, tp_plan=plan),
            **arguments.source(),
            **arguments.attention(),
        )

    @torch.no_grad()
    def hidden(self, *inputs: Tensor | None) -> Tensor:  # type: ignore[override]
        """hidden_BTX of this process's batch, told as TargetModel's; all processes must ask."""
        batches: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(batches, [None if x is None else x.cpu() for x in inputs])
        for rank, batch in enumerate(batches):
            there: Any = [None if x is None else x.to(self.device) for x in batch]
            hidden_BTX = self.hidden_with_grad(*there)
            if rank == dist.get_rank():
                own_BTX = hidden_BTX
        return own_BTX
