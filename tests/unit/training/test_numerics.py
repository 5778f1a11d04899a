"""Process-wide settings of torch, under a plan and afterwards."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch

from falaj.training.runtime.data.sources import TensorSource
from falaj.training.runtime.planning.numerics import apply_numerics, full_fp32, precision_of
from falaj.training.runtime.planning.plan import Plan

CUDA = torch.device("cuda")


def kept() -> list[Any]:
    """Return all settings that determine the cache key of compiled code."""
    products = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    precisions = [each.fp32_precision for each in products]
    return [*precisions, torch.get_float32_matmul_precision(), torch.get_num_threads()]


def test_all_numeric_settings_are_restored() -> None:
    before = kept()

    with apply_numerics(Plan(precision="tf32", threads=1)):
        inside = kept()
    with full_fp32():
        pass

    assert inside != before
    assert kept() == before


def test_convolutions_on_a_gpu_use_tf32_unless_torch_is_configured_otherwise() -> None:
    assert precision_of(Plan(), CUDA) == "tf32"
    assert precision_of(Plan(precision="bf16"), CUDA) == "bf16"
    assert precision_of(Plan(), torch.device("cpu")) == "fp32"
    with full_fp32():
        assert precision_of(Plan(), CUDA) == "fp32"


def test_checking_for_a_gpu_does_not_initialize_cuda() -> None:
    """Child processes could not use it any more."""
    script = "import falaj, os; print(os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'])"

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "1"


def test_a_thinned_source_is_spread_over_the_data() -> None:
    columns = TensorSource((torch.arange(1000), torch.arange(1000) * 2), where="data")

    few = columns.thinned(100)

    inputs, target = few.read(torch.arange(len(few)), seed=0)
    assert len(few) == 100
    assert (inputs.min(), inputs.max()) == (0, 990)
    assert torch.equal(target, inputs * 2)
