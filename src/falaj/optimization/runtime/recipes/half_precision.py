"""Convert models to half precision, for GPUs and for CPUs that compute with it."""

from __future__ import annotations

from falaj.optimization.hardware import HALF_ARITHMETIC
from falaj.optimization.runtime import gpu
from falaj.optimization.runtime.recipes.recipe_input import RecipeInput, RecipeNotApplicable, VariantFile

NO_GPU = "and no GPU was given: optimize with --gpus 1 on a machine that has one"


def convert_to_fp16(given: RecipeInput) -> VariantFile:
    """Convert to float16: for the GPU, else for a CPU that has such arithmetic."""
    if gpu.device_name() is not None:
        return _for_gpu(given, "float16")
    if not HALF_ARITHMETIC & set(given.extensions):
        raise RecipeNotApplicable(
            f"this CPU has no half-precision arithmetic, so it would be slower, {NO_GPU}"
        )
    return VariantFile(gpu.half_graph(given.onnx))


def convert_to_bf16(given: RecipeInput) -> VariantFile:
    """Convert to bfloat16, for the GPU only."""
    if gpu.device_name() is None:
        raise RecipeNotApplicable(f"ONNX Runtime has no bfloat16 kernels for CPUs, {NO_GPU}")
    return _for_gpu(given, "bfloat16")


def _for_gpu(given: RecipeInput, dtype: str) -> VariantFile:
    try:
        return VariantFile(*gpu.half_model(given.original, given.sample, dtype), device="gpu")
    except gpu.NotOnGpu as error:
        raise RecipeNotApplicable(str(error)) from error
