"""One vLLM engine in a process of its own: reads its settings from stdin, prints what it did.

Settings are a JSON object: `prompts` (token ids), `max_tokens` and `engine`, the arguments of
`vllm.LLM`. The last line printed is a JSON object with `texts` and the `spec_decode` `counters`.
"""

import json
import sys
from typing import Any


def main() -> None:
    """Decode the prompts greedily, all at once."""
    settings = json.load(sys.stdin)
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(disable_log_stats=False, **settings["engine"])
    made = llm.generate(
        [TokensPrompt(prompt_token_ids=prompt) for prompt in settings["prompts"]],
        SamplingParams(temperature=0, max_tokens=settings["max_tokens"], **settings["sampling"]),
        use_tqdm=False,
    )
    texts = [list(output.outputs[0].token_ids) for output in made]
    counters: dict[str, Any] = {
        metric.name: getattr(metric, "values", None) or getattr(metric, "value", None)
        for metric in llm.get_metrics()
        if "spec_decode" in metric.name
    }
    llm.llm_engine.engine_core.shutdown()
    print(json.dumps({"texts": texts, "counters": counters}))


if __name__ == "__main__":
    main()
