"""Versions under TransformerEngine's names."""

import pytest
import torch

from powertrain.compat.transformer_engine import pytorch as te


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.__version__.startswith(".".join(map(str, te.torch_version())))
    for text, release in (("2.11.0a0+cu130", (2, 11, 0)), ("2.12", (2, 12))):
        monkeypatch.setattr(torch, "__version__", text)
        assert te.torch_version() == release
    for encoded, version in ((8907, (8, 9, 7)), (90100, (9, 1, 0)), (91002, (9, 10, 2))):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda encoded=encoded: encoded)
        assert te.get_cudnn_version() == version
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)
    with pytest.raises(RuntimeError, match="no cuDNN"):
        te.get_cudnn_version()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert te.get_device_compute_capability() == (9, 0)
