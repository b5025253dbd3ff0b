"""The device of a rank, as far as it can be told without an accelerator."""

import pytest
import torch

from sirara.device import Device


def test_two_models_of_one_kind_of_device_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    # Their libraries choose other kernels, so a run that moves from one to the other is `close`.
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"model {device.index}")
    assert [Device(torch_device=torch.device("cuda", i)).model for i in (0, 1)] == ["model 0", "model 1"]
    assert Device(torch_device=torch.device("cpu")).model == "cpu"
