"""What tests say in a chat, and what plain generate() answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from medusa_heads import TargetModel

FAITHFUL = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# As templates of thinking models do: of earlier answers only a part is shown again.
SHORTENED = FAITHFUL.replace(
    "{{ m.content }}",
    "{{ m.content[:7] if m.role == 'assistant' else m.content }}",
)
LINES = ["hello there", "and then?", "bye"]


def install(speaker: Path, template: str | None) -> str | None:
    tokenizer: Any = AutoTokenizer.from_pretrained(speaker / "target")
    tokenizer.chat_template = template
    (speaker / "target" / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(speaker / "target")
    return template


def plain_answers(
    speaker: Path, template: str | None, lines: list[str], **options: Any
) -> list[str]:
    """Every turn anew: the whole conversation rendered, then transformers' own generate()."""
    model: Any = TargetModel.from_pretrained(str(speaker / "target")).model
    tokenizer: Any = AutoTokenizer.from_pretrained(speaker / "target")
    messages: list[dict[str, str]] = []
    text = ""
    answers = []
    for turn, line in enumerate(lines):
        messages.append({"role": "user", "content": line})
        if template is None:
            text += line if not text or text.endswith("\n") else "\n" + line
        else:
            text = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        torch.manual_seed(turn)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, **options)
        answers.append(tokenizer.decode(out[0, ids.shape[1] :]))
        messages.append({"role": "assistant", "content": answers[-1]})
        text += answers[-1]
    return answers
