"""What groups are made of: the settings that go with it, and the user's that stand against them."""

from __future__ import annotations

import pytest
import torch

from stepfast.errors import ConfigError
from stepfast.health.accelerator import refused_settings
from stepfast.train.backends import GLOO, NCCL, NCCL_SETTINGS, OF_DEVICE


def test_each_kind_of_device_has_a_backend_and_only_nccls_groups_end_by_abort():
    assert OF_DEVICE == {"cpu": GLOO, "cuda": NCCL}
    assert not GLOO.ends_by_abort
    assert NCCL.ends_by_abort
    assert NCCL.device == torch.device("cuda")


def test_nccls_settings_are_put_in_and_defaults_give_way():
    environment = {"TORCH_FR_BUFFER_SIZE": "7", "HOME": "/somewhere"}
    NCCL.prepare(environment)
    assert environment["TORCH_FR_BUFFER_SIZE"] == "7"
    assert environment["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    assert NCCL_SETTINGS.items() <= environment.items()
    NCCL.prepare(environment)  # in a process that has them already


def test_gloo_leaves_the_environment_alone():
    environment = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    GLOO.prepare(environment)
    assert environment == {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


@pytest.mark.parametrize(
    "name",
    [
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_ASYNC_ERROR_HANDLING",
        "TORCH_NCCL_BLOCKING_WAIT",
        "NCCL_BLOCKING_WAIT",
        "TORCH_NCCL_ENABLE_MONITORING",
        "TORCH_NCCL_PROPAGATE_ERROR",
    ],
)
def test_a_contradicting_setting_is_refused_by_name_and_nothing_is_changed(name: str):
    environment = {name: "1"}
    with pytest.raises(ConfigError, match=f"{name}=1: .*; unset {name}"):
        NCCL.prepare(environment)
    assert environment == {name: "1"}


def test_what_agrees_or_only_slows_down_is_not_refused():
    agreeing = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "CUDA_LAUNCH_BLOCKING": "1"}
    assert refused_settings(agreeing) == []
