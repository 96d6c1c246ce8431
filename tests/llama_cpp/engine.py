"""llama.cpp's server in a process of its own: greedy texts of some prompts, and what it counted.

python engine.py '{"target": .., "draft": .., "way": .., "draft_tokens": .., "prompts": ..,
"new_tokens": ..}' prints a JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from typing import Any

import xllamacpp


def parameters(target: str, draft: str | None, way: str | None, draft_tokens: int) -> Any:
    """Of the server: one thread, and keys and values in fp32, in which counts can be compared."""
    said = xllamacpp.CommonParams()
    said.model.path = target
    said.n_ctx, said.n_parallel, said.port, said.verbosity = 512, 1, 0, 0
    said.warmup = said.ui = said.fit_params = False
    said.cpuparams.n_threads = said.cpuparams_batch.n_threads = 1
    said.cache_type_k = said.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    said.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if draft is not None and way is not None:
        drafter = said.speculative.draft
        kind = f"COMMON_SPECULATIVE_TYPE_{way.replace('-', '_').upper()}"
        said.speculative.types = [getattr(xllamacpp.common_speculative_type, kind)]
        drafter.mparams.path, drafter.n_max, drafter.p_min = draft, draft_tokens, 0.0
        drafter.cpuparams.n_threads = drafter.cpuparams_batch.n_threads = 1
        drafter.cache_type_k = drafter.cache_type_v = said.cache_type_k
    return said


def answer(address: str, prompt: list[int], new_tokens: int) -> dict[str, Any]:
    """What the server wrote greedily behind token ids, whatever it is."""
    body = {
        "prompt": prompt,
        "n_predict": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/completion", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        said: dict[str, Any] = json.load(response)
    return said


def main() -> None:
    asked = json.loads(sys.argv[1])
    server = xllamacpp.Server(
        parameters(asked["target"], asked.get("draft"), asked.get("way"), asked["draft_tokens"])
    )
    answers = [
        answer(server.listening_address, prompt, asked["new_tokens"]) for prompt in asked["prompts"]
    ]
    timings = [each["timings"] for each in answers]
    print(
        json.dumps(
            {
                "texts": [each["tokens"] for each in answers],
                "draft_tokens": sum(each.get("draft_n", 0) for each in timings),
                "accepted": sum(each.get("draft_n_accepted", 0) for each in timings),
            }
        ),
        flush=True,
    )
    os._exit(0)  # the server's own threads end at a request alone


if __name__ == "__main__":
    main()
