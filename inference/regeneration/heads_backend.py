"""The target answers with heads attached: the same text in fewer forward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from medusa_heads.inference.models.medusa import MedusaModel
from medusa_heads.inference.regeneration.answers import Finished, Sampling
from medusa_heads.inference.regeneration.prompts import Prompt
from medusa_heads.inference.regeneration.target_backend import TargetBackend
from medusa_heads.inference.regeneration.transformers_backend import generate_batch, in_batches


class HeadsBackend(TargetBackend):
    """A target with heads, lossless: token for token what its own `generate` answers in fp32.

    Args:
        model: target and heads; its acceptance rule must be the lossless one.
        batch_size: rows decoded together; default: 8, on a CPU 1, where a batch keeps it busy
            without heads.

    Raises:
        ValueError: a lossy acceptance rule, or a size below one.
    """

    name = "heads"  # which they are is no part of the description: lossless, they decide the speed

    def __init__(self, model: MedusaModel, *, batch_size: int | None = None) -> None:
        if model.acceptance != "lossless":
            raise ValueError(
                f"{model.acceptance} acceptance is lossy, and the text must be the target's own: "
                "use lossless acceptance"
            )
        if batch_size is None:
            batch_size = 1 if model.target.device.type == "cpu" else 8
        super().__init__(model.target, batch_size)
        self.model = model

    def answer(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        finished: Finished,
        on_tokens: Callable[[int], object],
    ) -> None:
        """Answer the prompts, batch by batch."""
        for batch in in_batches(prompts, self.batch_size):
            answers = generate_batch(
                self.target.model,
                batch,
                sampling,
                on_tokens=on_tokens,
                decode=self.model.decode,
            )
            finished(list(zip(batch, answers, strict=True)))
