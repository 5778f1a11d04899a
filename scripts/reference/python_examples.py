"""The examples of docs/reference/python.md, in the order of the page: each may use what the ones above it made.

A test runs them in a fresh folder; what a comment behind a `print` says must be printed.
"""

from __future__ import annotations

EXAMPLES: dict[str, str] = {
    "__version__": """
import falaj as fj

print("version", fj.__version__)  # version 0.
""",
    "open": """
platform = fj.open("my-home")  # creates the home if there is none
print(platform)  # my-home>
""",
    "connect": """
with fj.connect("http://127.0.0.1:7480", token="falaj_secret") as remote:  # no request is sent yet
    print(remote)  # <Falaj platform at http://127.0.0.1:7480>
""",
    "Entity": """
customer = fj.Entity(name="customer", key="customer")
""",
    "Feature": """
calls = fj.Feature(name="calls", type="integer")
""",
    "Aggregation": """
from datetime import timedelta

weekly = fj.Aggregation(name="calls_7d", column="calls", function="sum", window=timedelta(days=7))
""",
    "FeatureView": """
usage = fj.FeatureView(
    name="usage",
    entities=("customer",),
    columns=(calls,),
    aggregations=(weekly,),
    ttl=timedelta(days=30),
)
print(platform.apply([customer, usage]).changes[0].name)  # customer
""",
    "Platform": """
import pandas as pd

days = pd.to_datetime(["2026-01-01", "2026-01-02"], utc=True)
rows = pd.DataFrame({"customer": ["ana", "ben"], "event_time": days, "calls": [3, 9]})
print(platform.ingest("usage", rows, only=("AE",)).added, "rows added")  # 2 rows added

spine = rows[["customer", "event_time"]].assign(left=[0, 1])
churn = platform.training_set("churn-train", spine=spine, views=["usage"])
print(churn.rows, churn.label.describe())  # 2 only AE

table = platform.features.load("churn-train").read_all()  # a pyarrow Table
print(table.column("usage__calls_7d").to_pylist())  # [3, 9]

note = platform.put("notes.txt", b"reviewed")
print(platform.get(note.id))  # b'reviewed'

with platform.run("churn") as run:  # it has failed if the block raises
    run.log(auc=0.9)
print(platform.runs.show(run.id).run.status)  # finished

print(platform.verify_audit().ok)  # True
""",
    "once": """
for _ in range(2):  # the second call returns the answer of the first
    with fj.once("nightly-2026-01-02"):
        run = platform.runs.start("nightly", name="churn")
print(len(platform.runs.list(experiments=("nightly",)).items), "run")  # 1 run
""",
    "verify_export": """
lines = [line.model_dump_json(exclude_none=True) for line in platform.audit.export()]
print(fj.verify_export(lines, bytes.fromhex(platform.audit.key().ed25519)).ok)  # True
""",
    "FalajError": """
try:
    platform.features.show("absent")
except fj.FalajError as error:
    print(error.code, type(error).__name__)  # object.not_found NotFound

platform.close()
""",
    "Lookup": """
lookup = fj.Lookup(views=(fj.ViewLookup(view="usage"),), missing="reject")
# platform.endpoints.deploy("churn", model="churn@1", lookup=lookup)
""",
    "ViewLookup": """
recent = fj.ViewLookup(view="usage", keys=("caller",), name="caller_usage", max_age=timedelta(days=1))
""",
    "MonitorWindow": """
window = fj.MonitorWindow(rows=1000, duration=timedelta(hours=1))
""",
    "FalseAlarmBudget": """
budget = fj.FalseAlarmBudget(alpha=0.01, dependence="none")
# platform.monitoring.watch("churn", reference="churn-train", window=window, budget=budget)
""",
    "AcceptanceBudget": """
accepted = fj.AcceptanceBudget(metric="auc", worse=0.002, relative=False, speedup=1.5)
# platform.optimization.start("churn@1", target="left", budget=accepted)
""",
    "Canary": """
canary = fj.Canary(share=20, requests=1000, longest=timedelta(days=2))
""",
    "CanaryTraffic": """
traffic = fj.CanaryTraffic(requests_per_hour=500, labelled=0.1)
# platform.pipelines.plan_canary("churn", plan=canary, traffic=traffic)
""",
    "PredictionColumns": """
columns = fj.PredictionColumns(keep=("customer",), outputs=("probability",))
# platform.predict("churn@champion", "customers.parquet", "scores", columns=columns)
""",
    "fit": """
import torch

torch.manual_seed(0)
inputs = torch.randn(256, 4)
target = inputs.sum(dim=1, keepdim=True)
model, loss = torch.nn.Linear(4, 1), torch.nn.functional.mse_loss

result = fj.fit(model, loss, (inputs, target), epochs=5, lr=0.1, run="my-run", exact=True)
print(result.step, result.stopped, result.losses[-1] < result.losses[0])  # 40 done True
""",
    "STOP": """
def stop_early(step: int, loss: float) -> object:
    return fj.STOP if step == 3 else None


short = fj.fit(torch.nn.Linear(4, 1), loss, (inputs, target), epochs=5, callbacks=[stop_early])
print(short.step, short.stopped)  # 3 asked
""",
    "step": """
step = fj.step(model, loss, lr=0.01, tune="off")
for batch in zip(inputs.split(64), target.split(64)):
    last = step(batch)
print("loss", float(last) >= 0)  # loss True
""",
    "estimate": """
found = fj.estimate(model, loss, (inputs, target), batch_size=64, precision="bf16")
print(found.peak_bytes < 2**20, found.method)  # True traced
""",
    "verify_certificate": """
certificate = fj.verify_certificate("my-run/certificate.json", samples=256, run="my-run")
print(certificate.steps, certificate.exact)  # 40 True
""",
    "job": """
fj.job.params(lr=0.01)  # outside a job, parameters and metrics are printed to standard error
fj.job.log(step=1, loss=0.5)
print(fj.job.id, fj.job.attempt, list(fj.job.inputs), fj.job.outputs)  # None 1 [] outputs
""",
    "save_model": """
import numpy as np
from sklearn.linear_model import LogisticRegression

samples = np.random.default_rng(0).normal(size=(100, 2)).astype("float32")
classifier = LogisticRegression().fit(samples, samples[:, 0] > 0)

saved = fj.save_model(classifier, sample=samples[:5], names=["age", "calls"], metrics={"auc": 0.9})
print(saved.path)  # outputs/model/model.onnx
""",
    "export_onnx": """
exported = fj.export_onnx(classifier, "churn.onnx", sample=samples[:5], names=["age", "calls"])
print(exported.outputs[0].name, exported.max_difference < 1e-4)  # probability True
""",
}
