"""The workflow of a study: its trials as one durable wait, then registration and the report.

What is known of a study is in its tables. After a kill at any moment the next controller reads it there, submits the
trials that were asked for and not submitted, and goes on; see decision 0058.
"""

from __future__ import annotations

from contextlib import closing
from functools import partial

from falaj.control.authorization import controller_caller
from falaj.control.jobs.models import register_model
from falaj.control.services import Services
from falaj.control.tuning.search import StudySearch
from falaj.control.tuning.tracked import start_study_run
from falaj.control.workflows.context import WorkflowContext
from falaj.errors import Conflict, FalajError
from falaj.governance.operations.caller import acting_as
from falaj.ports.workflows import JsonObject
from falaj.records.tracking import Outcome
from falaj.records.tuning import StudyOutcome, StudyState, StudyTrial
from falaj.tuning import store
from falaj.tuning.report import render_report, report_data

POLL_S, LONGEST_POLL_S = 0.1, 0.5


def tune(services: Services, context: WorkflowContext, given: JsonObject) -> JsonObject:
    """Run the trials of a study; the result names its best trials and the registered version."""
    study, workspace = given["study"], given["workspace"]
    run = context.run("start the run of the study", lambda: _start_run(services, study, workspace))["run"]
    search = StudySearch(services, context, study, run=run, workspace=workspace)
    try:
        with closing(search):
            ended = context.wait("run trials", search.poll, every_s=POLL_S, longest_s=LONGEST_POLL_S)
        outcome = StudyOutcome.model_validate(ended)
        version, note = _registered(services, context, study, outcome)
        told = _reported(services, context, study, outcome)
    except FalajError as error:
        words = error.message
        context.undo("stop the trials", lambda: search.abandon(words))
        raise
    reason = "; ".join(each for each in (outcome.reason, note, told) if each) or None
    final = outcome.model_copy(update={"version": version, "reason": reason and reason[:2000]})
    context.as_controller("record the end", lambda: _record(services, study, final))
    if final.state is StudyState.FAILED:
        raise Conflict(reason or "the study failed")
    return {"study": study, "best": [*final.best], "version": version}


def _start_run(services: Services, study: str, workspace: str) -> JsonObject:
    found = services.studies.show(study)
    run = start_study_run(services, found.name, found.settings.objectives, workspace=workspace)
    return {"run": run}


def _registered(
    services: Services, context: WorkflowContext, study: str, outcome: StudyOutcome
) -> tuple[str | None, str | None]:
    """Return the version of the best trial's model, if one was asked for, or why it could not be registered."""
    with services.studies.gate.database.read() as tx:
        model = store.study_row(tx, study).settings.register_as  # type: ignore[arg-type]
    if model is None or outcome.state is not StudyState.DONE or not outcome.best:
        return None, None

    def register() -> JsonObject:
        (best,) = services.studies.show(study).best
        job = services.jobs.show(str(best.job))
        try:
            made = register_model(services, job, model, workspace=job.workspace)
        except FalajError as error:
            return {"note": f"the model of trial {best.number} could not be registered: {error.message}"}
        return {"version": made.reference}

    found = context.run("register the best model", register)
    return found.get("version"), found.get("note")


def _reported(services: Services, context: WorkflowContext, study: str, outcome: StudyOutcome) -> str | None:
    """Attach the report to the run of the study, and end that; return why it could not be done."""
    run = str(outcome.run)
    try:
        for path in ("report.html", "study.json"):
            staged = context.run(f"upload {path}", partial(_upload, services, study, run, path))
            name = f"study-{run.partition('_')[2]}-{path}"
            blob = context.run(f"name {path}", partial(_commit, services, staged["blob"], name))
            context.run(f"attach {path}", partial(_attach, services, run, path, blob["blob"]))
        status: Outcome = "finished" if outcome.state is StudyState.DONE else "killed"
        context.run("end the run of the study", lambda: {"run": services.runs.end(run, status=status).id})
    except FalajError as error:
        return f"its report could not be stored: {error.message}"
    return None


def _upload(services: Services, study: str, run: str, path: str) -> JsonObject:
    found = services.studies.show(study)
    trials = _all_trials(services, study)
    data = report_data(found, trials)
    text = data.model_dump_json(indent=1) if path.endswith(".json") else render_report(data)
    sources = (run, *(str(each.run) for each in found.best[:1] if each.run))
    staged = services.blobs.upload(iter([text.encode()]), workspace=found.workspace, sources=sources)
    return {"blob": staged.id}


def _commit(services: Services, blob: str, name: str) -> JsonObject:
    return {"blob": services.blobs.commit(blob, name=name).id}


def _attach(services: Services, run: str, path: str, blob: str) -> JsonObject:
    return {"path": services.runs.log_artifact(run, path, blob).path}


def _all_trials(services: Services, study: str) -> list[StudyTrial]:
    with services.studies.gate.database.read() as tx:
        return store.load_trials(tx, study)[0]  # type: ignore[arg-type]


def _record(services: Services, study: str, outcome: StudyOutcome) -> JsonObject:
    with acting_as(controller_caller(services.studies.gate.database)):
        return {"state": services.studies.record(study, outcome=outcome).state}
