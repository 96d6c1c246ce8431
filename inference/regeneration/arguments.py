"""The flags and YAML keys of text that the target writes itself.

Light: nothing here imports torch or transformers.
"""

from dataclasses import MISSING, dataclass
from typing import Any, Literal

from medusa_heads.files import at_home
from medusa_heads.settings import above_zero, at_least, flag, folders
from medusa_heads.shared_flags import BadRowFlag, LoadingFlags


@dataclass
class DistillArguments:
    """Training on the target's own continuations of the corpus instead of on the corpus."""

    self_distill: bool = flag(False, "Let the target continue the corpus, and learn from that.")
    num_prompts: int = flag(2048, "With self_distill: prompts drawn from the corpus.")
    num_eval_prompts: int = flag(128, "With self_distill: prompts drawn from the held-out text.")
    prompt_length: int = flag(64, "With self_distill: tokens of a prompt.")
    continuation_length: int = flag(128, "With self_distill: tokens written after each prompt.")
    greedy_share: float = flag(0.5, "With self_distill: share of greedy continuations.")
    temperature: float = flag(0.7, "With self_distill: sampling temperature of the other prompts.")
    generation_batch_size: int = flag(128, "With self_distill: prompts continued at the same time.")
    generation_workers: int = flag(1, "With self_distill on a CPU: processes that write.")
    distill_cache: str | None = flag(
        None, "With self_distill: folder that keeps the text. Default: OUTPUT_DIR/distilled."
    )

    def __post_init__(self) -> None:
        at_least(self, 1, "num_prompts", "num_eval_prompts", "prompt_length", "continuation_length")
        at_least(self, 1, "generation_batch_size", "generation_workers")
        if not 0 <= self.greedy_share <= 1:
            raise ValueError(f"greedy_share must lie in [0, 1], got {self.greedy_share}")
        above_zero(self, "temperature")


LONGEST_ANSWER = 2048
"""Tokens of an answer, unless asked otherwise: few are longer, and one that repeats itself ends."""


def longest_answer(max_positions: int | None) -> int:
    """The same for a target with so long a context, half of which is left to the prompt."""
    return LONGEST_ANSWER if max_positions is None else min(LONGEST_ANSWER, max_positions // 2)


LONGEST_TIMEOUT = 86400.0
"""Seconds: a day. Systems count them in few bits; a server that is silent for so long is gone."""


@dataclass
class RegenerateArguments(LoadingFlags, BadRowFlag):
    """What the target is asked, who answers, and where the answers go."""

    model_name_or_path: str = flag(
        MISSING, "The target: a hub id or a folder. For a server: of its tokenizer and config."
    )
    output_dir: str = flag(MISSING, "Folder for the dataset; train-heads takes it as --dataset.")
    dataset: list[str] = flag(
        [],
        "Where the prompts come from: a hub id, a folder, .jsonl, .json, .parquet, .csv or .txt "
        "files, or 'stdlib' (the sources of Python's own standard library). Read is the first of "
        "these columns that is there: messages or conversations, prompt, input_ids, text (windows "
        "are drawn from it). Several names and globs are joined.",
        required=True,
    )
    dataset_split: str = flag("train", "Split of the dataset.")
    dataset_config: str | None = flag(None, "Configuration (subset) of a hub dataset.")
    backend: Literal["transformers", "heads", "continuous", "vllm", "server"] = flag(
        "transformers",
        "Who answers: the target's own generate, the target with --heads, transformers' "
        "continuous batching, vLLM in this process, or an OpenAI-compatible server at --base_url.",
    )
    num_prompts: int | None = flag(None, "Prompts asked. Default: all rows; of text 2048 windows.")
    prompt_length: int = flag(64, "Tokens of a window of running text.")
    max_new_tokens: int | None = flag(
        None,
        "Most tokens of an answer. Default: 2048, or half of the target's context if that is less.",
    )
    turns: Literal["last", "all"] = flag(
        "all",
        "Answer all turns of the assistant in a conversation, each with the target's own earlier "
        "answers before it, or the last one, after the corpus's own words.",
    )
    chat_template_kwargs: dict | str | None = flag(
        None, "Further variables of the chat template: a YAML mapping, or JSON."
    )
    greedy_share: float = flag(0.5, "Share of prompts answered greedily; the rest is sampled.")
    temperature: float = flag(0.7, "Temperature of the sampled share.")
    top_p: float | None = flag(
        None, "Nucleus of the sampled share. Default: the generation_config's, or the server's."
    )
    top_k: int | None = flag(None, "Likeliest tokens that are sampled from. Default: as top_p.")
    seed: int = flag(0, "Seed of windows and sampling.")
    batch_size: int | None = flag(
        None, "Prompts answered at the same time. Default: 128; with heads 8, on a CPU 1."
    )
    num_workers: int = flag(1, "Processes of the backend transformers on a CPU.")
    heads: str | None = flag(None, "Heads checkpoint, for the backend heads.")
    engine_args: dict | str | None = flag(
        None, "Arguments of vllm.LLM, for the backend vllm: a YAML mapping, or JSON."
    )
    base_url: list[str] | None = flag(
        None, "Addresses of one or more servers, such as http://localhost:8000/v1."
    )
    model: str | None = flag(None, "The server's name for the target. Default: model_name_or_path.")
    endpoint: Literal["auto", "completions", "chat"] = flag(
        "auto",
        "Endpoint of the server: completions (exact: prompts go as token ids), chat, or auto: "
        "completions if the server takes token ids.",
    )
    token_ids: bool = flag(False, "Have the server send the answers' token ids too (vLLM can).")
    concurrency: int = flag(16, "Requests that are sent at the same time.")
    retries: int = flag(5, "Further tries for a request that the server could not serve.")
    timeout: float = flag(600.0, "Seconds of silence before a request has failed.")
    api_key_variable: str = flag(
        "OPENAI_API_KEY", "Environment variable that holds the server's API key, if it wants one."
    )
    num_shards: int = flag(1, "Processes that share the corpus; each has an output_dir of its own.")
    shard_index: int = flag(0, "Which of num_shards this is, from 0: it takes every n-th row.")
    answers_dir: str | None = flag(None, "Folder of finished answers. Default: OUTPUT_DIR/answers.")
    strict: bool = flag(False, "Exit with an error if any answer failed or was skipped.")

    def __post_init__(self) -> None:
        named: Any = self.dataset  # in a YAML file, and from Python, one name may stand alone
        if isinstance(named, str):
            self.dataset = [named]
        self.model_name_or_path = at_home(self.model_name_or_path)
        folders(self, "output_dir")
        at_least(self, 1, "prompt_length", "max_new_tokens", "num_workers", "concurrency")
        at_least(self, 1, "num_prompts", "batch_size", "num_shards", "top_k")
        at_least(self, 0, "retries")
        if not 0 <= self.greedy_share <= 1:
            raise ValueError(f"greedy_share must lie in [0, 1], got {self.greedy_share}")
        above_zero(self, "temperature", "timeout", "top_p")
        if self.timeout > LONGEST_TIMEOUT:
            raise ValueError(
                f"timeout must be at most {LONGEST_TIMEOUT:.0f} seconds, got {self.timeout}"
            )
        if self.top_p is not None and self.top_p > 1:
            raise ValueError(f"top_p must be at most 1, got {self.top_p}")
        if not 0 <= self.shard_index < self.num_shards:
            raise ValueError(
                f"expected a shard_index from 0 to {self.num_shards - 1}, got {self.shard_index}"
            )
        needed = {"heads": "heads", "server": "base_url"}.get(self.backend)
        if needed is not None and not getattr(self, needed):
            raise ValueError(f"the backend {self.backend} needs --{needed}")
        # What another backend would read is a misunderstanding, not a detail.
        for backend, names in _ONLY.items():
            for name in names if self.backend != backend else ():
                if getattr(self, name) != self.__dataclass_fields__[name].default:
                    raise ValueError(
                        f"{name} is read by the backend {backend} alone, and this is "
                        f"{self.backend}: leave it out, or set --backend {backend}"
                    )
        if self.backend in ("server", "vllm") and self.batch_size is not None:
            raise ValueError(
                f"the backend {self.backend} makes its own batches: set --concurrency of a server, "
                "or max_num_seqs in --engine_args of vllm, not batch_size"
            )


_ONLY = {
    "transformers": ("num_workers",),
    "heads": ("heads",),
    "vllm": ("engine_args",),
    "server": (
        "base_url", "model", "endpoint", "token_ids",
        "concurrency", "retries", "timeout", "api_key_variable",
    ),
}  # fmt: skip
"""Settings of one backend only."""
