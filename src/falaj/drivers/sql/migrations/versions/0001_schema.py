"""The schema of 0.1: the tables of all services."""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None

TYPES = {
    "sqlite": {"serial": "INTEGER", "double": "DOUBLE", "bytes": "BLOB", "false": "0"},
    "postgresql": {"serial": "BIGSERIAL", "double": "DOUBLE PRECISION", "bytes": "BYTEA", "false": "false"},
}
OBJECT = "TEXT REFERENCES governance_objects (id)"


def upgrade() -> None:
    types = TYPES[op.get_bind().dialect.name]
    for statement in SCHEMA.format(object=OBJECT, **types).split(";\n")[:-1]:
        op.execute(statement)


SCHEMA = """
CREATE TABLE governance_objects (
    id TEXT NOT NULL PRIMARY KEY, workspace {object} NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL,
    owner TEXT NOT NULL, zone TEXT, label TEXT, own_label TEXT, created_at BIGINT NOT NULL,
    deleted_at BIGINT
);
CREATE INDEX governance_objects_listed ON governance_objects (workspace, kind, id) WHERE deleted_at IS NULL;
CREATE UNIQUE INDEX governance_objects_name ON governance_objects (workspace, kind, name) WHERE deleted_at IS NULL;
CREATE TABLE governance_principals (
    id {object} NOT NULL PRIMARY KEY, disabled_at BIGINT, created_by TEXT
);
CREATE TABLE governance_group_members (
    group_id {object} NOT NULL, member {object} NOT NULL, added_by TEXT, added_at BIGINT,
    PRIMARY KEY (group_id, member)
);
CREATE INDEX governance_group_members_member ON governance_group_members (member);
CREATE TABLE governance_grants (
    workspace {object} NOT NULL, subject {object} NOT NULL, role TEXT NOT NULL, granted_by TEXT,
    granted_at BIGINT, PRIMARY KEY (workspace, subject, role)
);
CREATE INDEX governance_grants_subject ON governance_grants (subject);
CREATE TABLE governance_tokens (
    id {object} NOT NULL PRIMARY KEY, principal {object} NOT NULL, secret_hash {bytes} NOT NULL,
    scope {object}, actions TEXT, purpose TEXT NOT NULL, issuer TEXT, expires_at BIGINT NOT NULL,
    revoked_at BIGINT, vouched_by TEXT
);
CREATE INDEX governance_tokens_principal ON governance_tokens (principal);
CREATE TABLE governance_sign_in_codes (
    code_hash {bytes} NOT NULL PRIMARY KEY, principal {object} NOT NULL, expires_at BIGINT NOT NULL,
    vouched_by TEXT
);
CREATE TABLE governance_policies (
    id {object} NOT NULL, version INTEGER NOT NULL, text TEXT NOT NULL, published_at BIGINT NOT NULL,
    withdrawn_at BIGINT, PRIMARY KEY (id, version)
);
CREATE TABLE governance_epochs (
    id INTEGER NOT NULL PRIMARY KEY, epoch BIGINT NOT NULL
);
CREATE TABLE governance_blobs (
    id {object} NOT NULL PRIMARY KEY, "key" TEXT NOT NULL UNIQUE, size_bytes BIGINT NOT NULL,
    sha256 TEXT NOT NULL, staged_until BIGINT
);
CREATE TABLE governance_stores (
    zone TEXT NOT NULL, kind TEXT NOT NULL, id TEXT NOT NULL, home TEXT NOT NULL, host TEXT NOT NULL,
    place TEXT NOT NULL, PRIMARY KEY (zone, kind)
);
CREATE TABLE governance_data_keys (
    workspace {object} NOT NULL, version INTEGER NOT NULL, root TEXT NOT NULL, wrapped {bytes},
    created_at BIGINT NOT NULL, destroyed_at BIGINT, PRIMARY KEY (workspace, version)
);
CREATE TABLE governance_secrets (
    id {object} NOT NULL PRIMARY KEY, sealed {bytes} NOT NULL, set_by {object} NOT NULL,
    changed_at BIGINT NOT NULL
);
CREATE TABLE governance_activities (
    id TEXT NOT NULL PRIMARY KEY, action TEXT NOT NULL, caller TEXT NOT NULL, at BIGINT NOT NULL
);
CREATE TABLE governance_lineage_edges (
    source TEXT NOT NULL, target TEXT NOT NULL, PRIMARY KEY (source, target)
);
CREATE INDEX governance_lineage_edges_target ON governance_lineage_edges (target);
CREATE TABLE governance_audit_entries (
    seq BIGINT NOT NULL PRIMARY KEY, at BIGINT NOT NULL, caller TEXT NOT NULL, action TEXT NOT NULL,
    outcome TEXT NOT NULL, workspace TEXT, leaf {bytes} NOT NULL, entry TEXT NOT NULL,
    mac {bytes} NOT NULL
);
CREATE TABLE governance_audit_state (
    id INTEGER NOT NULL PRIMARY KEY, log_id TEXT NOT NULL, size BIGINT NOT NULL, frontier TEXT NOT NULL,
    statements TEXT
);
CREATE TABLE governance_audit_heads (
    size BIGINT NOT NULL PRIMARY KEY, root TEXT NOT NULL, at TEXT NOT NULL, "key" TEXT NOT NULL,
    signature TEXT NOT NULL, frontier TEXT NOT NULL
);
CREATE TABLE governance_events (
    seq BIGINT NOT NULL, part INTEGER NOT NULL, id TEXT NOT NULL, type TEXT NOT NULL, subject TEXT NOT NULL,
    workspace TEXT NOT NULL, data TEXT NOT NULL, at BIGINT NOT NULL, PRIMARY KEY (seq, part, id)
);
CREATE TABLE governance_webhooks (
    id {object} NOT NULL PRIMARY KEY, url TEXT NOT NULL, types TEXT NOT NULL, secret {bytes} NOT NULL,
    paused BOOLEAN NOT NULL, written_as TEXT NOT NULL
);
CREATE TABLE governance_webhook_progress (
    webhook TEXT NOT NULL PRIMARY KEY, seq BIGINT NOT NULL, part INTEGER NOT NULL,
    delivered BIGINT NOT NULL, delivered_at BIGINT, attempts INTEGER NOT NULL, failing_since BIGINT,
    retry_at BIGINT, error TEXT
);
CREATE TABLE governance_undelivered_events (
    webhook TEXT NOT NULL, seq BIGINT NOT NULL, part INTEGER NOT NULL, attempts INTEGER NOT NULL,
    error TEXT NOT NULL, given_up_at BIGINT NOT NULL, redelivering BOOLEAN NOT NULL,
    PRIMARY KEY (webhook, seq, part)
);
CREATE TABLE governance_idempotency (
    caller TEXT NOT NULL, "key" TEXT NOT NULL, action TEXT NOT NULL, input TEXT NOT NULL,
    result {bytes} NOT NULL, at BIGINT NOT NULL, PRIMARY KEY (caller, "key")
);
CREATE TABLE governance_backups (
    id TEXT NOT NULL PRIMARY KEY, caller TEXT NOT NULL, began_at BIGINT NOT NULL,
    held_until BIGINT NOT NULL, manifest TEXT
);
CREATE TABLE governance_homes (
    id TEXT NOT NULL PRIMARY KEY
);

CREATE TABLE features_entities (
    id {object} NOT NULL PRIMARY KEY, definition TEXT NOT NULL
);
CREATE TABLE features_views (
    id {object} NOT NULL, version INTEGER NOT NULL, definition TEXT NOT NULL, keys TEXT NOT NULL,
    table_version BIGINT, rows BIGINT NOT NULL, online_version BIGINT, created_at BIGINT NOT NULL,
    PRIMARY KEY (id, version)
);
CREATE TABLE features_training_sets (
    id {object} NOT NULL PRIMARY KEY, spine {object} NOT NULL, spine_pin TEXT, since BIGINT, until BIGINT,
    event_time TEXT NOT NULL, views TEXT NOT NULL, columns TEXT NOT NULL, table_version BIGINT NOT NULL,
    rows BIGINT NOT NULL, request_features TEXT
);
CREATE TABLE features_ingestions (
    id {object} NOT NULL, version INTEGER NOT NULL, sha256 TEXT NOT NULL, at BIGINT NOT NULL,
    PRIMARY KEY (id, version, sha256)
);
CREATE TABLE features_quarantined_batches (
    "view" {object} NOT NULL, number INTEGER NOT NULL, id {object} NOT NULL,
    version INTEGER NOT NULL, data {object} NOT NULL, sha256 TEXT NOT NULL, "by" TEXT NOT NULL,
    at BIGINT NOT NULL, is_history BOOLEAN NOT NULL, quarantined BIGINT NOT NULL, ingested BIGINT NOT NULL,
    rows BIGINT NOT NULL, rules TEXT NOT NULL, PRIMARY KEY ("view", number), UNIQUE (id)
);
CREATE TABLE features_table_files (
    table_key TEXT NOT NULL, path TEXT NOT NULL, version BIGINT NOT NULL, position INTEGER NOT NULL,
    size_bytes BIGINT NOT NULL, sha256 TEXT NOT NULL, until BIGINT,
    PRIMARY KEY (table_key, path)
);

CREATE TABLE tracking_experiments (
    id {object} NOT NULL PRIMARY KEY, updated_at BIGINT NOT NULL, deleted_at BIGINT
);
CREATE TABLE tracking_runs (
    id {object} NOT NULL PRIMARY KEY, experiment {object} NOT NULL, name TEXT NOT NULL,
    status TEXT NOT NULL, ended_at BIGINT, parent TEXT, "user" TEXT, started_at BIGINT NOT NULL,
    deleted_at BIGINT, sealed BOOLEAN
);
CREATE INDEX tracking_runs_deleted ON tracking_runs (deleted_at);
CREATE INDEX tracking_runs_experiment ON tracking_runs (experiment, id);
CREATE INDEX tracking_runs_parent ON tracking_runs (parent);
CREATE TABLE tracking_params (
    run {object} NOT NULL, "key" TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (run, "key")
);
CREATE TABLE tracking_tags (
    run {object} NOT NULL, "key" TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (run, "key")
);
CREATE TABLE tracking_series (
    id {serial} NOT NULL PRIMARY KEY, run {object} NOT NULL, "key" TEXT NOT NULL, points BIGINT NOT NULL,
    last {double}, last_step BIGINT NOT NULL, last_at BIGINT NOT NULL, low {double}, high {double},
    blocks BIGINT DEFAULT '0' NOT NULL, open_from BIGINT DEFAULT '0' NOT NULL,
    open_points BIGINT DEFAULT '0' NOT NULL
);
CREATE UNIQUE INDEX tracking_series_key ON tracking_series (run, "key");
CREATE INDEX tracking_series_last ON tracking_series ("key", last, run);
CREATE TABLE tracking_blocks (
    series BIGINT NOT NULL, number BIGINT NOT NULL, first_step BIGINT NOT NULL, first_at BIGINT NOT NULL,
    last_step BIGINT NOT NULL, last_at BIGINT NOT NULL, data {bytes} NOT NULL, PRIMARY KEY (series, number)
);
CREATE TABLE tracking_batches (
    run {object} NOT NULL, batch TEXT NOT NULL, digest TEXT NOT NULL, stored BIGINT NOT NULL,
    repeated BIGINT NOT NULL, PRIMARY KEY (run, batch)
);
CREATE TABLE tracking_artifacts (
    run {object} NOT NULL, path TEXT NOT NULL, blob {object} NOT NULL, size_bytes BIGINT NOT NULL,
    attached_at BIGINT NOT NULL, unsafe BOOLEAN, PRIMARY KEY (run, path)
);
CREATE TABLE tracking_uploads (
    id {object} NOT NULL PRIMARY KEY, owner {object} NOT NULL, path TEXT NOT NULL,
    started_at BIGINT NOT NULL
);
CREATE INDEX tracking_uploads_started ON tracking_uploads (started_at);
CREATE TABLE tracking_upload_parts (
    upload {object} NOT NULL, number INTEGER NOT NULL, blob {object} NOT NULL, PRIMARY KEY (upload, number)
);
CREATE TABLE tracking_datasets (
    experiment {object} NOT NULL, name TEXT NOT NULL, digest TEXT NOT NULL, source_type TEXT NOT NULL,
    source TEXT NOT NULL, schema_text TEXT, profile TEXT, PRIMARY KEY (experiment, name, digest)
);
CREATE TABLE tracking_inputs (
    run {object} NOT NULL, name TEXT NOT NULL, digest TEXT NOT NULL, context TEXT, tags TEXT NOT NULL,
    PRIMARY KEY (run, name, digest)
);
CREATE TABLE tracking_models (
    id {object} NOT NULL PRIMARY KEY, experiment {object} NOT NULL, name TEXT NOT NULL,
    status TEXT NOT NULL, type TEXT NOT NULL, source_run {object}, updated_at BIGINT NOT NULL,
    deleted_at BIGINT
);
CREATE INDEX tracking_models_experiment ON tracking_models (experiment, id);
CREATE INDEX tracking_models_run ON tracking_models (source_run);
CREATE TABLE tracking_model_links (
    run {object} NOT NULL, model {object} NOT NULL, role TEXT NOT NULL, step BIGINT NOT NULL,
    PRIMARY KEY (run, model, role)
);
CREATE INDEX tracking_model_links_model ON tracking_model_links (model);
CREATE TABLE tracking_model_metrics (
    model {object} NOT NULL, "key" TEXT NOT NULL, run {object} NOT NULL, dataset TEXT NOT NULL,
    dataset_digest TEXT NOT NULL, step BIGINT NOT NULL, at BIGINT NOT NULL, value {double},
    PRIMARY KEY (model, "key", run, dataset, dataset_digest)
);
CREATE INDEX tracking_model_metrics_run ON tracking_model_metrics (run);

CREATE TABLE registry_models (
    id {object} NOT NULL PRIMARY KEY, versions INTEGER NOT NULL
);
CREATE TABLE registry_versions (
    id {object} NOT NULL PRIMARY KEY, model {object} NOT NULL, number INTEGER NOT NULL,
    manifest TEXT NOT NULL, "key" TEXT NOT NULL, signature TEXT NOT NULL
);
CREATE UNIQUE INDEX registry_versions_number ON registry_versions (model, number);
CREATE TABLE registry_notes (
    id {object} NOT NULL PRIMARY KEY, description TEXT NOT NULL, updated_at BIGINT NOT NULL
);
CREATE TABLE registry_tags (
    object {object} NOT NULL, "key" TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (object, "key")
);
CREATE TABLE registry_aliases (
    model {object} NOT NULL, alias TEXT NOT NULL, protected BOOLEAN NOT NULL, independent BOOLEAN,
    PRIMARY KEY (model, alias)
);
CREATE TABLE registry_alias_changes (
    model {object} NOT NULL, alias TEXT NOT NULL, seq INTEGER NOT NULL, version {object} NOT NULL,
    previous {object}, move TEXT NOT NULL, "by" {object} NOT NULL, at BIGINT NOT NULL, evidence TEXT,
    PRIMARY KEY (model, alias, seq)
);
CREATE TABLE registry_approvals (
    id TEXT NOT NULL PRIMARY KEY, version {object} NOT NULL, alias TEXT NOT NULL, "by" {object} NOT NULL,
    comment TEXT NOT NULL, at BIGINT NOT NULL, withdrawn_at BIGINT, appointment TEXT, independent BOOLEAN,
    evidence TEXT
);
CREATE INDEX registry_approvals_version ON registry_approvals (version, alias);
CREATE TABLE registry_gates (
    model {object} NOT NULL, alias TEXT NOT NULL, seq INTEGER NOT NULL, rules TEXT NOT NULL, data {object},
    "by" {object} NOT NULL, at BIGINT NOT NULL, PRIMARY KEY (model, alias, seq)
);
CREATE TABLE registry_measurements (
    version {object} NOT NULL, data {object} NOT NULL, metric TEXT NOT NULL, value {double} NOT NULL,
    run {object}, "by" {object} NOT NULL, at BIGINT NOT NULL, PRIMARY KEY (version, data, metric)
);
CREATE TABLE registry_evaluations (
    version {object} NOT NULL, data {object} NOT NULL, target TEXT NOT NULL, metrics TEXT NOT NULL,
    rows BIGINT NOT NULL, skipped BIGINT NOT NULL, output TEXT NOT NULL, job {object} NOT NULL,
    "by" {object} NOT NULL, at BIGINT NOT NULL, PRIMARY KEY (version, data, target)
);
CREATE TABLE registry_waivers (
    id TEXT NOT NULL PRIMARY KEY, version {object} NOT NULL, alias TEXT NOT NULL, gates TEXT NOT NULL,
    reason TEXT NOT NULL, "by" {object} NOT NULL, at BIGINT NOT NULL, withdrawn_at BIGINT
);
CREATE INDEX registry_waivers_version ON registry_waivers (version, alias);

CREATE TABLE training_jobs (
    id {object} NOT NULL PRIMARY KEY, spec TEXT NOT NULL, inputs TEXT NOT NULL, code {object},
    run {object} NOT NULL, behalf {object} NOT NULL, scope {object}, actions TEXT, token TEXT,
    state TEXT NOT NULL, reason TEXT, attempt INTEGER NOT NULL, failures INTEGER NOT NULL,
    cancelling BOOLEAN NOT NULL, interrupting BOOLEAN NOT NULL, placements TEXT, progress TEXT,
    exit_code INTEGER, outputs TEXT NOT NULL, not_before BIGINT, started_at BIGINT, ended_at BIGINT,
    request TEXT NOT NULL, queue TEXT DEFAULT 'default' NOT NULL, leaving BOOLEAN DEFAULT {false} NOT NULL,
    claim BOOLEAN DEFAULT {false} NOT NULL, borrows BOOLEAN DEFAULT {false} NOT NULL, evicted_for TEXT,
    preemptions INTEGER DEFAULT 0 NOT NULL, limits TEXT, home TEXT, fence_s INTEGER,
    handed_over BOOLEAN DEFAULT {false} NOT NULL
);
CREATE INDEX training_jobs_handed_over ON training_jobs (handed_over);
CREATE INDEX training_jobs_state ON training_jobs (state);
CREATE TABLE training_queue_changes (
    name TEXT NOT NULL PRIMARY KEY, count BIGINT NOT NULL
);
CREATE TABLE training_attempts (
    job {object} NOT NULL, number INTEGER NOT NULL, verdict TEXT, reason TEXT, exit_code INTEGER,
    log {object}, started_at BIGINT NOT NULL, ended_at BIGINT, PRIMARY KEY (job, number)
);
CREATE TABLE training_checkpoints (
    job {object} NOT NULL, step BIGINT NOT NULL, save TEXT NOT NULL, manifest {object} NOT NULL,
    parts TEXT NOT NULL, size_bytes BIGINT NOT NULL, PRIMARY KEY (job, step)
);

CREATE TABLE scheduling_queues (
    id {object} NOT NULL PRIMARY KEY, parent {object}, quota TEXT NOT NULL, at_most TEXT,
    weight {double} NOT NULL, workspaces TEXT, version INTEGER NOT NULL
);
CREATE TABLE scheduling_budgets (
    workspace {object} NOT NULL PRIMARY KEY, gpu_hours {double}, money {double}, period TEXT NOT NULL,
    since BIGINT NOT NULL, counted_from BIGINT, counted_currency TEXT, counted_gpu_hours {double} NOT NULL,
    counted_money {double} NOT NULL
);
CREATE TABLE scheduling_cordons (
    node TEXT NOT NULL PRIMARY KEY, since BIGINT NOT NULL, "by" TEXT NOT NULL, reason TEXT NOT NULL,
    drained BOOLEAN NOT NULL
);
CREATE TABLE scheduling_usage (
    job {object} NOT NULL, attempt INTEGER NOT NULL, workspace {object} NOT NULL, user_id {object} NOT NULL,
    queue TEXT NOT NULL, request TEXT NOT NULL, placements TEXT NOT NULL, gpu_models TEXT NOT NULL,
    borrows BOOLEAN NOT NULL, cpus BIGINT NOT NULL, gpus_milli BIGINT NOT NULL,
    memory_bytes BIGINT NOT NULL, currency TEXT, cpu_rate {double} NOT NULL, gpu_rate {double} NOT NULL,
    submitted_at BIGINT NOT NULL, started_at BIGINT NOT NULL, ended_at BIGINT, verdict TEXT,
    gpu_hours {double}, cpu_hours {double}, cpu_s {double}, peak_memory_bytes BIGINT, cpu_energy_j {double},
    gpu_energy_j {double}, energy_cost {double}, cost {double}, PRIMARY KEY (job, attempt)
);
CREATE INDEX scheduling_usage_ended ON scheduling_usage (ended_at);
CREATE INDEX scheduling_usage_started ON scheduling_usage (started_at, job, attempt);
CREATE INDEX scheduling_usage_submitted ON scheduling_usage (submitted_at, job, attempt);
CREATE INDEX scheduling_usage_workspace ON scheduling_usage (workspace, ended_at);
CREATE TABLE scheduling_history (
    queue TEXT NOT NULL PRIMARY KEY, half_life_s {double} NOT NULL, as_of BIGINT NOT NULL,
    cpus {double} NOT NULL, gpus {double} NOT NULL, memory_bytes {double} NOT NULL
);
CREATE TABLE scheduling_comparisons (
    work {object} NOT NULL PRIMARY KEY, sealed {bytes} NOT NULL
);

CREATE TABLE tuning_studies (
    id {object} NOT NULL PRIMARY KEY, settings TEXT NOT NULL, seed BIGINT NOT NULL, job TEXT NOT NULL,
    code {object}, state TEXT NOT NULL, reason TEXT, stopping TEXT, best TEXT NOT NULL,
    importance TEXT NOT NULL, run {object}, work {object}, version TEXT, ended_at BIGINT
);
CREATE TABLE tuning_trials (
    study {object} NOT NULL, number INTEGER NOT NULL, state TEXT NOT NULL, params TEXT NOT NULL,
    results TEXT NOT NULL, reports TEXT NOT NULL, pruning BOOLEAN NOT NULL, reason TEXT, job {object},
    run {object}, asked INTEGER NOT NULL, told INTEGER, created_at BIGINT NOT NULL, ended_at BIGINT,
    PRIMARY KEY (study, number)
);

CREATE TABLE optimization_optimizations (
    id {object} NOT NULL PRIMARY KEY, model {object} NOT NULL, data {object} NOT NULL,
    job {object} NOT NULL, target TEXT NOT NULL, features TEXT NOT NULL, budget TEXT NOT NULL,
    report TEXT NOT NULL, held_out {object}, student {object}
);

CREATE TABLE serving_revision (
    id INTEGER NOT NULL PRIMARY KEY, revision BIGINT NOT NULL
);
CREATE TABLE serving_endpoints (
    id {object} NOT NULL PRIMARY KEY, model TEXT NOT NULL, routes TEXT NOT NULL, previous TEXT NOT NULL,
    lookup TEXT, scoring TEXT, changed_at BIGINT NOT NULL, sticky TEXT
);
CREATE TABLE serving_protections (
    workspace {object} NOT NULL, name TEXT NOT NULL, alias TEXT, independent BOOLEAN NOT NULL,
    "by" {object} NOT NULL, at BIGINT NOT NULL, PRIMARY KEY (workspace, name)
);
CREATE TABLE serving_settings (
    endpoint {object} NOT NULL PRIMARY KEY, settings TEXT NOT NULL
);
CREATE TABLE serving_measurements (
    endpoint {object} NOT NULL, version TEXT NOT NULL, measured TEXT NOT NULL,
    PRIMARY KEY (endpoint, version)
);
CREATE TABLE serving_problems (
    endpoint {object} NOT NULL, version TEXT NOT NULL, problem TEXT NOT NULL, at BIGINT NOT NULL,
    PRIMARY KEY (endpoint, version)
);
CREATE TABLE serving_counts (
    endpoint {object} NOT NULL, version TEXT NOT NULL, at BIGINT NOT NULL, requests BIGINT NOT NULL,
    errors BIGINT NOT NULL, rows BIGINT NOT NULL, lost BIGINT NOT NULL, latency TEXT NOT NULL,
    PRIMARY KEY (endpoint, version, at)
);
CREATE TABLE serving_shadows (
    endpoint {object} NOT NULL, version TEXT NOT NULL, against TEXT NOT NULL, counts TEXT NOT NULL,
    since BIGINT NOT NULL, PRIMARY KEY (endpoint, version, against)
);
CREATE TABLE serving_observations (
    endpoint {object} NOT NULL, number BIGINT NOT NULL, at BIGINT NOT NULL, requests TEXT NOT NULL,
    scores TEXT NOT NULL, PRIMARY KEY (endpoint, number)
);
CREATE TABLE serving_batches (
    id {object} NOT NULL PRIMARY KEY, endpoint {object} NOT NULL, version TEXT NOT NULL,
    rows BIGINT NOT NULL
);
CREATE INDEX serving_batches_endpoint ON serving_batches (endpoint, id);
CREATE TABLE serving_unannounced (
    endpoint {object} NOT NULL, version {object} NOT NULL, batches BIGINT NOT NULL, rows BIGINT NOT NULL,
    since BIGINT NOT NULL, until BIGINT NOT NULL, newest {object} NOT NULL, PRIMARY KEY (endpoint, version)
);
CREATE TABLE serving_labels (
    prediction TEXT NOT NULL PRIMARY KEY, endpoint {object} NOT NULL, version TEXT NOT NULL,
    predicted_at BIGINT NOT NULL, value {double} NOT NULL, score {double}
);
CREATE INDEX serving_labels_version ON serving_labels (endpoint, version, predicted_at);

CREATE TABLE monitoring_monitors (
    id {object} NOT NULL PRIMARY KEY, endpoint {object} NOT NULL, training_set {object} NOT NULL,
    columns TEXT NOT NULL, all_columns BOOLEAN NOT NULL, "window" TEXT NOT NULL, budget TEXT NOT NULL,
    reference_rows BIGINT NOT NULL, reference {bytes} NOT NULL, alert {object}
);
CREATE INDEX monitoring_monitors_endpoint ON monitoring_monitors (endpoint);
CREATE TABLE monitoring_endpoints (
    endpoint {object} NOT NULL PRIMARY KEY, seq BIGINT NOT NULL
);
CREATE TABLE monitoring_slots (
    endpoint {object} NOT NULL, version TEXT NOT NULL, seq BIGINT NOT NULL, since BIGINT NOT NULL,
    until BIGINT NOT NULL, rows BIGINT NOT NULL, sealed {bytes} NOT NULL,
    PRIMARY KEY (endpoint, version, seq)
);
CREATE TABLE monitoring_positions (
    monitor {object} NOT NULL, version TEXT NOT NULL, judged_seq BIGINT NOT NULL, judged_until BIGINT,
    verdict TEXT, windows INTEGER NOT NULL, rows BIGINT NOT NULL, waiting_rows BIGINT NOT NULL,
    waiting_since BIGINT, due_at BIGINT, own_columns TEXT NOT NULL, own_reference {bytes}, report TEXT,
    PRIMARY KEY (monitor, version)
);
CREATE INDEX monitoring_positions_due ON monitoring_positions (due_at);
CREATE TABLE monitoring_alerts (
    id {object} NOT NULL PRIMARY KEY, monitor {object} NOT NULL, endpoint {object} NOT NULL,
    version TEXT NOT NULL, columns TEXT NOT NULL, words TEXT NOT NULL, since BIGINT NOT NULL,
    until BIGINT NOT NULL, rows BIGINT NOT NULL, rows_seen BIGINT NOT NULL, raised_at BIGINT NOT NULL,
    windows INTEGER NOT NULL, last_until BIGINT NOT NULL, acknowledged_by TEXT, acknowledged_at BIGINT,
    ended_at BIGINT, report TEXT NOT NULL
);
CREATE INDEX monitoring_alerts_monitor ON monitoring_alerts (monitor, id);

CREATE TABLE control_work (
    id {object} NOT NULL PRIMARY KEY, workflow TEXT NOT NULL, input TEXT NOT NULL, behalf {object} NOT NULL,
    scope {object}, actions TEXT, token TEXT, state TEXT NOT NULL, step INTEGER NOT NULL, steps INTEGER,
    doing TEXT, result TEXT, error TEXT, cancelling BOOLEAN NOT NULL, ended_at BIGINT
);
CREATE INDEX control_work_state ON control_work (state);
CREATE TABLE control_leases (
    name TEXT NOT NULL PRIMARY KEY, holder TEXT NOT NULL, fence BIGINT NOT NULL, expires_at BIGINT NOT NULL
);
CREATE TABLE control_pipelines (
    id {object} NOT NULL PRIMARY KEY, definition TEXT NOT NULL, code {object}, applied_by {object} NOT NULL,
    started_at BIGINT, cause TEXT, work {object}
);
"""
