"""How heads in a repository are loaded: here, in transformers, in engines that can hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from medusa_heads.config import HeadsConfig


def how_to_use(
    repo_id: str, config: HeadsConfig, sidecar: Mapping[str, Any], with_matrix: bool
) -> list[str]:
    """The card's sections on loading.

    Args:
        repo_id: where the heads stand.
        config: what they are.
        sidecar: the checkpoint's.
        with_matrix: a copy of the target's vocabulary matrix lies beside them.
    """
    base_model = sidecar["target"]["name_or_path"]
    pinned = sidecar["target"].get("revision")
    at = f', revision="{pinned}"' if pinned else ""
    parts = [
        "## Use",
        "Install the package medusa-heads from a checkout of its sources (`pip install -e .`). The "
        "target is downloaded by its name and checked against the heads:",
        _python(
            "from transformers import AutoTokenizer",
            "from medusa_heads import MedusaModel",
            "",
            f'model = MedusaModel.from_pretrained("{repo_id}")',
            f'tokenizer = AutoTokenizer.from_pretrained("{base_model}"{at})',
            'inputs = tokenizer("Once upon a time", return_tensors="pt").to(model.target.device)',
            "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=128)[0]))",
        ),
    ]
    if sidecar.get("adapter"):
        parts.append(
            "transformers' own `generate(custom_generate=...)` needs a target that carries the "
            "adapter: `peft.PeftModel.from_pretrained(target, ...)` with the folder `adapter/`."
        )
    else:
        parts += [
            "Or in transformers alone, by name:",
            _python(
                "from transformers import AutoModelForCausalLM",
                "",
                f'target = AutoModelForCausalLM.from_pretrained("{base_model}"{at})',
                "target.generate(",
                f'    **inputs, custom_generate="{repo_id}", trust_remote_code=True, '
                "max_new_tokens=128",
                ")",
            ),
        ]
    return [*parts, *_engines(repo_id, config, sidecar, with_matrix)]


def _engines(
    repo_id: str, config: HeadsConfig, sidecar: Mapping[str, Any], with_matrix: bool
) -> list[str]:
    parts = ["## Other engines"]
    if why := _held_by_none(config, sidecar):
        return [*parts, f"vLLM and TGI cannot hold these heads: {why}."]
    base_model = sidecar["target"]["name_or_path"]
    plugin = [
        "vLLM 0.33, which has no Medusa of its own, drafts with them by this package's plugin:",
        _shell(_with_plugin(repo_id, base_model, config.num_heads)),
    ]
    if config.draft_vocab_size is not None:
        return [*parts, *plugin, "TGI cannot hold them: they draft from a part of the vocabulary."]
    as_it_is = config.vocab_matrix == "own" or with_matrix
    export = "" if as_it_is else f"medusa-heads export {repo_id} heads-vllm --to vllm\n"
    speculative = (
        f'{{"method": "medusa", "model": "{repo_id if as_it_is else "heads-vllm"}", '
        f'"num_speculative_tokens": {config.num_heads}}}'
    )
    parts += [
        "vLLM 0.32 (the last release with Medusa) drafts a chain with them, no tree"
        + (":" if as_it_is else ". It wants the target's vocabulary matrix beside them:"),
        _shell(f"{export}vllm serve {base_model} --speculative-config '{speculative}'"),
        *plugin,
    ]
    if config.vocab_matrix == "own" or config.num_layers == 1:
        parts += [
            "TGI finds the target in `config.json`; this was not tried:",
            _shell(f"text-generation-launcher --model-id {repo_id}"),
        ]
    else:
        parts.append("TGI cannot hold them: it reads one layer a head where the matrix is shared.")
    return parts


def _with_plugin(repo_id: str, base_model: str, num_heads: int) -> str:
    speculative = (
        f'{{"method": "custom_class", "num_speculative_tokens": {num_heads}, '
        '"model": "medusa_heads.inference.serving.vllm.MedusaProposer"}'
    )
    return (
        f"medusa-heads pull {repo_id} heads\n"
        f"vllm serve {base_model} --speculative-config '{speculative}' "
        '--additional-config \'{"medusa_heads": "heads"}\''
    )


def _held_by_none(config: HeadsConfig, sidecar: Mapping[str, Any]) -> str | None:
    if config.kind != "medusa":
        return f"their kind is `{config.kind}`, whose heads also see the tokens drafted before"
    if config.prefix_attention:
        return "a layer of theirs attends over the text so far"
    if sidecar.get("adapter"):
        return "they belong to the target with its adapter, which would have to be merged first"
    return None


def _python(*lines: str) -> str:
    return "```python\n" + "\n".join(lines) + "\n```"


def _shell(line: str) -> str:
    return f"```bash\n{line}\n```"
