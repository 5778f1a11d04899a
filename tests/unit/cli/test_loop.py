"""The commands of the loop, from features to pipelines, on a real home: success, and bad input."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

import falaj as fj
from command_line import CommandLine, command_line
from falaj.apps.cli.commands.endpoints_infer import key_inputs, print_notes, show_answer, tensor
from falaj.apps.cli.commands.events import print_event
from falaj.apps.cli.commands.workflows import describe
from falaj.apps.cli.files import atomic_file
from falaj.apps.cli.generation.presentation import presentation_of
from falaj.apps.cli.output.values import format_elapsed
from falaj.apps.cli.session import Session
from falaj.errors import InvalidInput
from falaj.governance.operations.operation import allowed_values
from falaj.records.control.workflows import WorkflowRun, WorkflowState
from falaj.records.governance.events import Event
from falaj.records.monitoring.monitors import Alert
from falaj.records.registry import TensorSpec
from falaj.records.serving.lookups import Lookup, MissingFeatures, ViewLookup
from falaj.records.serving.predictions import InferenceResult, InferOutput
from falaj.records.serving.tensors import Datatype

FEATURES = """
[[entity]]
name = "customer"
key = "customer_id"
type = "integer"

[[view]]
name = "usage"
entities = ["customer"]
columns = { calls = "integer", minutes = "float" }

[[view]]
name = "outcomes"
entities = ["customer"]
columns = { churned = "integer" }
"""
TRAIN = """
import numpy as np
from sklearn.linear_model import LogisticRegression
import falaj as fj

values = np.random.default_rng(0).normal(size=(60, 2)).astype("float32")
model = LogisticRegression().fit(values, values[:, 0] > 0)
fj.job.log(step=1, auc=0.75)
fj.save_model(model, sample=values, names=["usage__calls", "usage__minutes"], metrics={"auc": 0.75})
"""
PIPELINE = """
name = "retrain"
endpoint = "churn"
model = "churn"
spine = "outcomes"
views = ["usage"]
window = "365d"
script = "code/train.py"
"""
SCRIPTS = {
    "train.py": TRAIN,
    "raises.py": 'print("begun")\nraise ValueError("no luck")\n',
    "broken.py": "def (\n",
    "saves_nothing.py": 'print("fine")\n',
    "no_model.py": 'import falaj as fj\nfj.save_model(object(), sample=[[1.0]], names=["a"])\n',
}
BROKEN_PIPELINE = PIPELINE.replace('"365d"', '"7 days"').replace("train.py", "gone.py")
WRONG_PIPELINE = PIPELINE.replace('["usage"]', '"usage"') + "foo = 1\n[canary]\nshare = 99\n"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with views, rows, a training set, a job that saved a model, a version and an endpoint."""
    folder = tmp_path_factory.mktemp("loop")
    write_files(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("FALAJ_CONFIG_DIR", str(folder / "config"))
        with fj.open(folder / "home") as platform:
            platform.apply("features.toml")
            platform.ingest("usage", "usage.csv")
            platform.ingest("outcomes", "labels.csv")
            platform.training_set("churn-train", spine="labels.csv", views=["usage"])
            *_, job = platform.jobs.wait(platform.train("code/train.py").id)
            platform.register(job.id, "churn")
            platform.endpoints.deploy("churn", model="churn@1")
            platform.monitoring.watch("churn", reference="churn-train")
    return folder


@pytest.fixture
def falaj(template: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[CommandLine]:
    with command_line(tmp_path, capsys, template=template) as line:
        yield line


def write_files(folder: Path) -> None:
    moments = [f"2026-01-{day:02}T00:00:00Z" for day in range(1, 21)]
    usage = [f"{number},{moment},{number * 2},{number * 1.5}" for number, moment in enumerate(moments)]
    labels = [f"{number},2026-02-01T00:00:00Z,{number % 2}" for number in range(20)]
    files = {
        "features.toml": FEATURES,
        "pipeline.toml": PIPELINE,
        "broken_pipeline.toml": BROKEN_PIPELINE,
        "wrong_pipeline.toml": WRONG_PIPELINE,
        "usage.csv": "\n".join(["customer_id,event_time,calls,minutes", *usage]),
        "labels.csv": "\n".join(["customer_id,event_time,churned", *labels]),
        "short.csv": "customer_id,event_time,calls\n1,2026-01-01T00:00:00Z,3\n",
        "words.csv": "customer_id,event_time,calls,minutes\n1,2026-01-01T00:00:00Z,many,1.0\n",
        "ragged.csv": "customer_id,event_time,calls,minutes\n1,2026-01-01T00:00:00Z\n",
        "keyless.csv": "event_time,churned\n2026-01-01T00:00:00Z,1\n",
        "unknown.toml": FEATURES.replace('["customer"]', '["nobody"]'),
        "syntax.py": "def (\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "code").mkdir()
    for name, text in SCRIPTS.items():
        (folder / "code" / name).write_text(text)


BAD = (
    ("apply gone.toml", 2, "a TOML or Python file that is there"),
    ("apply unknown.toml", 1, "there is no entity 'nobody'"),
    ("apply syntax.py", 2, "syntax.py:1"),
    ("features show nope", 1, "look     falaj features list"),
    ("features list --limit many", 2, "a whole number"),
    ("features ingest usage gone.csv", 2, "a readable file"),
    ("features ingest nope usage.csv", 1, "there is no view 'nope'"),
    ("features ingest usage short.csv", 2, "view usage.minutes"),
    ("features ingest usage words.csv", 2, "many in row 1"),
    ("features ingest usage ragged.csv", 2, "ragged.csv is not valid"),
    ("features training-set x --spine gone.csv --views usage", 2, "--spine is not valid"),
    ("features training-set x --spine keyless.csv --views usage", 2, "spine.customer_id"),
    ("features training-set x --spine labels.csv --views nope", 1, "there is no view 'nope'"),
    ("features training-set churn-train --spine usage.csv --views usage", 1, "choose another name"),
    ("features read usage 1", 1, "not online"),
    ("features materialize nope", 1, "there is no view 'nope'"),
    ("features scan nope --json", 1, "there is no view 'nope'"),
    ("features load nope --json", 1, '{"look": "falaj features training-sets"}'),
    ("features load churn-train --output gone/x.arrow", 2, "a writable file"),
    ("train gone.py", 2, "a Python script that is there"),
    ("train code/train.py --cpus many", 2, "--cpus is not valid"),
    ("train code/train.py --cpus 9999", 2, "no machine here can ever run this job"),
    ("train code/train.py --dataset training=nope", 1, "inputs.training"),
    ("train code/train.py --register Bad+Name", 2, "--register is not valid"),
    ("jobs show nope", 1, "look     falaj jobs list"),
    ("jobs logs nope", 1, "there is no job 'nope'"),
    ("jobs wait nope", 1, "there is no job 'nope'"),
    ("jobs explain nope", 1, "there is no job 'nope'"),
    ("jobs retry nope", 1, "there is no job 'nope'"),
    ("jobs cancel nope --yes", 1, "there is no job 'nope'"),
    ("jobs list --limit 0", 2, "at least 1"),
    ("runs show nope", 1, "there is no run 'nope'"),
    ("runs list nope", 1, "there is no experiment 'nope'"),
    ("runs list train --filter nonsense", 2, "at position 1"),
    ("models register churn --file nope", 1, "there is no blob 'nope'"),
    ("models from-job nope churn", 1, "there is no job 'nope'"),
    ("models from-job nope Bad+Name", 2, "MODEL is not valid"),
    ("models version churn", 1, "look     falaj models versions churn"),
    ("models versions nope", 1, "look     falaj models list"),
    ("models promote churn@9 --to champion", 1, "look     falaj models versions churn"),
    ("models approve churn@1 --alias champion", 1, "it takes the role approver"),
    ("models approvals churn@9 --alias champion", 1, "there is no model_version"),
    ("models protect nope --alias champion", 1, "there is no model 'nope'"),
    ("models rollback churn --alias champion", 1, "no previous version"),
    ("models verify churn@9", 1, "there is no model_version"),
    ("models resolve churn --alias champion", 1, "churn has no champion now"),
    ("models alias-history nope --alias champion", 1, "there is no model 'nope'"),
    ("models read churn@1 nope --output x", 1, "it has model/model.onnx"),
    ("optimization start churn@9 --data churn-train --target churned", 1, "there is no model_version"),
    ("optimization start churn@1 --data churn-train --target nope", 2, "a column of the data"),
    ("optimization show nope", 1, "look     falaj optimization list"),
    ("deploy nope@1", 1, "there is no model_version 'nope@1'"),
    ("deploy churn@1 --lookup nope", 1, "there is no view 'nope'"),
    ("deploy churn@1 --scoring luck", 2, "'log_loss' or 'squared_error'"),
    ("deploy churn@1 --lookup usage --missing some", 2, "[VIEW:]NUMBER, reject or impute, or FEATURE=NUMBER"),
    ("deploy churn@1 --lookup usage --missing nan", 2, "[VIEW:]NUMBER, reject or impute, or FEATURE=NUMBER"),
    ("deploy churn@1 --lookup usage --missing calls=reject", 2, "FEATURE=NUMBER"),
    (
        "deploy churn@1 --lookup usage --missing 0 --missing 1",
        2,
        "one rule, one for each view, and one default per feature",
    ),
    ("deploy churn@1 --lookup usage --missing other=1", 2, "usage__calls, usage__minutes"),
    ("endpoints show nope", 1, "look     falaj endpoints list"),
    ("endpoints stats churn --since yesterday", 2, "a moment, like"),
    ("endpoints route churn 9=10", 2, "a route names an unknown version"),
    ("endpoints route churn 1=x", 2, "a whole number behind '='"),
    ("endpoints configure churn --instances 0", 2, "at least 1"),
    ("endpoints configure churn --max-queue-ms soon", 2, "a number"),
    ("endpoints configure churn --burst 5", 2, "beside requests_per_second only"),
    ("endpoints configure nope --instances 1", 1, "there is no endpoint 'nope'"),
    ("endpoints infer churn", 2, "an input at least"),
    ("endpoints infer churn customer_id", 2, "a name, '=', and values"),
    ("endpoints infer churn features=1", 2, "2 values a row (usage__calls, usage__minutes)"),
    ("endpoints infer churn features=1,2", 1, "'falaj up' starts it"),
    ("endpoints feedback churn", 2, "at least 1 item"),
    ("endpoints feedback churn --file usage.csv", 2, "the columns id and value"),
    ("endpoints prediction nope", 1, "'nope'"),
    ("endpoints remove nope --yes", 1, "there is no endpoint 'nope'"),
    ("monitoring watch nope --reference churn-train", 1, "there is no endpoint 'nope'"),
    ("monitoring watch churn --reference churn-train --name m --column nope", 2, "can be watched"),
    ("monitoring watch churn --reference churn-train --name m --rows x", 2, "a whole number"),
    ("monitoring check nope", 1, "look     falaj monitoring list"),
    ("monitoring alerts --monitor nope", 1, "there is no monitor 'nope'"),
    ("monitoring alert nope", 1, "look     falaj monitoring alerts"),
    ("monitoring acknowledge nope", 1, "there is no alert 'nope'"),
    ("monitoring set-reference churn --reference nope", 1, "there is no dataset 'nope'"),
    ("monitoring remove nope --yes", 1, "there is no monitor 'nope'"),
    ("pipelines apply gone.toml", 2, "a readable file of TOML"),
    ("pipelines apply broken_pipeline.toml", 2, "broken_pipeline.toml:7 window"),
    ("pipelines apply broken_pipeline.toml", 2, "broken_pipeline.toml:8 script"),
    ("pipelines apply wrong_pipeline.toml", 2, "wrong_pipeline.toml:11 canary.share"),
    ("pipelines show nope", 1, "look     falaj pipelines list"),
    ("pipelines start nope", 1, "there is no pipeline 'nope'"),
    ("pipelines canary churn --model churn@9", 1, "there is no model_version"),
    ("pipelines canary churn --model churn@1 --share 99", 2, "at most 50"),
    ("pipelines canary churn --model churn@1 --longest soon", 2, "--longest is not valid"),
    ("pipelines canary churn", 2, "the version to try, or --plan"),
    ("pipelines canary churn --plan --false-rollback 0", 2, "greater than 0"),
    ("pipelines canary churn --plan --requests-per-hour none", 2, "a number"),
    ("pipelines canary churn --plan --worse 1,much", 2, "a number"),
    ("pipelines canary nope --plan", 1, "there is no endpoint 'nope'"),
    ("pipelines plan-canary churn", 2, "No such command 'plan-canary'"),
    ("workflows watch nope", 1, "look     falaj workflows list"),
    ("workflows cancel nope", 1, "there is no work 'nope'"),
    ("status", 1, ""),
)


@pytest.mark.parametrize(("typed", "status", "words"), BAD, ids=[each[0] for each in BAD])
def test_bad_input_is_refused_with_a_message(falaj: CommandLine, typed: str, status: int, words: str) -> None:
    ran = falaj(*(word.replace("+", " ") for word in typed.split()))

    assert ran.status == status, ran.err
    assert words in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.slow
def test_refused_commands_leave_nothing_behind(falaj: CommandLine) -> None:
    before = falaj.json("features", "list")["items"], falaj.json("jobs", "list")["items"]

    falaj("features", "ingest", "usage", "words.csv")
    falaj("features", "training-set", "x", "--spine", "keyless.csv", "--views", "usage")
    falaj("train", "code/train.py", "--register", "Bad Name")

    assert (falaj.json("features", "list")["items"], falaj.json("jobs", "list")["items"]) == before
    assert len(falaj.json("features", "training-sets")["items"]) == 1


@pytest.mark.slow
def test_features_are_applied_ingested_and_read(falaj: CommandLine) -> None:
    assert "nothing has changed" in falaj.done("apply").out
    assert "was added before" in falaj.done("features", "ingest", "usage", "usage.csv").out
    assert "20 rows added, 40 now" in falaj.done("features", "ingest", "usage", "usage.csv", "--again").out
    assert "behind" not in falaj.done("features", "list").out
    assert "customer_id (integer)" in falaj.done("features", "show", "usage").out
    made = falaj.done("features", "training-set", "again", "--spine", "labels.csv", "--views", "usage")
    assert "next   falaj train SCRIPT --dataset training=again" in made.out
    assert "20 keys online" in falaj.done("features", "materialize", "usage").out
    assert "38" in falaj.done("features", "read", "usage", "19").out
    assert len(falaj.done("features", "scan", "usage", "--json").out.splitlines()) == 40
    falaj.done("features", "load", "again", "--output", "again.arrow")
    assert (falaj.folder / "again.arrow").stat().st_size > 500


@pytest.mark.slow
def test_a_job_that_raises_fails_with_its_exception(falaj: CommandLine) -> None:
    ran = falaj("train", "code/raises.py", "--register", "churn")

    job = falaj.json("jobs", "list")["items"][0]
    assert ran.status == 1
    assert "failed after" in ran.out
    assert "ValueError: no luck" in ran.out
    assert f"next   falaj jobs retry {job['id']}" in ran.out
    assert "begun" in falaj.done("jobs", "logs", job["id"]).out
    assert falaj.json("models", "show", "churn")["versions"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "words"), [("broken.py", "SyntaxError"), ("no_model.py", "a scikit-learn classifier")]
)
def test_a_script_that_cannot_run_or_export_is_reported(falaj: CommandLine, script: str, words: str) -> None:
    ran = falaj("train", f"code/{script}", "--register", "churn")

    assert ran.status == 1
    assert words in ran.out


@pytest.mark.slow
def test_a_job_that_saved_no_model_is_done_and_registers_nothing(falaj: CommandLine) -> None:
    ran = falaj("train", "code/saves_nothing.py", "--register", "churn")

    assert ran.status == 1
    assert "is done after" in ran.out
    assert "has no output model.json; fj.save_model writes it" in ran.err


@pytest.mark.slow
def test_a_detached_job_waits_and_is_cancelled_explained_and_retried(falaj: CommandLine) -> None:
    ran = falaj.done("train", "code/saves_nothing.py", "--detach", "--register", "churn")
    job = falaj.json("jobs", "list")["items"][0]["id"]

    assert f"then   falaj models from-job {job} churn" in ran.out
    assert "1 of 1 in the queue" in falaj.done("jobs", "explain", job).out
    assert "is cancelled" in falaj.done("jobs", "cancel", job, "--yes").out
    assert falaj("jobs", "wait", job).status == 1
    assert "is queued" in falaj.done("jobs", "retry", job).out
    waited = falaj.done("jobs", "wait", job).out.splitlines()
    assert waited[-1].startswith("saves-nothing done")
    assert len(set(waited)) == len(waited)
    assert "state      done" in falaj.done("jobs", "show", job).out


def test_runs_and_models_are_shown_for_people(falaj: CommandLine) -> None:
    run = falaj.json("runs", "list", "train")["items"][0]["id"]

    assert "finished" in falaj.done("runs", "list", "train").out
    shown = falaj.done("runs", "show", run).out
    assert "auc     0.75  1" in shown
    assert "model/model.onnx" in shown
    assert "churn@1  onnx" in falaj.done("models", "versions", "churn").out
    assert "any × 2  usage__calls, usage__minutes" in falaj.done("models", "version", "churn@1").out
    assert "yes" in falaj.done("models", "verify", "churn@1").out


@pytest.mark.slow
def test_versions_are_registered_promoted_protected_and_rolled_back(falaj: CommandLine) -> None:
    job = falaj.json("jobs", "list")["items"][0]["id"]

    assert "churn@2 is registered" in falaj.done("models", "from-job", job, "churn").out
    assert "churn@1 is champion" in falaj.done("models", "promote", "churn@1", "--to", "champion").out
    assert "(was churn@1)" in falaj.done("models", "promote", "churn@2", "--to", "champion").out
    assert "churn@1 is champion" in falaj.done("models", "rollback", "churn", "--alias", "champion").out
    assert "rollback" in falaj.done("models", "alias-history", "churn", "--alias", "champion").out
    assert falaj.json("models", "resolve", "churn", "--alias", "champion")["number"] == 1
    assert "someone other" in falaj.done("models", "protect", "churn", "--alias", "champion").out
    assert "champion churn@1 (protected)" in falaj.done("models", "list").out
    falaj.done("models", "read", "churn@1", "model/model.onnx", "--output", "model.onnx")
    assert (falaj.folder / "model.onnx").stat().st_size > 100


def test_a_protected_alias_waits_for_an_approval(falaj: CommandLine) -> None:
    falaj.done("models", "protect", "churn", "--alias", "production")

    ran = falaj("models", "promote", "churn@1", "--to", "production")

    assert ran.status == 1
    assert "fix      falaj models approve churn@1 --alias production" in ran.err
    assert falaj.done("models", "approvals", "churn@1", "--alias", "production").err.strip() == "none"


def test_the_rule_for_missing_features_is_shown(falaj: CommandLine) -> None:
    rule = ("--missing", "reject", "--missing", "usage__calls=2.5")
    falaj.done("deploy", "churn@1", "--name", "strict", "--lookup", "usage", *rule)

    assert "usage__calls=2.5, reject" in falaj.done("endpoints", "show", "strict").out


def test_an_answer_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    gap = MissingFeatures(row=1, view="usage", key="99", reason="unknown_key", features=("usage__calls",))
    output = InferOutput(name="p", datatype="FP32", shape=(2,), data=[0.5, None], not_finite=1)

    print_notes(
        InferenceResult(
            model_name="m", model_version="1", id="", outputs=(output,), missing=(gap,), missing_rows=9
        )
    )

    assert capsys.readouterr().err.splitlines() == [
        "row 1: usage__calls missing: usage has no value for key 99 (unknown key)",
        "… and 8 more rows lack features",
        "1 value of p not finite (NaN or infinite): null",
    ]


def test_keys_are_shown_beside_the_rows_of_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    output = InferOutput(name="p", datatype="FP32", shape=(2, 1), data=[0.5, 0.25])
    answer = InferenceResult(model_name="m", model_version="1", id="", outputs=(output,))
    typed = tensor(
        "customer", "007,17", {"customer": TensorSpec(name="customer", dtype="string", shape=(-1,))}
    )
    given = {"name": "age", "shape": [2], "datatype": "INT64", "data": [40, 41]}

    show_answer(answer, inputs=[typed, given])

    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["row", "customer", "age", "p"], ["0", "007", "40", "0.5"], ["1", "17", "41", "0.25"]]


def test_keys_are_typed_as_their_view_has_them() -> None:
    riders = ViewLookup(view="riders", keys=("rider", "trip"), key_types=(Datatype.BYTES, Datatype.INT64))
    known = key_inputs(Lookup(views=(riders,)))

    assert tensor("rider", "007,1.5", known)["data"] == ["007", "1.5"]
    assert tensor("trip", "7", known)["data"] == [7]
    with pytest.raises(InvalidInput, match="values of type INT64"):
        tensor("trip", "1_7", known)
    assert key_inputs(None) == {}


def test_infinities_are_texts_in_json(falaj: CommandLine) -> None:
    far = "customer_id,event_time,calls,minutes\n7,2026-01-01T00:00:00Z,1,inf\n"
    (falaj.folder / "far.csv").write_text(far)
    falaj.done("features", "ingest", "usage", "far.csv", "--backfill")

    *_, last = falaj.done("features", "scan", "usage", "--json").out.splitlines()

    assert json.loads(last, parse_constant=pytest.fail)["minutes"] == "Infinity"


def test_endpoints_are_deployed_routed_and_removed(falaj: CommandLine) -> None:
    assert "churn@1 (100)" in falaj.done("deploy", "churn@1", "--name", "second").out
    assert "1 100%" in falaj.done("endpoints", "list").out
    assert "address" in falaj.done("endpoints", "show", "second").out
    assert "churn@1 (50)" in falaj.done("endpoints", "route", "second", "1=50").out
    assert "no request for second is counted yet" in falaj.done("endpoints", "stats", "second").out
    assert "is removed; its predictions are kept" in falaj.done("endpoints", "remove", "second", "--yes").out


def test_monitors_are_checked_given_another_reference_and_removed(falaj: CommandLine) -> None:
    assert "no windows were received" in falaj.done("monitoring", "check", "churn").out
    rebased = falaj.done("monitoring", "set-reference", "churn", "--reference", "churn-train").out
    assert "churn compares with churn-train from now on: 20 rows" in rebased
    assert falaj.done("monitoring", "alerts").err.strip() == "none"
    assert "monitor churn is removed" in falaj.done("monitoring", "remove", "churn", "--yes").out
    acknowledged = presentation_of("monitoring").messages["monitoring.acknowledge"]
    message = acknowledged(Alert.model_construct(id="alert_1"), {})
    assert message.then == (("next", "monitoring alert alert_1"),)


@pytest.mark.slow
def test_pipelines_are_applied_shown_and_started(falaj: CommandLine) -> None:
    assert "retrains churn" in falaj.done("pipelines", "apply", "pipeline.toml").out
    assert "drift, a person" in falaj.done("pipelines", "list").out
    assert "outcomes of 365d, joined with usage" in falaj.done("pipelines", "show", "retrain").out
    assert "retrains the model" in falaj.done("pipelines", "start", "retrain").out
    tried = falaj.done("pipelines", "canary", "churn", "--model", "churn@1", "--share", "5", "--labels", "0")
    assert "tries churn@1 on churn" in tried.out
    assert falaj.json("workflows", "list")["items"][-1]["workflow"] == "pipelines.canary"


def test_the_plan_of_a_canary_shows_how_soon_it_decides(falaj: CommandLine) -> None:
    options = ("--requests-per-hour", "1000", "--share", "50", "--worse", "0,4")

    shown = falaj.done("pipelines", "canary", "churn", "--plan", *options).out
    plan = falaj.json("pipelines", "canary", "churn", "--plan", *options)

    assert "1.0% at most, of one that is not worse" in shown
    assert "likely verdict" in shown
    found = {(each["metric"], each["outcome"]): each for each in plan["forecasts"]}
    metrics = ("error_rate", "latency", "score")
    assert set(found) == {(metric, outcome) for metric in metrics for outcome in ("promote", "roll_back")}
    assert 1000 < found["score", "promote"]["after"] < 20_000
    assert found["error_rate", "roll_back"]["power"] > 0.9
    assert "score_mean" in plan["assumed"]
    assert falaj.json("workflows", "list")["items"] == []


def test_the_end_of_a_canary_says_its_verdict() -> None:
    verdict = {"outcome": "roll_back", "promote": False, "words": "it is worse: error rate 9% against 1%"}
    work = WorkflowRun.model_construct(
        workflow="pipelines.canary",
        state=WorkflowState.DONE,
        step=4,
        steps=None,
        doing=None,
        result={"version": "version_2", "verdict": verdict},
        error=None,
    )

    assert describe(work) == "pipelines.canary done: roll back; it is worse: error rate 9% against 1%"


def test_an_event_is_printed_with_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    event = Event(
        id="evt_1",
        type="falaj.pipelines.conclude",
        subject="endpoint_1",
        name="churn",
        at=datetime(2026, 1, 1, tzinfo=UTC),
        seq=1,
        data={"words": "undecided: about 700 more labels\x1b[2J would decide"},
    )

    print_event(Session(), event)

    line = "2026-01-01 00:00:00Z  falaj.pipelines.conclude  churn    undecided: about 700 more labels"
    assert capsys.readouterr().out == f"{line}\\x1b[2J would decide\n"


@pytest.mark.slow
def test_an_optimization_is_started_listed_and_cancelled(falaj: CommandLine) -> None:
    ran = falaj.done("optimization", "start", "churn@1", "--data", "churn-train", "--target", "churned")
    work = falaj.json("workflows", "list")["items"][0]["id"]

    assert f"next   falaj workflows watch {work}" in ran.out
    assert "stops before its next step" in falaj.done("workflows", "cancel", work).out
    assert falaj("workflows", "watch", work).status == 1
    assert falaj.done("optimization", "list").err.strip() == "none"


def test_values_as_people_type_them_become_tensors() -> None:
    wide = {"features": TensorSpec(name="features", dtype="float32", shape=(-1, 2), features=("a", "b"))}

    assert tensor("id", "1,17", {}) == {"name": "id", "shape": [2], "datatype": "INT64", "data": [1, 17]}
    assert tensor("id", "ana,1", {})["datatype"] == "BYTES"
    assert tensor("id", "1_7", {})["data"] == ["1_7"]
    flag = {"flag": TensorSpec(name="flag", dtype="bool", shape=(-1,))}
    assert tensor("flag", "true,false,1,0", flag)["data"] == [True, False, True, False]
    assert tensor("features", "1,2/3,4", wide) == {
        "name": "features",
        "shape": [2, 2],
        "datatype": "FP32",
        "data": [1.0, 2.0, 3.0, 4.0],
    }
    with pytest.raises(InvalidInput, match="2 values a row"):
        tensor("features", "1,2,3", wide)


def test_a_pipe_is_written_to_and_never_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    with atomic_file(pipe) as file:
        file.write(b"bytes")

    assert os.read(reader, 100) == b"bytes"
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    os.close(reader)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("Input should be less than or equal to 50", "at most 50"),
        ("Value error, a name is short", "a name is short"),
        ("Something else", "Something else"),
    ],
)
def test_validation_rules_are_worded_plainly(given: str, expected: str) -> None:
    assert allowed_values(given) == expected


def test_an_unfinished_duration_is_shown_as_a_dash() -> None:
    assert format_elapsed(None, None) == "-"


def test_settings_of_an_endpoint_are_shown_as_they_are_typed(falaj: CommandLine) -> None:
    typed = ("--max-queue-ms", "50", "--instances", "2")

    made = falaj.done("endpoints", "configure", "churn", *typed).out
    shown = falaj.done("endpoints", "show", "churn").out
    falaj.done("endpoints", "configure", "churn")

    assert "churn runs with --max-queue-ms 50 --instances 2" in made
    assert "falaj endpoints configure churn" in made
    assert "--max-queue-ms 50 --instances 2" in shown
    assert "as measured" in falaj.done("endpoints", "show", "churn").out
