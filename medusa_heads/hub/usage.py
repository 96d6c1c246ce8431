"""How heads of a repository are loaded: paragraphs of its model card, for this package, for
transformers, and for the engines that can hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from medusa_heads.checkpoint.stored_heads import StoredHeads
from medusa_heads.interop.fits import check_fits


def loading(repo_id: str, sidecar: Mapping[str, Any]) -> list[str]:
    """By this package, and by transformers alone."""
    base_model, pinned = (sidecar["target"].get(key) for key in ("name_or_path", "revision"))
    named = f'"{base_model}", revision="{pinned}"' if pinned else f'"{base_model}"'
    parts = [
        "## Use",
        "Install the package medusa-heads from a checkout of its sources (`pip install -e .`). The "
        "target is downloaded by its name and checked against the heads:",
        f"""```python
from transformers import AutoTokenizer
from medusa_heads import MedusaModel

model = MedusaModel.from_pretrained("{repo_id}")
tokenizer = AutoTokenizer.from_pretrained({named})
inputs = tokenizer("Once upon a time", return_tensors="pt").to(model.target.device)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=128)[0]))
```""",
    ]
    if sidecar.get("adapter"):
        return [
            *parts,
            "transformers' own `generate(custom_generate=...)` needs a target that carries the "
            "adapter: `peft.PeftModel.from_pretrained(target, ...)` with the folder `adapter/`.",
        ]
    return [
        *parts,
        "Or in transformers alone, by name:",
        f"""```python
from transformers import AutoModelForCausalLM

target = AutoModelForCausalLM.from_pretrained({named})
target.generate(
    **inputs, custom_generate="{repo_id}", trust_remote_code=True, max_new_tokens=128
)
```""",
    ]


def engines(
    repo_id: str, stored: StoredHeads, sidecar: Mapping[str, Any], with_matrix: bool
) -> list[str]:
    """By vLLM and TGI, or why they cannot hold the heads."""
    config, method = stored.config, stored.config.served_as
    base_model, pinned = (sidecar["target"].get(key) for key in ("name_or_path", "revision"))
    serve = f"vllm serve {base_model}" + (f" --revision {pinned}" if pinned else "")
    why = None
    if method and not sidecar.get("adapter"):
        try:
            check_fits(stored, method)
        except ValueError as error:
            why = str(error)
        else:
            return [
                f"vLLM drafts a chain with them by its own `{method}`, from files that it reads:",
                f"""```bash
medusa-heads export {repo_id} heads-{method} --to {method}
{serve} --speculative-config '{{"method": "{method}", \
"model": "heads-{method}", "num_speculative_tokens": {config.num_heads}}}'
```""",
            ]
    elif config.kind == "hydra":
        why = f"their kind is `{config.kind}`, whose heads also see the tokens drafted before"
    elif config.reads_text:
        why = "they attend over the text so far"
    elif config.features:
        why = "they read layers of the target below its last hidden state"
    elif sidecar.get("adapter"):
        why = "they belong to the target with its adapter, which would have to be merged first"
    if why:
        return [f"vLLM and TGI cannot hold these heads: {why}."]
    plugin = [
        "vLLM 0.33, which has no Medusa of its own, drafts with them by this package's plugin:",
        f"""```bash
medusa-heads pull {repo_id} heads
{serve} --speculative-config '{{"method": "custom_class", \
"num_speculative_tokens": {config.num_heads}, \
"model": "medusa_heads.inference.serving.vllm.MedusaProposer"}}' \
--additional-config '{{"medusa_heads": "heads"}}'
```""",
    ]
    if config.draft_vocab_size is not None:
        why = "TGI cannot hold them: they draft from a part of the vocabulary."
        beyond_medusa = config.correction_rank or config.linear_shortcut
        if config.vocab_matrix == "shared" and not beyond_medusa:
            why += (
                f" `medusa-heads export {repo_id} heads-tgi --to tgi --full_vocabulary` makes "
                "heads that draft all of it, which was not tried."
            )
        return [*plugin, why]
    if config.correction_rank is not None:
        return [*plugin, "TGI cannot hold them: the token before corrects what they say."]
    if config.linear_shortcut:
        return [*plugin, "TGI cannot hold them: their blocks have linear shortcuts."]
    if stored.has_vocab_bias:
        why = "the heads' vocabulary matrices have biases"
        return [*plugin, f"vLLM 0.32 and TGI cannot hold them: {why}."]
    own = config.vocab_matrix == "own"
    as_it_is = own or with_matrix
    export = "" if as_it_is else f"medusa-heads export {repo_id} heads-vllm --to vllm\n"
    tgi = ["TGI cannot hold them: it reads one layer a head where the matrix is shared."]
    if own or config.num_layers == 1:
        tgi = [
            "TGI finds the target in `config.json`; this was not tried:",
            f"```bash\ntext-generation-launcher --model-id {repo_id}\n```",
        ]
    return [
        "vLLM 0.32 (the last release with Medusa) drafts a chain with them, no tree"
        + (":" if as_it_is else ". It wants the target's vocabulary matrix beside them:"),
        f"""```bash
{export}{serve} --speculative-config '{{"method": "medusa", \
"model": "{repo_id if as_it_is else "heads-vllm"}", "num_speculative_tokens": {config.num_heads}}}'
```""",
        *plugin,
        *tgi,
    ]
