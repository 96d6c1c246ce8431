"""vLLM's own connector for hidden states, on a CPU. vLLM loads it by name, in its workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
)


class UnpinnedHiddenStatesConnector(ExampleHiddenStatesConnector):
    """The same, but for the pinned memory that it copies to, which there is none of without a
    GPU."""

    def _submit_async_write(self, pending: Any) -> None:
        empty_like = torch.empty_like

        def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            return empty_like(*args, **kwargs)

        with patch.object(torch, "empty_like", unpinned):
            super()._submit_async_write(pending)
        # In place of an event of a stream: where there are no streams, what was copied is there.
        self._req_copy_events[pending.req_id] = SimpleNamespace(query=lambda: True)
