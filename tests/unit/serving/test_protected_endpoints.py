"""Protected endpoints: a version that nobody approved answers no request, whichever way it is brought there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from falaj.errors import Conflict, Denied, NotFound
from falaj.governance.operations.caller import Caller, acting_as
from falaj.records.features import ColumnType, Entity, Feature, FeatureView
from falaj.records.governance.identity import Role
from falaj.records.registry import TensorSpec
from falaj.records.serving.endpoints import Route
from falaj.records.serving.ensembles import Ensemble
from falaj.records.serving.lookups import Lookup, ViewLookup
from model_servers import constant, serving_platform
from platforms import OwnPlatform
from polling import eventually

X = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [0.5, 2.0]}


@pytest.fixture
def dana(light_platform: OwnPlatform) -> Caller:
    return light_platform.join("dana", Role.DEVELOPER)


@pytest.fixture
def noor(light_platform: OwnPlatform) -> Caller:
    return light_platform.join("noor", Role.APPROVER)


@pytest.fixture
def models(light_platform: OwnPlatform, tmp_path: Path, dana: Caller, noor: Caller) -> None:
    """Versions m@1 to m@3 and other@1 by dana; champion of m is protected, and m@1 is approved for it and is it."""
    with acting_as(dana):
        for name, number in (("m", 1), ("m", 2), ("m", 3), ("other", 1)):
            data = constant(tmp_path / f"{name}{number}.onnx", float(number)).read_bytes()
            blob = light_platform.put(f"{name}-{number}", data)
            light_platform.models.register(name, files=(blob.id,), paths=("model.onnx",))
    light_platform.models.protect("m", alias="champion")
    with acting_as(noor):
        light_platform.models.approve("m@1", alias="champion")
    with acting_as(dana):
        light_platform.models.promote("m@1", to="champion")


@pytest.fixture
def served(light_platform: OwnPlatform, models: None, dana: Caller) -> OwnPlatform:
    """The endpoint `churn`, which serves the champion m@1."""
    with acting_as(dana):
        light_platform.endpoints.deploy("churn", model="m@1")
    return light_platform


@contextmanager
def refused_for(version: str) -> Iterator[None]:
    with pytest.raises(Denied) as denied:
        yield
    (fault,) = denied.value.faults
    assert fault.where == f"approval of {version} for champion"
    assert fault.allowed is not None
    assert fault.allowed.endswith(": noor")
    assert fault.fix == f"falaj models approve {version} --alias champion"


def shares(platform: OwnPlatform, name: str = "churn") -> dict[str, int]:
    return {route.version: route.weight for route in platform.endpoints.show(name).routes}


@pytest.mark.slow
def test_an_unapproved_version_does_not_reach_the_endpoint_of_a_protected_alias(
    served: OwnPlatform, dana: Caller, noor: Caller
) -> None:
    with acting_as(dana), refused_for("m@2"):
        served.endpoints.deploy("churn", model="m@2")

    assert shares(served) == {"1": 100}
    with acting_as(noor):
        served.models.approve("m@2", alias="champion")
    with acting_as(dana):
        assert served.endpoints.deploy("churn", model="m@2").protected == "champion"


@pytest.mark.slow
def test_no_request_is_answered_by_a_version_that_was_refused(served: OwnPlatform, dana: Caller) -> None:
    token = served.tokens.issue(purpose="test").secret
    with serving_platform(served.parts) as url:
        http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"})

        def answer(path: str = "churn") -> httpx.Response:
            return http.post(f"/v2/models/{path}/infer", json={"inputs": [X]})

        eventually(lambda: answer().status_code == 200)
        with acting_as(dana), refused_for("m@2"):
            served.endpoints.deploy("churn", model="m@2")

        assert {answer().json()["model_version"] for _ in range(20)} == {"1"}
        assert answer("churn/versions/2").status_code == 404
        http.close()


@pytest.mark.slow
@pytest.mark.parametrize("weight", [0, 1, 100])
def test_no_share_of_requests_goes_to_an_unapproved_version(
    served: OwnPlatform, dana: Caller, weight: int
) -> None:
    routes = (Route(version="1", weight=100), Route(version="2", weight=weight))

    with acting_as(dana), refused_for("m@2"):
        served.endpoints.route("churn", routes=routes)

    assert shares(served) == {"1": 100}


@pytest.mark.slow
def test_removing_the_endpoint_does_not_end_its_protection(served: OwnPlatform, dana: Caller) -> None:
    with acting_as(dana), pytest.raises(Denied, match="administrator"):
        served.endpoints.remove("churn")
    served.endpoints.remove("churn")

    with acting_as(dana), refused_for("m@2"):
        served.endpoints.deploy("churn", model="m@2")


@pytest.mark.slow
def test_another_model_under_the_name_needs_the_approval_too(
    served: OwnPlatform, dana: Caller, noor: Caller
) -> None:
    with acting_as(dana):
        served.models.promote("other@1", to="champion")  # its own champion is not protected
        with refused_for("other@1"):
            served.endpoints.deploy("churn", model="other@1")

    with acting_as(noor):
        served.models.approve("other@1", alias="champion")
    with acting_as(dana):
        served.endpoints.deploy("churn", model="other@1")


@pytest.mark.slow
def test_protecting_the_alias_protects_what_serves_it_already(
    light_platform: OwnPlatform, tmp_path: Path, dana: Caller, noor: Caller
) -> None:
    with acting_as(dana):
        for number in (1, 2):
            blob = light_platform.put(f"m{number}", constant(tmp_path / f"{number}.onnx", 1.0).read_bytes())
            light_platform.models.register("m", files=(blob.id,), paths=("model.onnx",))
        light_platform.models.promote("m@1", to="champion")
        light_platform.endpoints.deploy("churn", model="m@1")
    before = light_platform.endpoints.show("churn").protected

    light_platform.models.protect("m", alias="champion")

    assert (before, light_platform.endpoints.show("churn").protected) == (None, "champion")
    with acting_as(dana), refused_for("m@2"):
        light_platform.endpoints.deploy("churn", model="m@2")


@pytest.mark.slow
def test_an_endpoint_that_is_no_production_serves_any_version(served: OwnPlatform, dana: Caller) -> None:
    with acting_as(dana):
        made = served.endpoints.deploy("staging", model="m@2")
        served.endpoints.deploy("staging", model="m@3")

        with refused_for("m@3"):  # with the champion beside it, it would be
            served.endpoints.route("staging", routes=(Route(version="3"), Route(version="1")))

    assert made.protected is None


@pytest.mark.slow
def test_a_rollback_to_what_was_approved_needs_nothing_new(
    served: OwnPlatform, dana: Caller, noor: Caller
) -> None:
    with acting_as(noor):
        served.models.approve("m@2", alias="champion")
    with acting_as(dana):
        served.models.promote("m@2", to="champion")
        served.endpoints.deploy("churn", model="m@2")
        served.models.rollback("m", alias="champion")

        served.endpoints.route("churn", routes=(Route(version="1", weight=10), Route(version="2", weight=90)))
        served.endpoints.deploy("churn", model="m@1")

        with refused_for("m@2"):  # its approval was withdrawn with the rollback
            served.endpoints.deploy("churn", model="m@2")


# ------------------------------------------------------------------------------------------ protect, unprotect


@pytest.mark.slow
def test_an_administrator_protects_an_endpoint_and_an_approver_releases_it(
    served: OwnPlatform, dana: Caller, noor: Caller
) -> None:
    admin = served.join("adam", Role.ADMIN)
    with acting_as(dana):
        served.endpoints.deploy("shop", model="m@2")
    with acting_as(admin), refused_for("m@2"):
        served.endpoints.protect("shop")
    with acting_as(noor):
        served.models.approve("m@2", alias="champion")

    with acting_as(admin):
        assert served.endpoints.protect("shop").protected == "champion"
        with pytest.raises(Denied, match="approver"):
            served.endpoints.unprotect("shop")
    with acting_as(dana):
        with refused_for("m@3"):
            served.endpoints.deploy("shop", model="m@3")
        with pytest.raises(Denied):
            served.endpoints.unprotect("shop")
        with pytest.raises(Denied):
            served.endpoints.protect("shop")

    with acting_as(noor):
        assert served.endpoints.unprotect("shop").protected is None
        with pytest.raises(Conflict, match="not protected"):
            served.endpoints.unprotect("shop")
    with acting_as(dana):
        served.endpoints.deploy("shop", model="m@3")
        served.endpoints.deploy("shop", model="m@1")  # released is released
        served.endpoints.deploy("shop", model="m@3")


@pytest.mark.slow
def test_an_endpoint_may_demand_an_approver_whom_the_author_did_not_appoint(
    served: OwnPlatform, tmp_path: Path, noor: Caller
) -> None:
    amal = served.join("amal", Role.ADMIN, workspace="platform")
    served.endpoints.protect("churn", independent=True)
    with acting_as(amal):
        puppet = served.join("puppet", Role.APPROVER)
        blob = served.put("m-4", constant(tmp_path / "4.onnx", 4.0).read_bytes())
        served.models.register("m", files=(blob.id,), paths=("model.onnx",))
    with acting_as(puppet):
        served.models.approve("m@4", alias="champion")

    with acting_as(amal):
        with refused_for("m@4"):
            served.endpoints.deploy("churn", model="m@4")
        served.endpoints.protect("churn")  # what it demands, it goes on to demand
        with refused_for("m@4"):
            served.endpoints.deploy("churn", model="m@4")
    with acting_as(noor):
        served.models.approve("m@4", alias="champion")
    with acting_as(amal):
        served.endpoints.deploy("churn", model="m@4")


@pytest.mark.slow
def test_whoever_made_themselves_an_approver_does_not_release(served: OwnPlatform) -> None:
    served.endpoints.protect("churn", independent=True)
    adam = served.join("adam", Role.ADMIN)
    with acting_as(adam):
        served.workspaces.grant("default", "adam", role=Role.APPROVER)

        with pytest.raises(Denied, match="themselves"):
            served.endpoints.unprotect("churn")

    assert served.endpoints.show("churn").protected == "champion"


@pytest.mark.slow
def test_a_developer_does_not_feed_a_protected_endpoint_from_elsewhere(
    served: OwnPlatform, tmp_path: Path, dana: Caller, noor: Caller
) -> None:
    """The version is approved; which views its inputs come from decides on its answers, too."""
    columns = TensorSpec(name="x", dtype="float32", shape=(-1, 2), features=("riders__trips", "miles"))
    riders = FeatureView(
        name="riders", entities=("rider",), columns=(Feature(name="trips", type=ColumnType.INTEGER),)
    )
    forged = riders.model_copy(update={"name": "forged"})
    served.features.apply(entities=(Entity(name="rider", key="rider"),), views=(riders, forged))
    own = Lookup(views=(ViewLookup(view="riders"),), missing=0)
    with acting_as(dana):
        blob = served.put("m-4", constant(tmp_path / "4.onnx", 4.0).read_bytes())
        served.models.register("m", files=(blob.id,), paths=("model.onnx",), inputs=(columns,))
    with acting_as(noor):
        served.models.approve("m@4", alias="champion")
    with acting_as(dana):
        served.endpoints.deploy("shop", model="m@4", lookup=own)
    served.endpoints.protect("shop")

    with acting_as(dana):
        served.endpoints.deploy("shop", model="m@4", lookup=own)
        for changed in (
            Lookup(views=(ViewLookup(view="forged", name="riders"),), missing=0),
            own.model_copy(update={"missing": 1e9}),
        ):
            with pytest.raises(Denied, match="administrator"):
                served.endpoints.deploy("shop", model="m@4", lookup=changed)
    served.endpoints.deploy("shop", model="m@4", lookup=own.model_copy(update={"missing": 1}))


def ensemble_of(platform: OwnPlatform, *versions: str) -> str:
    """Compose `versions` side by side, as dana, and return the version."""
    steps = [
        {"name": f"s{number}", "model": version, "inputs": {"x": "request.x"}}
        for number, version in enumerate(versions)
    ]
    outputs = {f"y{number}": f"s{number}.y" for number in range(len(versions))}
    whole = Ensemble.model_validate({"steps": steps, "outputs": outputs})
    return platform.models.compose("both", ensemble=whole).reference


def test_an_ensemble_does_not_go_around_the_approvals_of_its_steps(
    light_platform: OwnPlatform, models: None, dana: Caller, noor: Caller
) -> None:
    with acting_as(dana):
        made = ensemble_of(light_platform, "m@1", "other@1")
        with refused_for(made):  # m@1 is the protected champion, so that the endpoint is protected
            light_platform.endpoints.deploy("churn", model=made)

    with acting_as(noor):
        light_platform.models.approve(made, alias="champion")
    with acting_as(dana), refused_for("other@1"):
        light_platform.endpoints.deploy("churn", model=made)

    with acting_as(noor):
        light_platform.models.approve("other@1", alias="champion")
    with acting_as(dana):
        light_platform.endpoints.deploy("churn", model=made)
    assert light_platform.endpoints.show("churn").protected == "champion"


def test_an_endpoint_of_an_ensemble_is_protected_only_with_approved_steps(
    light_platform: OwnPlatform, models: None, dana: Caller, noor: Caller
) -> None:
    with acting_as(dana):
        made = ensemble_of(light_platform, "m@2", "other@1")
        light_platform.endpoints.deploy("free", model=made)
    with acting_as(noor):
        light_platform.models.approve(made, alias="champion")

    with refused_for("m@2"):
        light_platform.endpoints.protect("free")


def test_an_endpoint_whose_ensemble_lost_a_step_can_be_given_another_version(
    light_platform: OwnPlatform, models: None, dana: Caller
) -> None:
    with acting_as(dana):
        made = ensemble_of(light_platform, "m@2", "other@1")
        light_platform.endpoints.deploy("free", model=made)
    lost = light_platform.models.version("m@2").id
    light_platform.sql("UPDATE governance_objects SET deleted_at = created_at WHERE id = :id", {"id": lost})

    with acting_as(dana):
        with pytest.raises(NotFound, match=f"a step of {made} was deleted: {lost}"):
            light_platform.endpoints.deploy("another", model=made)
        light_platform.endpoints.deploy("free", model="other@1")

    assert light_platform.endpoints.show("free").model == "other"
