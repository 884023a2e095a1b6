"""Documents of a row in attention layers: packed sequences, or a mask where that takes less time."""

import pytest
import torch

from powertrain.nn import attention as module
from powertrain.nn.attention import Context


@pytest.mark.parametrize("length, unused", [(16, "varlen_attention"), (600, "attention")])
def test_short_documents_are_a_mask_on_a_cpu(length: int, unused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each sequence is a call of its own, many cost more than the scores of one masked row."""
    ids = torch.arange(2).repeat_interleave(length // 2)[None].int()
    starts = torch.tensor([0, length // 2] + [length] * 14, dtype=torch.int32)
    q = torch.randn(1, length, 2, 4)
    documents = Context(document_ids=ids, document_starts=starts)
    expected = module.attention(q, q, q, document_ids=ids, is_causal=True)
    monkeypatch.setattr(module, unused, None)
    torch.testing.assert_close(module.attend_documents(q, q, q, documents, is_causal=True), expected)
