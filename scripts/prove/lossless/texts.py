"""A text to be decoded, and what transformers' own `generate()` makes of it.

Shapes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

Options = dict[str, Any]


class TwoBest(NamedTuple):
    """What a token was chosen from: the two best candidates, and how far they are apart in standard
    deviations of the logits."""

    best: int
    second: int
    gap: float


@dataclass(frozen=True)
class Text:
    """What is decoded, and how.

    Attributes:
        name: of the text, once on a target.
        group: where its tokens are counted.
        inputs: as generate() takes them, [B, T].
        options: makes what else generate() is given, anew each time: processors keep a state.
        new_tokens: of every row at most.
        seed: of all that is drawn.
        in_step: rows share one stream of random numbers, so that drafts must be accepted alike.
        reads_text: a processor looks at the text so far.
        by_row: a processor has something of its own for every row.
    """

    name: str
    group: str
    inputs: dict[str, Tensor]
    options: Callable[[], Options]
    new_tokens: int
    seed: int = 0
    in_step: bool = False
    reads_text: bool = False
    by_row: bool = False

    @property
    def batch(self) -> int:
        """B."""
        return len(self.inputs["input_ids"])

    @cached_property
    def first(self) -> Options:
        """Options to look at, which are never decoded with."""
        return self.options()

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn."""
        return bool(self.first.get("do_sample"))

    @property
    def sampled(self) -> bool:
        """Whether tokens are drawn with torch's own random numbers."""
        return self.draws and not self.own_draws

    @property
    def own_draws(self) -> bool:
        """Whether every row draws with random numbers of its own."""
        return any(isinstance(p, OwnDraws) for p in self.first.get("logits_processor", []))

    def generate(self, model: Any, **changed: Any) -> Any:
        """generate(), from the text's seed on."""
        torch.manual_seed(self.seed)
        options = {"eos_token_id": None, "pad_token_id": 0, **self.options(), **changed}
        return model.generate(**self.inputs, max_new_tokens=self.new_tokens, **options)


class OwnDraws(LogitsProcessor):
    """Draws every row's next token itself, with random numbers of that row and that place.

    transformers draws for a batch from one stream of numbers, which rows that do not advance in
    step read in another order. Here the numbers depend on nothing but seed, row and place, so that
    also a batch whose rows run apart can be compared token by token. All but the drawn token is
    made impossible; what generate() and the engine then draw is this one.

    Args:
        seed: of all rows.
        warpers: run on the scores before a token is drawn.
        rows: that are seen; None for all of a batch.
    """

    def __init__(self, seed: int, warpers: LogitsProcessorList, row: int | None = None) -> None:
        self._seed, self._warpers, self._row = seed, warpers, row
        self.two_best: dict[tuple[int, int], TwoBest] = {}

    def of_row(self, row: int) -> OwnDraws:
        """What stands for this in a row that is decoded for itself."""
        return OwnDraws(self._seed, self._warpers, row)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        warped_BV = self._warpers(input_ids, scores.clone())
        length = input_ids.shape[1]
        chosen_BV = torch.full_like(scores, -torch.inf)
        for b, warped_V in enumerate(warped_BV):
            row = b if self._row is None else self._row
            seed = (self._seed * 1009 + row) * 100_003 + length
            random = torch.Generator().manual_seed(seed)
            noise_V = torch.empty(len(warped_V)).exponential_(generator=random)
            perturbed_V = warped_V.log_softmax(-1) - noise_V.log()
            chosen_BV[b, perturbed_V.argmax()] = 0.0
            self.two_best[row, length] = two_best(perturbed_V, scores[b])
        return chosen_BV


def two_best(perturbed_V: Tensor, logits_V: Tensor) -> TwoBest:
    """Of scores that the largest of is taken, what is taken and what nearly was."""
    values, tokens = perturbed_V.topk(2)
    scale = float(logits_V[logits_V.isfinite()].std())
    best, second = tokens.tolist()
    return TwoBest(best, second, float(values[0] - values[1]) / max(scale, 1e-9))


@dataclass
class Reference:
    """What generate() makes of a text.

    Attributes:
        text: the text.
        model: transformers' model.
        prompt_length: T of the prompts, padding included.
    """

    text: Text
    model: Any
    sequences_BT: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.sequences_BT = self.text.generate(self.model)
        self.prompt_length = self.text.inputs["input_ids"].shape[1]

    @cached_property
    def rows(self) -> list[list[int]]:
        """New tokens of every row, up to its end."""
        ends = self.text.first.get("eos_token_id") or []
        ends = {ends} if isinstance(ends, int) else set(ends)
        rows = []
        for tokens in self.sequences_BT[:, self.prompt_length :].tolist():
            end = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
            rows.append(tokens[:end])
        return rows

    @property
    def ends_early(self) -> bool:
        """Whether a row ends before it must."""
        return any(len(row) < self.text.new_tokens for row in self.rows)

    def two_best(self, row: int, place: int) -> TwoBest | None:
        """What generate() chose the token at this place from; None where that cannot be told."""
        if self.text.own_draws:
            options = self.text.options()
            (own,) = [p for p in options["logits_processor"] if isinstance(p, OwnDraws)]
            self.text.generate(self.model, **options)
            return own.two_best.get((row, self.prompt_length + place))
        out = self.text.generate(
            self.model, return_dict_in_generate=True, output_scores=True, output_logits=True
        )
        scores_BV, logits_BV = out.scores[place], out.logits[place]
        if not self.text.sampled:
            return two_best(scores_BV[row], logits_BV[row])
        # torch draws a token as the largest of p / q, q exponential. Drawn once more from the seed
        # on, every token must come out as it did: else nothing is said of what nearly came.
        torch.manual_seed(self.text.seed)
        for step, step_scores_BV in enumerate(out.scores[: place + 1]):
            noise_BV = torch.empty_like(step_scores_BV).exponential_()
            perturbed_BV = step_scores_BV.log_softmax(-1) - noise_BV.log()
            expected_B = self.sequences_BT[:, self.prompt_length + step]
            if not torch.equal(perturbed_BV.argmax(dim=-1), expected_B):
                return None
        return two_best(perturbed_BV[row], logits_BV[row])
