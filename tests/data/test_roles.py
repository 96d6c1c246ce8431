"""A developer, whom few chat templates know."""

from typing import Any

import pytest

from medusa_heads.data.chat import ask_ids
from medusa_heads.data.messages import parted
from tests.training import templates

# As Qwen's: whoever else speaks is left out.
SOME = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
RAISING = SOME.replace("{% endif %}{% endfor %}", "{% else %}{{ 1 / 0 }}{% endif %}{% endfor %}")
IN_PARTS = SOME.replace("m.content", "m.content[0].text")
ANY = SOME.replace("m.role in ('system', 'user', 'assistant')", "true")


@pytest.mark.parametrize(
    ("template", "role"),
    [(SOME, "system"), (RAISING, "system"), (IN_PARTS, "system"), (ANY, "developer")],
    ids=["left out", "refused", "in parts", "known"],
)
def test_a_developer_is_heard(template: str, role: str) -> None:
    """As the system, where the template knows no developer."""
    tokenizer: Any = templates.chat_tokenizer()
    tokenizer.chat_template = template
    user = {"role": "user", "content": "Hi there"}
    ids = ask_ids(tokenizer, [{"role": "developer", "content": "Be brief."}, user])
    expected: list[Any] = [{"role": role, "content": "Be brief."}, user]
    expected = [*map(parted, expected)] if template is IN_PARTS else expected
    text = tokenizer.apply_chat_template(expected, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(ids) == text and "Be brief." in text
