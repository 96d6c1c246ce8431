"""Tiny processors for the tiny models that read images, and conversations with images of any size.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from medusa_heads import TargetModel
from scripts.prove.seeing.models import build

_MARKS = {150: "<image>", 151: "<open>", 152: "<close>", 153: "<video>", 154: "<global-img>"}
_MARKS |= {155: "<fake_token_around_image>", 156: "<end_of_utterance>", 157: "<row_1_col_1>"}
_NAMED = {"image": "<image>", "boi": "<open>", "eoi": "<close>", "video": "<video>"}
CHAT = """\
{%- for message in messages %}{{- '[' + message.role + ']' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}{%- for part in message.content %}
{%- if part.type == 'image' %}{{- 'IMAGE' }}{%- else %}{{- part.text }}{%- endif %}
{%- endfor %}{%- endif %}{{- '</s>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[assistant]' }}{%- endif %}"""
_OF_QWEN = "<open><image><close>"
_PLACES = {"qwen2_5_vl": _OF_QWEN, "qwen3_vl": _OF_QWEN, "gemma3": "<open>"}


def tokenizer(kind: str) -> Any:
    """A token a character; texts begin with one of their own, which the template does not write."""
    characters = ["\n", *map(chr, range(32, 127))]
    words = {word: n for n, word in enumerate(["<pad>", "<s>", "</s>", *characters])}
    words |= {f"<{n}>": n for n in range(len(words), 150)} | {w: n for n, w in _MARKS.items()}
    letters = Tokenizer(models.BPE(vocab=words, merges=[]))
    letters.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=letters,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=[*_MARKS.values()],
        extra_special_tokens={f"{name}_token": word for name, word in _NAMED.items()},
        chat_template=CHAT.replace("IMAGE", _PLACES.get(kind, "<image>")),
    )
    from tokenizers.processors import TemplateProcessing

    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return made


def _llava(words: Any) -> Any:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.llava.processing_llava import LlavaProcessor

    images = CLIPImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    told = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaProcessor(images, words, patch_size=8, chat_template=words.chat_template, **told)


def _qwen(number: str, words: Any) -> Any:
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as of_qwen
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    usual: Any = {"2.5": Qwen2_5_VLProcessor, "3": Qwen3VLProcessor}[number]

    class WithoutVideos(usual):
        """Whose reader of videos takes a library that is not needed here."""

        def check_argument_for_proper_class(self, *_: Any) -> Any:
            return None

    size = {"shortest_edge": 256, "longest_edge": 2048}
    images = of_qwen.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, size=size
    )
    return WithoutVideos(images, words, None, chat_template=words.chat_template)


def _gemma(words: Any) -> Any:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    images = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    return Gemma3Processor(images, words, words.chat_template, image_seq_length=4)


def _idefics(words: Any) -> Any:
    from transformers.models.idefics3 import image_processing_pil_idefics3 as of_idefics
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    edges: dict[str, Any] = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
    images = of_idefics.Idefics3ImageProcessorPil(**edges)
    return Idefics3Processor(images, words, image_seq_len=4, chat_template=words.chat_template)


_PROCESSORS: dict[str, Callable[[Any], Any]] = {
    "llava": _llava,
    "qwen2_5_vl": partial(_qwen, "2.5"),
    "qwen3_vl": partial(_qwen, "3"),
    "gemma3": _gemma,
    "idefics3": _idefics,
}
KINDS = [*_PROCESSORS]


def processor(kind: str) -> Any:
    return _PROCESSORS[kind](tokenizer(kind))


@cache
def target(kind: str) -> TargetModel:
    """Not to be changed."""
    found = TargetModel(build(kind))
    found.freeze()
    return found


def save_target(kind: str, folder: Path) -> str:
    """A folder as a hub has it."""
    build(kind).save_pretrained(folder)
    processor(kind).save_pretrained(folder)
    return str(folder)


def save_image(file: Path, seed: int, width: int = 40, height: int = 30) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file)
    return file


def image(path: str | None = None) -> dict[str, Any]:
    return {"type": "image"} | ({} if path is None else {"path": path})


def talk(*parts: Any, answer: Any = "A small grey cat.") -> list[dict[str, Any]]:
    """A question of these parts, texts among them, and its answer."""
    said = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    content = parts[0] if len(parts) == 1 and isinstance(parts[0], str) else said
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


def corpus(folder: Path, rows: Sequence[dict[str, Any]]) -> str:
    """A data file of these rows, beside the images a.png, b.png and c.png of unlike sizes."""
    for seed, name in enumerate("abc"):
        save_image(folder / f"{name}.png", seed, 40 + 12 * seed, 30 + 20 * seed)
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


SEVERAL = [
    {"messages": talk(image("a.png"), "What is this?")},
    {"messages": talk("And what is the capital of France?", answer="Paris, on the Seine.")},
    {"messages": talk("Two:", image("b.png"), image("c.png"), "Which?", answer="The second one.")},
    {
        "messages": talk("Say hello.", answer="Hello, you there.")
        + talk(image("c.png"), "Now this?", answer="A house in a wood.")
        + talk("Sure?", answer="Yes, I am sure.")
    },
]
"""Rows with no image, with one and with two, and one behind a turn of text."""
