"""The flags and YAML keys of text that the target writes itself.

Light: nothing here imports torch or transformers.
"""

from dataclasses import dataclass, field
from typing import Literal

from medusa_heads.settings import at_least


@dataclass
class DistillArguments:
    """Training on the target's own continuations of the corpus instead of on the corpus."""

    self_distill: bool = field(
        default=False,
        metadata={"help": "Let the target continue prompts from the corpus and learn from that."},
    )
    num_prompts: int = field(
        default=2048, metadata={"help": "With self_distill: prompts drawn from the corpus."}
    )
    num_eval_prompts: int = field(
        default=128, metadata={"help": "With self_distill: prompts drawn from the held-out text."}
    )
    prompt_length: int = field(
        default=64, metadata={"help": "With self_distill: tokens of a prompt."}
    )
    continuation_length: int = field(
        default=128,
        metadata={"help": "With self_distill: tokens the target writes after each prompt."},
    )
    greedy_share: float = field(
        default=0.5,
        metadata={
            "help": "With self_distill: share of prompts continued greedily; others are sampled."
        },
    )
    temperature: float = field(
        default=0.7,
        metadata={"help": "With self_distill: sampling temperature of the other prompts."},
    )
    generation_batch_size: int = field(
        default=128, metadata={"help": "With self_distill: prompts continued at the same time."}
    )
    generation_workers: int = field(
        default=1,
        metadata={"help": "With self_distill on a CPU: processes that share the prompts."},
    )
    distill_cache: str | None = field(
        default=None,
        metadata={
            "help": "With self_distill: folder that keeps the text. Default: OUTPUT_DIR/distilled."
        },
    )

    def __post_init__(self) -> None:
        at_least(self, 1, "num_prompts", "num_eval_prompts", "prompt_length")
        at_least(self, 1, "continuation_length", "generation_batch_size")
        at_least(self, 1, "generation_workers")
        if not 0 <= self.greedy_share <= 1:
            raise ValueError(f"greedy_share must lie in [0, 1], got {self.greedy_share}")
        if self.temperature <= 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature}")


@dataclass
class RegenerateArguments:
    """What the target is asked, who answers, and where the answers go."""

    model_name_or_path: str = field(
        metadata={
            "help": "The target: a hub id or a local folder. For a server, where its tokenizer and "
            "configuration lie."
        }
    )
    output_dir: str = field(
        metadata={"help": "Folder for the dataset; train-heads takes it as --dataset."}
    )
    dataset: str = field(
        metadata={
            "help": "Where the prompts come from: a hub id, a folder, a .jsonl, .json, .parquet, "
            ".csv or .txt file, or 'stdlib' (the sources of Python's own standard library). Read "
            "is the first of these columns that is there: messages (conversations), prompt, "
            "input_ids, text (windows are drawn from it)."
        }
    )
    dataset_split: str = field(default="train", metadata={"help": "Split of the dataset."})
    dataset_config: str | None = field(
        default=None, metadata={"help": "Configuration (subset) of a hub dataset."}
    )
    backend: Literal["transformers", "heads", "continuous", "server"] = field(
        default="transformers",
        metadata={
            "help": "Who answers: the target's own generate, the target with --heads, "
            "transformers' continuous batching, or an OpenAI-compatible server at --base_url."
        },
    )
    num_prompts: int | None = field(
        default=None,
        metadata={"help": "Prompts asked. Default: every row; of running text 2048 windows."},
    )
    prompt_length: int = field(default=64, metadata={"help": "Tokens of a window of running text."})
    max_new_tokens: int = field(default=256, metadata={"help": "Most tokens of an answer."})
    turns: Literal["last", "all"] = field(
        default="last",
        metadata={
            "help": "Answer the last turn of the assistant in a conversation, or all of them, each "
            "with the target's own earlier answers before it."
        },
    )
    chat_template_kwargs: dict | str | None = field(
        default=None,
        metadata={"help": "Further variables of the chat template: a YAML mapping, or JSON."},
    )
    greedy_share: float = field(
        default=0.5, metadata={"help": "Share of prompts answered greedily; the rest is sampled."}
    )
    temperature: float = field(default=0.7, metadata={"help": "Temperature of the sampled share."})
    seed: int = field(default=0, metadata={"help": "Seed of windows and sampling."})
    batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Prompts answered at the same time. Default: 128; with heads 8, on a CPU 1."
        },
    )
    num_workers: int = field(
        default=1,
        metadata={"help": "Processes that share the prompts, for backend transformers on a CPU."},
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = field(
        default="auto",
        metadata={
            "help": "Dtype of the target's weights; auto: the fastest on this machine that holds "
            "them exactly."
        },
    )
    device: str | None = field(
        default=None, metadata={"help": "Device, such as cpu or cuda. Default: the best there is."}
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Run modelling code that comes with the target."}
    )
    heads: str | None = field(
        default=None, metadata={"help": "Heads checkpoint, for the backend heads."}
    )
    base_url: str | None = field(
        default=None, metadata={"help": "Address of the server, such as http://localhost:8000/v1."}
    )
    model: str | None = field(
        default=None,
        metadata={"help": "The server's name for the target. Default: model_name_or_path."},
    )
    endpoint: Literal["auto", "completions", "chat"] = field(
        default="auto",
        metadata={
            "help": "Endpoint of the server: completions (exact: prompts go as token ids), chat, "
            "or auto: completions if the server takes token ids."
        },
    )
    token_ids: bool = field(
        default=False,
        metadata={"help": "Have the server send the answers' token ids too (vLLM can)."},
    )
    concurrency: int = field(
        default=16, metadata={"help": "Requests that are sent at the same time."}
    )
    retries: int = field(
        default=5, metadata={"help": "Further tries for a request that the server could not serve."}
    )
    timeout: float = field(
        default=600.0, metadata={"help": "Seconds of silence before a request has failed."}
    )
    api_key_variable: str = field(
        default="OPENAI_API_KEY",
        metadata={"help": "Environment variable that holds the server's API key, if it wants one."},
    )
    answers_dir: str | None = field(
        default=None,
        metadata={"help": "Folder that keeps finished answers. Default: OUTPUT_DIR/answers."},
    )
    strict: bool = field(
        default=False,
        metadata={"help": "Exit with an error if any answer failed or was skipped."},
    )

    def __post_init__(self) -> None:
        at_least(self, 1, "prompt_length", "max_new_tokens", "num_workers", "concurrency")
        at_least(self, 0, "retries")
        for name in ("num_prompts", "batch_size"):
            if getattr(self, name) is not None:
                at_least(self, 1, name)
        if not 0 <= self.greedy_share <= 1:
            raise ValueError(f"greedy_share must lie in [0, 1], got {self.greedy_share}")
        for name in ("temperature", "timeout"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        needed = {"heads": "heads", "server": "base_url"}.get(self.backend)
        if needed is not None and getattr(self, needed) is None:
            raise ValueError(f"the backend {self.backend} needs --{needed}")
        # What another backend would read is a misunderstanding, not a detail.
        for backend, names in _ONLY.items():
            for name in names if self.backend != backend else ():
                if getattr(self, name) != self.__dataclass_fields__[name].default:
                    raise ValueError(
                        f"{name} is read by the backend {backend} alone, and this is "
                        f"{self.backend}: leave it out, or set --backend {backend}"
                    )
        if self.backend == "server" and self.batch_size is not None:
            raise ValueError("a server makes its own batches: set --concurrency, not batch_size")


_ONLY = {
    "transformers": ("num_workers",),
    "heads": ("heads",),
    "server": (
        "base_url",
        "model",
        "endpoint",
        "token_ids",
        "concurrency",
        "retries",
        "timeout",
        "api_key_variable",
    ),
}
"""Settings of one backend only."""
