"""Training rows, small models of every kind, and a platform with a model and its evaluation data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from falaj.governance import objects
from falaj.records.features import ColumnType, Entity, Feature, FeatureView
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ObjectId, new_id
from falaj.records.optimization import AcceptanceBudget, Optimization, OptimizationReport
from falaj.records.registry import FileFormat, ModelVersion, TensorSpec
from falaj.sdk.platform import Platform
from platforms import InternalAsController, OwnPlatform

Array = npt.NDArray[Any]
NAMES = tuple(f"f{number}" for number in range(8))
NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: small models train no faster on more, and concurrent test processes compete for cores."""
    import torch
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(1)
    with threadpool_limits(1):
        yield


@dataclass(frozen=True)
class Learnable:
    """Features, the same with missing values, and a target of 0 and 1 that depends on them."""

    features: Array
    holed: Array
    target: Array


@pytest.fixture(scope="session")
def rows() -> Learnable:
    random = np.random.default_rng(7)
    features = random.normal(size=(1500, len(NAMES))).astype(np.float32)
    target = (features[:, 0] + features[:, 1] ** 2 + random.normal(size=1500) > 1).astype(np.int64)
    holed = features.copy()
    holed[random.random(holed.shape) < 0.2] = np.nan
    return Learnable(features, holed, target)


@pytest.fixture(scope="session")
def boosted(rows: Learnable) -> Any:
    """Train trees on rows with missing values."""
    from xgboost import XGBClassifier

    return XGBClassifier(n_estimators=40, max_depth=4, n_jobs=1).fit(rows.holed, rows.target)


@pytest.fixture(scope="session")
def network(rows: Learnable) -> Any:
    """Return a network whose two modes differ: it has batch normalization and dropout."""
    import torch
    from torch import nn

    torch.manual_seed(7)
    made = nn.Sequential(
        nn.Linear(len(NAMES), 256),
        nn.BatchNorm1d(256),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 1),
        nn.Sigmoid(),
    )
    inputs, target = torch.from_numpy(rows.features), torch.from_numpy(rows.target).float()[:, None]
    optimizer = torch.optim.Adam(made.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy(made(inputs), target).backward()
        optimizer.step()
    return made


@pytest.fixture(scope="session")
def network_file(network: Any, rows: Learnable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from falaj.optimization.runtime.export import export_onnx

    path = tmp_path_factory.mktemp("network") / "model.onnx"
    return export_onnx(network, path, sample=rows.features[:64], names=NAMES).path


@dataclass(frozen=True)
class OptimizationEnv:
    """A platform with a model version and a training set of its features."""

    platform: Any
    version: ModelVersion
    data: str

    @property
    def start(self) -> dict[str, Any]:
        """Return the arguments of a valid start."""
        return {"model": self.version.reference, "data": self.data, "target": "late", "features": NAMES}

    def job_object(self) -> ObjectId:
        """Return the object of a job."""
        ident = new_id("job")
        new = StoredObject(
            id=ident,
            workspace=self.version.workspace,
            kind="job",
            name=ident,
            owner=self.version.author,
            created_at=self.platform.clock.now,
        )
        with self.platform.database.write() as tx:
            objects.create(tx, new)
        return ident

    def record(self, report: OptimizationReport, **changed: Any) -> Optimization:
        """Store a report as the controller does."""
        given = {
            **self.start,
            "job": self.job_object(),
            "budget": AcceptanceBudget(),
            "report": report,
            **changed,
        }
        optimization = InternalAsController(self.platform.optimization, self.platform)
        return optimization.record(given.pop("model"), **given)


@pytest.fixture
def env(platform: OwnPlatform, boosted: Any, rows: Learnable) -> OptimizationEnv:
    """A platform with a model; the test runs on SQLite and on PostgreSQL."""
    return populate(platform, boosted, rows)


@pytest.fixture
def light_env(light_platform: OwnPlatform, boosted: Any, rows: Learnable) -> OptimizationEnv:
    """The same on SQLite only, for tests that do not depend on the database."""
    return populate(light_platform, boosted, rows)


@pytest.fixture
def populated(boosted: Any, rows: Learnable) -> Callable[[Platform], OptimizationEnv]:
    """Yield a platform that holds the model and the data."""
    return partial(populate, boosted=boosted, rows=rows)


def populate(platform: Platform, boosted: Any, rows: Learnable) -> OptimizationEnv:
    """Register the trees, and store the rows as a training set."""
    model = platform.blobs.upload(iter([bytes(boosted.get_booster().save_raw("json"))]))
    data = training_set(platform, rows)
    version = platform.models.register(
        "late",
        files=(model.id,),
        paths=("model.json",),
        training_set=data,
        inputs=(TensorSpec(name="features", dtype="float32", shape=(-1, len(NAMES)), features=NAMES),),
        metrics={"auc": 0.8},
        card="# Late",
    )
    assert version.format is FileFormat.XGBOOST
    return OptimizationEnv(platform, version, data)


def training_set(platform: Platform, rows: Learnable) -> str:
    """Return the id of a training set with the features, and the target `late` in its spine."""
    view = FeatureView(
        name="origins", entities=("origin",), columns=(Feature(name="wind", type=ColumnType.FLOAT),)
    )
    platform.features.apply(
        entities=(Entity(name="origin", key="origin", type=ColumnType.INTEGER),), views=(view,)
    )
    winds = {"origin": [0, 1], "event_time": [NOON, NOON], "wind": [1.0, 2.0]}
    platform.features.ingest("origins", data=put(platform, "winds", pa.table(winds)))
    count = len(rows.target)
    spine = {
        "origin": np.arange(count) % 2,
        "event_time": pa.array([NOON] * count),
        "late": rows.target,
        "carrier": ["EK"] * count,
        **{name: rows.holed[:, number] for number, name in enumerate(NAMES)},
    }
    made = platform.features.training_set(
        "june", spine=put(platform, "spine", pa.table(spine)), views=("origins",)
    )
    return made.id


def put(platform: Platform, name: str, table: pa.Table) -> str:
    """Upload rows as Arrow, and return the blob's id."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return platform.put(name, sink.getvalue().to_pybytes()).id
