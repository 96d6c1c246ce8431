"""What a second and a fourth chain from one recurrent state would take, as rows of a batch.

python -m scripts.measure.state_rows
python -m scripts.measure.state_rows --kinds lfm2 --rounds 50

Targets of some 30 to 40 million random weights in fp32, behind a text of 128 tokens; seconds of one
thread's own work, whatever else runs, and the least of several rounds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from medusa_heads.cli.flags.arguments import command
from medusa_heads.settings import flag

_SIZE: dict[str, Any] = {
    "vocab_size": 16384,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
_OWN: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "head_dim": 64,
    },
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2},
    "falcon_h1": {"mamba_d_ssm": 768, "mamba_n_heads": 12, "mamba_d_state": 64},
}


@dataclass
class Arguments:
    """What to measure."""

    kinds: list[str] = flag(list(_OWN), "of targets")
    tokens: list[int] = flag([4, 8], "of a chain")
    context: int = flag(128, "tokens in front of the chains")
    rounds: int = flag(12, "of which the least is taken")


def measure(arguments: Arguments) -> None:
    """Print milliseconds of verifying chains of 1, 2 and 4 rows."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from medusa_heads import TargetModel
    from medusa_heads.inference.adapt.step_bench import RandomChain, StepBench

    if unknown := set(arguments.kinds) - set(_OWN):
        raise ValueError(f"kinds are of {', '.join(_OWN)}, got {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    for kind in arguments.kinds:
        torch.manual_seed(0)
        config = CONFIG_MAPPING[kind](**_SIZE, **_OWN[kind])
        target = TargetModel(AutoModelForCausalLM.from_config(config).float())
        target.freeze()
        benches = {rows: StepBench(target, arguments.context, rows) for rows in (1, 2, 4)}
        for tokens in arguments.tokens:
            chain, least = RandomChain(tokens - 1, target.vocab_size), dict.fromkeys(benches, 9e9)
            for _ in range(arguments.rounds):
                for rows, bench in benches.items():
                    started = time.thread_time()
                    bench.time(chain)
                    least[rows] = min(least[rows], time.thread_time() - started)
            each = ", ".join(f"{rows} rows {1e3 * took:.0f} ms" for rows, took in least.items())
            print(f"{kind}, {tokens} tokens a row: {each}", flush=True)


main = command("scripts.measure.state_rows", measure, __doc__)

if __name__ == "__main__":
    raise SystemExit(main())
