"""Open the parser pool: which parsers there are, the sandbox that they run in, and their limits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from falaj.assembly.compute import secret_files
from falaj.assembly.home import Home
from falaj.governance import isolation
from falaj.ports.machine.memory import MemoryBudget
from falaj.ports.parsers import ParserPool
from falaj.ports.sandbox import Sandbox
from falaj.records.config import Config

PARSERS = {
    "arrow": "falaj.governance.arrow_ipc:parse_arrow",
    "code": "falaj.training.code_archive:parse_code",
    "columns": "falaj.features.row_files:parse_columns",
    "first_rows": "falaj.tracking.artifact_tables:parse_first_rows",
    "policy": "falaj.governance.policy.new_policies:parse_policy",
    "model_file": "falaj.registry.formats:parse_model_file",
    "mlflow_model": "falaj.registry.file_formats.mlflow_models:parse_mlflow_model",
    "model_tensors": "falaj.registry.file_formats.model_tensors:parse_model_tensors",
    "pickled_file": "falaj.registry.formats:parse_pickled_file",
    "quarantine_page": "falaj.features.validation.quarantined_rows:parse_page",
    "quarantined_rows": "falaj.assembly.row_parsers:parse_quarantined_rows",
    "rows": "falaj.features.row_files:parse_rows",
    "view_rows": "falaj.assembly.row_parsers:parse_view_rows",
}
"""The functions that run in the parser process. A function is pure and gets nothing but sources and options (decision
0018 says how to add one)."""

MEMORY_SHARE = 4
"""A process spends this part of the machine's memory on rows: API and controller together half of it."""
PARSER_BYTES, PARSER_SHARE = 4 << 30, 8
"""Memory of one call of a parser, or this part of the machine's if that is less; four run at once."""


def open_parsers(home: Home, config: Config) -> ParserPool:
    """Open the pool; its process is started at the first call."""
    from falaj.drivers.parsing.pool import ParserLimits, ProcessParserPool

    limits = ParserLimits(memory_bytes=min(PARSER_BYTES, _machine_bytes() // PARSER_SHARE))
    return ProcessParserPool(
        PARSERS, sandboxes=find_sandboxes, hidden=hidden_paths(home, config), limits=limits
    )


def hidden_paths(home: Home, config: Config) -> Sequence[Path]:
    """The paths of the platform that no process which handles bytes of strangers may reach."""
    return (home.path, home.config_dir, *secret_files(config))


def find_sandboxes() -> Sequence[Sandbox]:
    """The sandboxes that work on this machine, the strongest first; at last a plain process without an environment."""
    from falaj.drivers.sandbox import probe, sandbox_for

    facts = probe()
    working = [name for name in isolation.SEPARATING if isolation.fault_of(name, facts) is None]
    return [sandbox_for(name, facts) for name in (*working, "same-uid")]


def open_budget(config: Config) -> MemoryBudget:
    """The memory that the rows of all calls of this process may take."""
    return MemoryBudget(config.features.memory or _machine_bytes() // MEMORY_SHARE)


def _machine_bytes() -> int:
    from falaj.drivers.machine.capacity import memory_bytes, memory_limit_bytes

    root = Path("/")
    limit = memory_limit_bytes(root)
    return memory_bytes(root) if limit is None else min(memory_bytes(root), limit)
