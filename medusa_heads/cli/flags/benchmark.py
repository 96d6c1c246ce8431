"""What `medusa-heads benchmark` can be told."""

from __future__ import annotations

from dataclasses import dataclass, field

DTYPES = ("bfloat16", "float16", "float32")
# Behind a lower precision, the same text is proved in float32 where that does not take long.
PROVED_PARAMETERS = 250_000_000
DECODINGS = ("greedy", "sampled")


@dataclass
class BenchmarkArguments:
    """What to measure, on which prompts."""

    checkpoint: str = field(
        metadata={
            "help": "Heads checkpoint, or a target without heads: a folder, or "
            "user/name[@revision] on a hub."
        }
    )
    target: str | None = field(
        default=None,
        metadata={"help": "Hub id or path of the target. Default: the one the heads name."},
    )
    draft_model: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Hub id or path of a draft model, for the methods that need one; of several, "
            "draft-model chooses while it decodes, and transformers-assisted takes the first.",
            "action": "extend",
        },
    )
    methods: list[str] | None = field(
        default=None,
        metadata={
            "help": "What to compare: plain (always measured), plain-compiled, "
            "transformers-prompt-lookup, transformers-assisted, heads[:TREE], draft-model[:TREE], "
            "or a drafter that needs no training, as of generate --drafter; of the last three "
            "kinds NAME+compile verifies through torch.compile, and with --corpus "
            "NAME+corpus[+compile] continues that, too. Default: plain, "
            "transformers-prompt-lookup and the heads (in float32 behind another dtype plain and "
            "the heads, to prove the output the same), without heads auto in their place; and "
            "draft-model and NAME+corpus where those are given."
        },
    )
    corpus: str | None = field(
        default=None,
        metadata={"help": "File or folder of text that the methods NAME+corpus continue."},
    )
    batch_sizes: list[int] = field(
        default_factory=lambda: [1], metadata={"help": "Prompts decoded together."}
    )
    prompts: str | None = field(
        default=None,
        metadata={
            "help": "Prompts, one a line, or .jsonl with prompt, text, or turns and category as in "
            "Spec-Bench. Default: windows of Python's standard library, from packages that no "
            "training here has seen: give your own prompts for a chat model."
        },
    )
    num_prompts: int = field(
        default=20,
        metadata={"help": "Prompts to measure on, from all categories in turn; 0: the whole file."},
    )
    max_prompt_length: int | None = field(
        default=None, metadata={"help": "Leave out prompts of more tokens, and say how many."}
    )
    prompt_length: int = field(
        default=64, metadata={"help": "Tokens in each of the default prompts."}
    )
    max_new_tokens: int = field(default=128, metadata={"help": "Tokens after each prompt."})
    temperature: float = field(
        default=0.7, metadata={"help": "Temperature of the sampled settings."}
    )
    # train-heads draws the text it measures heads on with seed 0: other prompts than those.
    seed: int = field(default=1, metadata={"help": "Seed of the default prompts and of sampling."})
    tree: str = field(
        default="auto",
        metadata={
            "help": "Tree of the method heads, unless it names one: auto, N, static:N, dynamic:N, "
            "none, chain, cartesian:A,B,.., FILE.json, one of them +suffix, or suffix."
        },
    )
    dtypes: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Dtypes of the target's weights; each is measured. Default: the fastest here "
            "that holds them exactly; and of a target with at most "
            f"{PROVED_PARAMETERS // 1_000_000}M parameters float32, to prove the output the same."
        },
    )
    decodings: list[str] = field(
        default_factory=lambda: list(DECODINGS),
        metadata={"help": "What is measured: greedy, sampled, or both."},
    )
    device: str | None = field(
        default=None, metadata={"help": "Device, such as cuda. Default: the best there is."}
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Run the Python code that the target's repository brings."}
    )
    threads: int | None = field(
        default=None,
        metadata={"help": "CPU threads. Default: as many as plain decoding is fastest with."},
    )
    report: str | None = field(
        default=None, metadata={"help": "Folder for report.json, report.md and report.png."}
    )
