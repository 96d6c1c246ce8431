"""From corpora to rows: token ids, and labels that say which tokens are learnt.

A row is a document, a part of one, or with packing several: `input_ids`, and `labels` of the same
length, unshifted, -100 where the text was not generated. Those of conversations may have images.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import datasets
import numpy as np
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from medusa_heads.data.bad_rows import BadRows
from medusa_heads.data.chat import ChatTemplate
from medusa_heads.data.finding import HELD_OUT
from medusa_heads.data.prompts import stop_ids
from medusa_heads.data.sources import Corpus, as_corpus, is_stream, load_corpus
from medusa_heads.errors import first_line
from medusa_heads.target.loading import find_tokenizer
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.data import EVAL_ROWS, STREAM_EVAL_ROWS, DataArguments
from medusa_heads.training.data.columns import SEEN_COLUMN
from medusa_heads.training.data.pack import check_packing
from medusa_heads.training.data.row_facts import RowFacts, RowLimits, UnfitRow, check_rows
from medusa_heads.training.data.seen import Sight, find_sight
from medusa_heads.training.data.split import TRAINING, split_once, tokenise_once
from medusa_heads.training.data.template_fit import template_mismatch
from medusa_heads.training.data.tokeniser import Tokeniser

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingData:
    """Rows to train on and rows to measure on, checked."""

    rows: Dataset | IterableDataset  # a table or an endless stream; packed, with `position_ids`
    held_out: Dataset  # one document or part of one a row
    known_rows: Dataset  # `rows` before packing; of a stream, its first ones
    facts: RowFacts  # of `known_rows`
    held_out_facts: RowFacts
    corpora: Sequence[Corpus]  # the one to train on first
    one_pass: IterableDataset | None = None  # of a stream, all its rows once, not packed
    first_pass: IterableDataset | None = None  # of a stream, `rows` until they come again
    tokenizer: PreTrainedTokenizerBase | None = None  # of text, as far as it is known
    warnings: Sequence[str] = ()  # what to look at, a sentence each
    sight: Sight = field(default_factory=Sight)  # how the target is shown images of rows

    @property
    def has_images(self) -> bool:
        """Whether some row has any; no stream has."""
        sets = [rows for rows in (self.rows, self.held_out) if not is_stream(rows)]
        return any(SEEN_COLUMN in rows.column_names for rows in sets)

    def refuse_images(self, learner: str) -> None:
        """Raises ValueError where rows have images, for what does not learn from such."""
        if self.has_images:
            raise ValueError(
                f"rows of the corpus have images, and {learner} not learn from such: leave them "
                "out, or train heads beside a frozen target that is whole in each process"
            )

    @property
    def is_stream(self) -> bool:
        return is_stream(self.rows)

    @property
    def is_packed(self) -> bool:
        return "position_ids" in next(iter(self.rows))

    def rows_and_learnt(self) -> tuple[int | None, float]:
        """How many rows to train on, None of a stream, and the tokens learnt of each, in the mean;
        of a stream's, of its first ones."""
        rows = None if self.is_stream else len(self.rows)
        return rows, self.facts.supervised_tokens / (rows or self.facts.rows)

    def record(self) -> dict[str, Any]:
        """For the story of a run. Of a stream, broken rows are counted as far as it was read."""
        training = asdict(self.facts)
        if self.is_stream:
            training = {"first_rows_of_the_stream": training}
        elif len(self.rows) != self.facts.rows:
            training["packed_rows"] = len(self.rows)
        return {
            "training_set": training,
            "held_out_set": asdict(self.held_out_facts),
            "corpora": [_describe(corpus) for corpus in self.corpora],
        }


def _streams() -> Any:
    """What makes rows of a stream. Raises ValueError: this version of datasets has other parts."""
    try:
        from medusa_heads.training.data.stream import stream_rows
    except ImportError as error:
        raise ValueError(
            f"datasets {datasets.__version__} has no streams that can be mixed anew "
            f"({first_line(error)}): leave streaming off, or install another version"
        ) from error
    return stream_rows


def _describe(corpus: Corpus) -> dict[str, Any]:
    cut = {name: getattr(corpus, name) for name in ("cut_documents", "cut_tokens")}
    return {
        "name": corpus.name,
        "format": corpus.found_as,
        "bad_rows": corpus.bad_rows.count,
        "bad_row_examples": corpus.bad_rows.examples,
    } | ({} if corpus.is_stream else cut)


def load_corpora(
    settings: DataArguments,
    dataset: Dataset | IterableDataset | None = None,
    eval_dataset: Dataset | None = None,
) -> tuple[Corpus, Corpus | None]:
    """The corpus to train on and the one to measure on, as far as there is one: those that the
    settings name, or tables in memory instead. Raises ValueError where one cannot be read."""
    named = partial(
        load_corpus,
        config=settings.dataset_config,
        text_column=settings.text_column,
        on_bad_row=settings.on_bad_row,
    )

    def in_memory(rows: Dataset | IterableDataset, name: str) -> Corpus:
        bad_rows = BadRows(settings.on_bad_row, stream=is_stream(rows))
        return as_corpus(rows, name, text_column=settings.text_column, bad_rows=bad_rows)

    if dataset is not None:
        if settings.streaming and not is_stream(dataset):
            dataset = dataset.to_iterable_dataset()
        corpus = in_memory(dataset, "dataset")
    elif not settings.dataset:
        raise ValueError("dataset must name at least one corpus, got none")
    else:
        corpus = named(settings.dataset, settings.dataset_split, streaming=settings.streaming)
    if eval_dataset is not None:
        return corpus, in_memory(eval_dataset, "eval_dataset")
    held_out = settings.eval_dataset
    embedded = dataset is None and settings.dataset == ["stdlib"]
    if held_out is None and (settings.eval_split is not None or embedded):
        held_out = settings.dataset
    if held_out is None:
        return corpus, None
    if settings.eval_split is not None:
        return corpus, named(held_out, settings.eval_split, exact=True)
    return corpus, named(held_out, HELD_OUT)


def prepare_data(
    target: TargetModel,
    corpus: Corpus,
    held_out: Corpus | None,
    tokenizer: PreTrainedTokenizerBase | None,
    settings: DataArguments,
    *,
    num_heads: int,
    seed: int,
    max_steps: int = -1,
    own_text: bool = False,
    own_ends: bool = False,
) -> TrainingData:
    """Rows for a target, tokenised, masked, checked and, if wanted, packed. Raises ValueError:
    something in the corpora or the settings cannot be used.

    Args:
        held_out: to measure on. Default: a part of `corpus`, drawn by the seed.
        tokenizer: default: the one beside the target. Or its processor, which has one.
        settings: everything but the names of the corpora.
        num_heads: so many tokens ahead must be known somewhere in the held-out set.
        max_steps: of the run; a stream needs it.
        own_text: whether the target wrote it, behind whatever prompts.
        own_ends: whether the target wrote the answers: those that do not end as its text does were
            cut at a length.
    """
    if held_out is not None and held_out.is_stream:
        raise ValueError(
            "the held-out set is a stream, which is never all there: give a table, such as "
            "datasets.Dataset.from_list(list(stream))"
        )
    parts = [part for part in (corpus, held_out) if part is not None]
    sight = find_sight(target, parts, tokenizer)
    if hasattr(tokenizer, "image_processor"):
        tokenizer = getattr(tokenizer, "tokenizer", None)
    if any(part.format.name != "tokens" for part in parts):
        target.check_length(settings.max_length, "max_length", "lower max_length")
        tokenizer = tokenizer or find_tokenizer(target.name_or_path, target.revision)
    if settings.packing and target.device.type != "meta":
        check_packing(target)
    makers = [make_tokeniser(part, tokenizer, settings, target, sight) for part in parts]
    made = [
        tokenise_once(part, maker, settings)
        for part, maker in zip(parts, makers, strict=True)
        if not part.is_stream
    ]
    tables = [table for table, _ in made]
    if settings.packing and any(SEEN_COLUMN in table.rows.column_names for table in tables):
        raise ValueError("packing joins texts, and rows of the corpus have images: leave it off")
    one_pass = first_pass = None
    with _named_by_place(list(zip(parts, makers, strict=True)), settings, target):
        if corpus.is_stream:
            if max_steps <= 0:
                raise ValueError("a stream has no known end: give max_steps to train so many steps")
            rows, first_pass, one_pass, first_documents, known = _streams()(
                corpus,
                makers[0],
                held_out=(settings.eval_rows or STREAM_EVAL_ROWS) if held_out is None else 0,
                shuffle_buffer=settings.shuffle_buffer,
                seed=seed,
                packing=settings.packing,
            )
            measured = tables[0].rows if first_documents is None else first_documents
            facts = check_rows(known, target, name=TRAINING, heads_reached=1)
        else:
            rows, known, drawn, facts = split_once(
                corpus, made[0], target, settings, seed, draws=held_out is None
            )
            measured = tables[-1].rows if drawn is None else drawn
        if held_out is not None or settings.eval_rows is settings.eval_share is None:
            measured = _draw(measured, settings.eval_rows or EVAL_ROWS, seed)
        held_out_facts = check_rows(measured, target, name="held-out set", heads_reached=num_heads)
    found = [facts.doubt(TRAINING), held_out_facts.doubt("held-out set")]
    if len({fingerprint for _, fingerprint in made}) < len(made):
        found.append(
            "the held-out set is the training set: what is measured says nothing of other text"
        )
    if not own_text:
        stops = () if own_ends else stop_ids(target.model)
        found.append(template_mismatch(known, tokenizer, settings, stops, TRAINING))
    return TrainingData(
        rows,
        measured,
        known,
        facts,
        held_out_facts,
        [*(part for part in parts if part.is_stream), *tables],
        one_pass,
        first_pass,
        tokenizer,
        [sentence for sentence in found if sentence is not None],
        sight,
    )


@contextmanager
def _named_by_place(
    made: Sequence[tuple[Corpus, Tokeniser]], settings: DataArguments, target: TargetModel
) -> Iterator[None]:
    """Within the block rows that do not fit the target are told as broken ones, all of a corpus at
    once: each is looked at again, as where they are to be left out."""
    try:
        yield
    except UnfitRow:
        for corpus, maker in made:
            if not corpus.is_stream:
                tokenise_once(corpus, replace(maker, limits=RowLimits.of(target)), settings)
        raise


def _draw(rows: Dataset, most: int, seed: int) -> Dataset:
    """At most so many rows to measure on, from all over the text; says so where it leaves some."""
    if len(rows) <= most:
        return rows
    logger.warning(
        "%d of %d held-out rows are measured: eval_rows says of how many", most, len(rows)
    )
    return rows.select(np.sort(np.random.default_rng(seed).permutation(len(rows))[:most]))


def make_tokeniser(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase | None,
    settings: DataArguments,
    target: TargetModel,
    sight: Sight | None = None,
) -> Tokeniser:
    """What makes rows of a corpus, for a target; a ValueError where text has no tokenizer, or the
    chat template cannot be used."""
    strict = corpus.bad_rows.policy == "error" and not corpus.is_stream
    limits = None if strict else RowLimits.of(target)
    if corpus.format.name == "tokens":
        return Tokeniser(corpus.format, None, settings.max_length, limits=limits)
    if tokenizer is None:
        raise ValueError("text needs the target's tokenizer, and none was found beside the target")
    sight = sight or Sight()
    chat, stops = None, stop_ids(target.model)
    if corpus.format.name == "messages" or settings.chat_template or tokenizer.chat_template:
        template = settings.template_text() or sight.template
        chat = ChatTemplate(tokenizer, template, settings.template_kwargs(), stops)
    return Tokeniser(corpus.format, tokenizer, settings.max_length, chat, limits, stops, sight)
