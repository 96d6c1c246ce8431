"""Chat templates written the way well-known models write theirs, and a tokenizer for them."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from medusa_heads.data.bad_rows import BadRow
from medusa_heads.data.chat import ChatTemplate
from medusa_heads.data.encoding import Ragged
from medusa_heads.data.formats import Conversation

DEMO_TARGET = Path(__file__).parents[2] / "assets" / "demo-target"

SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<s>", "</s>", "[INST]", "[/INST]", "<bos>",
    "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|end|>",
]  # fmt: skip

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

LLAMA3 = """\
{{- '<|begin_of_text|>' }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim
    + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

# The system's text moves into the last user's message, so earlier turns are rewritten.
MISTRAL = """\
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content + '\\n\\n' %}{%- set rest = messages[1:] %}
{%- else %}{%- set system = '' %}{%- set rest = messages %}{%- endif %}
{{- '<s>' }}
{%- for message in rest %}
{%- if message.role == 'user' %}
{%- set first = loop.last or (loop.nextitem is defined and loop.index0 == rest | length - 2) %}
{{- '[INST] ' + (system if first else '') + message.content + '[/INST]' }}
{%- else %}{{- ' ' + message.content + '</s>' }}{%- endif %}
{%- endfor %}"""

GEMMA = """\
{{- '<bos>' }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{%- endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate') }}
{%- endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n'
    + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

# Thoughts are kept in the last turn alone; without any there is an empty block of them, which the
# prompt itself brings where thinking is switched off.
THINKING = """\
{%- for message in messages %}
{%- if message.role != 'assistant' %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.last %}
{{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}"""

# The prompt opens a thought that the rendered turn then lacks.
OPENED_THOUGHT = CHATML.replace("assistant\\n' }}{%- endif", "assistant\\n<think>\\n' }}{%- endif")

# A line break at the head of each turn belongs to the prompt, and none stands behind the last.
LEADING_NEWLINE = """\
{%- for message in messages %}
{{- '<|' + message.role + '|>\\n' + message.content + '</s>' + ('' if loop.last else '\\n') }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '\\n<|assistant|>\\n' }}{%- endif %}"""

# What ends a document follows what ends a turn.
CLOSED = """\
{%- for message in messages %}
{{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- else %}{{- '<|endoftext|>' }}
{%- endif %}"""

# No special tokens at all.
PLAIN = """\
{%- for message in messages %}
{{- message.role + ': ' + message.content + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant:' }}{%- endif %}"""

# The prompt ends in a space that its tokenizer would rather put before the first word.
TRAILING_SPACE = PLAIN.replace("'assistant:'", "'assistant: '")


def chat_tokenizer() -> Any:
    """The demo target's tokenizer with the special tokens of these templates."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_TARGET)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    return tokenizer


def starting_tokenizer(end: str = "") -> Any:
    """The same, which puts `<s>` before every text, and may put something behind it."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = chat_tokenizer()
    tokenizer.bos_token = "<s>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"<s> $A {end}".strip(),
        special_tokens=[
            (token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", end) if token
        ],
    )
    return tokenizer


def rows_of(chat: ChatTemplate, conversation: Conversation) -> list[tuple[list[int], list[int]]]:
    """input_ids and labels of one conversation. Raises BadRow: it has no rows."""
    (rendered,) = chat.rendered([conversation])
    if isinstance(rendered, BadRow):
        raise rendered
    encoded = Ragged.of(chat.encode([*rendered.asked, *rendered.answered]))
    rows, problems = chat.rows_of([rendered], encoded)
    if problems:
        raise BadRow(problems[0])
    numbers = range(len(rows.sources))
    return [(rows.input_ids.row(number), rows.labels.row(number)) for number in numbers]
