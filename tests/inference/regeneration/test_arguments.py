"""Flags of text that the target writes itself."""

from typing import Any

import pytest

from medusa_heads.inference.regeneration.arguments import (
    DistillArguments,
    RegenerateArguments,
)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (DistillArguments, {"num_prompts": 0}, "num_prompts must be at least 1"),
        (DistillArguments, {"greedy_share": 1.5}, "greedy_share must lie in"),
        (DistillArguments, {"temperature": 0.0}, "temperature must be above 0"),
        (
            RegenerateArguments,
            {"model_name_or_path": "a", "dataset": "b", "output_dir": ""},
            "output_dir is empty: name a folder",
        ),
        (
            RegenerateArguments,
            {"model_name_or_path": "a", "dataset": "b", "output_dir": "c"}
            | {"backend": "server", "base_url": []},
            "the backend server needs --base_url",
        ),
        *(
            (
                RegenerateArguments,
                {"model_name_or_path": "a", "dataset": "b", "output_dir": "c"}
                | {"backend": "server", "base_url": ["http://host/v1"], "timeout": timeout},
                "timeout must be (above 0|at most 86400 seconds), got ",
            )
            for timeout in (0.0, 1e10, float("inf"), float("nan"))
        ),
    ],
)
def test_values_out_of_range(kind: type, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**values)
