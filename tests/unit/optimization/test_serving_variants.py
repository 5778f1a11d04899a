"""Deploying a variant: which version is served, for which CPU, and that approvals still bind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from falaj.errors import Denied, InvalidInput
from falaj.governance import objects
from falaj.optimization import hardware
from falaj.optimization.runtime.export import export_onnx
from falaj.optimization.serving_variants import choose_variant
from falaj.records.optimization import (
    Measurement,
    OptimizationReport,
    OptimizationVerdict,
    Variant,
)

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Learnable, OptimizationEnv  # type: ignore[attr-defined]

HERE = hardware.instruction_set()


def measured(latency: float, rate: float) -> Measurement:
    return Measurement(
        latency_p50_us=latency,
        latency_p99_us=latency,
        rows_per_s_32=rate,
        rows_per_s=rate,
        best_batch=32,
        cpu_us_per_row=1,
        size_bytes=1,
        loss=0.4,
    )


@pytest.fixture
def served(light_env: OptimizationEnv, boosted: Any, rows: Learnable, tmp_path: Path) -> OptimizationEnv:
    """late@2 is an ONNX model; late@3 and late@4 are its variants `int8` and `onnx`, accepted on this CPU."""
    content = export_onnx(boosted, tmp_path / "model.onnx", sample=rows.holed[:32]).path.read_bytes()
    platform = light_env.platform
    for _ in range(3):
        blob = platform.blobs.upload(iter([content]))
        platform.models.register("late", files=(blob.id,), paths=("model.onnx",))
    record_variants(light_env, HERE)
    return light_env


def record_variants(env: OptimizationEnv, extensions: tuple[str, ...], *, quick: str = "late@4") -> None:
    variants = (
        Variant(
            recipe="int8",
            verdict=OptimizationVerdict.ACCEPTED,
            reason="faster",
            measured=measured(20, 1000),
            version="late@3",
        ),
        Variant(
            recipe="onnx",
            verdict=OptimizationVerdict.ACCEPTED,
            reason="faster",
            measured=measured(10, 2000),
            version=quick,
        ),
        Variant(
            recipe="distill", verdict=OptimizationVerdict.REFUSED, reason="worse", measured=measured(1, 9e9)
        ),
    )
    report = OptimizationReport(
        metric="log_loss",
        rows=10,
        original=measured(100, 100),
        instruction_set=extensions,
        variants=variants,
    )
    env.record(report, model="late@2")


@pytest.mark.parametrize(
    ("choice", "version"), [(None, "2"), ("original", "2"), ("auto", "4"), ("int8", "3"), ("onnx", "4")]
)
def test_deploy_serves_what_was_named_unless_a_variant_is_chosen(
    choice: Any, version: str, served: OptimizationEnv
) -> None:
    given = {} if choice is None else {"variant": choice}

    made = served.platform.endpoints.deploy("late", model="late@2", **given)

    assert [route.version for route in made.routes] == [version]


def test_a_variant_that_was_not_accepted_is_refused(served: OptimizationEnv) -> None:
    with pytest.raises(InvalidInput) as caught:
        served.platform.endpoints.deploy("late", model="late@2", variant="distill")

    assert "what was accepted of late@2 on this kind of CPU: int8, onnx" in str(caught.value)
    assert "falaj models optimize late@2 --recipe distill" in str(caught.value)


def test_variants_of_another_cpu_do_not_count(served: OptimizationEnv) -> None:
    other = (*HERE, "amx_int8") if "amx_int8" not in HERE else HERE[1:]

    with served.platform.database.read() as tx:
        version = objects.by_name(tx, workspace=served.version.workspace, kind="model_version", name="late@2")
        assert version is not None
        automatic = choose_variant(tx, version, "auto", extensions=tuple(sorted(other)))
        with pytest.raises(InvalidInput, match="nothing"):
            choose_variant(tx, version, "int8", extensions=tuple(sorted(other)))

    assert automatic == version


VNNI = ("avx2", "avx512_vnni", "avx512f", "fma")
PLAIN = ("avx2", "fma")


@pytest.mark.parametrize(
    ("extensions", "version"), [(VNNI, "3"), (PLAIN, "4"), (("asimd",), "2")], ids=["vnni", "avx2", "arm"]
)
def test_the_server_picks_the_variant_that_was_accepted_on_its_instruction_set(
    extensions: tuple[str, ...], version: str, served: OptimizationEnv
) -> None:
    """int8 was accepted with VNNI, onnx without it; on another CPU nothing was."""
    for kept, recipe, reference in ((VNNI, "int8", "late@3"), (PLAIN, "onnx", "late@4")):
        found = Variant.model_validate(
            {
                "recipe": recipe,
                "verdict": "accepted",
                "reason": "faster",
                "measured": measured(1, 1e5),
                "version": reference,
            }
        )
        report = OptimizationReport(
            metric="log_loss", rows=10, original=measured(100, 100), instruction_set=kept, variants=(found,)
        )
        served.record(report, model="late@2")
    probed = hardware.instruction_set(f"flags\t: fpu {' '.join(extensions)} sse4_2\n")

    with served.platform.database.read() as tx:
        asked = objects.by_name(tx, workspace=served.version.workspace, kind="model_version", name="late@2")
        assert asked is not None
        picked = choose_variant(tx, asked, "auto", extensions=probed)

    assert picked.name == f"late@{version}"


def test_a_protected_endpoint_demands_the_approval_of_the_variant(served: OptimizationEnv) -> None:
    platform = served.platform
    platform.models.promote("late@2", to="champion")
    platform.models.protect("late", alias="champion")
    platform.endpoints.deploy("late", model="late@2")

    with pytest.raises(Denied, match="late@4"):
        platform.endpoints.deploy("late", model="late@2", variant="auto")

    assert [route.version for route in platform.endpoints.show("late").routes] == ["2"]
