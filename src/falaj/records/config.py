"""The settings of falaj.toml and their defaults."""

from __future__ import annotations

from datetime import timedelta
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from falaj.records.control.console import ConsoleConfig
from falaj.records.control.replicas import ReplicaConfig
from falaj.records.control.tls import Tls, is_loopback
from falaj.records.control.tracing import TracingConfig, is_listed
from falaj.records.durations import read_duration
from falaj.records.governance.egress import read_egress_host, require_egress_addresses, require_egress_host
from falaj.records.governance.residency import UNKNOWN
from falaj.records.names import Jurisdiction, Name, Secret, TextRule
from falaj.records.record import Record
from falaj.records.scheduling.hardware import MPS_DIRECTORY
from falaj.records.serving.triton import TritonConfig
from falaj.records.sizes import RULE, read_size
from falaj.records.training.images import ALLOWED_RULE, PinnedImage, is_allowed, read_image_rule

Price = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class ServerConfig(Record):
    bind: str = "127.0.0.1"
    """Address of the API; beyond loopback only with `server.tls`."""
    port: Annotated[int, Field(ge=0, le=65535)] = 7480
    """Port of the API; 0 takes a free one."""
    tls: Tls | None = None
    """Certificate and key of the API; TLS 1.3 only."""
    body_limit_bytes: Annotated[int, Field(ge=1024, le=2**24)] = 2**20
    """Largest JSON body of a request; uploads are streams and have no limit."""
    threads: Annotated[int, Field(ge=1, le=256)] = 32
    """Operations at a time."""

    @model_validator(mode="after")
    def _tls_beyond_loopback(self) -> ServerConfig:
        if self.tls is None and not is_loopback(self.bind):
            raise ValueError(
                f"listening on {self.bind} without TLS is refused; set server.tls, or bind to 127.0.0.1"
            )
        return self


def _size(given: object) -> object:
    """An amount as people write it: 200GiB; or as TOML knows it, in bytes."""
    if isinstance(given, str) and (size := read_size(given)) is None:
        raise ValueError(RULE)
    return size if isinstance(given, str) else given


ModelIsolation = Literal["auto", "always"]


class ServingLimits(Record):
    """Limits of each caller of an endpoint, where the endpoint has none of its own."""

    requests_per_second: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    """Requests of each caller to each endpoint, on average; more get 429. By default as many as can be answered."""
    burst: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Requests at once after a pause; by default those of a second."""


Origin = Annotated[
    str,
    TextRule(
        r"\*|https?://([a-z0-9]([a-z0-9.-]*[a-z0-9])?|\[[0-9a-f:.]+\])(:[0-9]{1,5})?",
        "an origin is like https://app.example.org or http://localhost:3000, without a path; * is any",
        limit=300,
    ),
]


class CorsConfig(Record):
    """The sites whose scripts may call the model server from a browser. Cookies are never used."""

    origins: Annotated[tuple[Origin, ...], Field(max_length=100)] = ()
    """Like `["https://app.example.org"]`; `["*"]` stands for every site. The scripts need a token all the same."""


class ServingConfig(Record):
    """The model server: its address, and how often it stores predictions. By default it uses the TLS of the API.

    With `predictions = "forget"` answers are counted, but neither logged nor watched for drift, and cannot be labelled.
    """

    bind: str = "127.0.0.1"
    """Address of the model server, which runs once something is deployed; beyond loopback only with TLS."""
    port: Annotated[int, Field(ge=0, le=65535)] = 7481
    """Port of the model server; 0 takes a free one."""
    grpc_port: Annotated[int, Field(ge=0, le=65535)] | Literal["off"] = 7483
    """Port of the model server for gRPC; 0 takes a free one, "off" none."""
    tls: Tls | None = None
    """Certificate and key of the model server; by default those of the API."""
    log_every: Annotated[timedelta, Field(ge=timedelta(milliseconds=100), le=timedelta(minutes=5))] = (
        timedelta(seconds=5)
    )
    """How often predictions, counts and sketches are stored; kill -9 of the process of the log loses that much."""
    predictions: Literal["log", "forget"] = "log"
    """forget: answers are counted only; no log, no labels, no drift."""
    isolation: ModelIsolation = "auto"
    """Models in a process of their own: auto, those whose time and memory depend on values; always, all; see
    [serving](serving.md)."""
    model_memory: Annotated[int, BeforeValidator(_size), Field(ge=1 << 26)] = 1 << 30
    """Memory for runs, like 2GiB: of each model in a process of its own, and of all others together."""
    limits: ServingLimits = ServingLimits()
    """Limits of each caller; an endpoint may have others (`falaj endpoints configure`)."""
    tracing: TracingConfig = TracingConfig()
    max_body: Annotated[int, BeforeValidator(_size), Field(ge=1 << 16, le=1 << 32)] = 1 << 24
    """Largest body of a request, like 64MiB, also after decompression. All unanswered requests together may take 256
    MiB, or four times this if that is more."""
    public_readiness: bool = False
    """Whether `GET /v2/models/NAME/ready` needs no token; then anybody can find out which names are served."""
    cors: CorsConfig = CorsConfig()
    """Scripts of other sites, see [serving](serving.md#browsers)."""
    triton: TritonConfig | None = None
    """A Triton server behind the endpoint, see [engines](engines.md#triton)."""
    replicas: ReplicaConfig = ReplicaConfig()
    """How many processes of the model server share its port; see [serving](serving.md#replicas)."""


class MetadataConfig(Record):
    """SQLite in the home, or a PostgreSQL whose URL is a secret because it may hold a password."""

    driver: Literal["sqlite", "postgres"] = "sqlite"
    """Database of metadata; sqlite is a file in the home."""
    url: Secret | None = None
    """Address of PostgreSQL, only with `driver = "postgres"`; it may hold a password."""

    @property
    def is_shared(self) -> bool:
        """Whether other machines may use the database as well; else it is a file in the home."""
        return self.url is not None

    @model_validator(mode="after")
    def _url_for_postgres(self) -> MetadataConfig:
        if (self.driver == "postgres") != (self.url is not None):
            raise ValueError('driver "postgres" needs a url ("env:NAME" or "file:PATH"), "sqlite" takes none')
        return self


class LocalFiles(Record):
    driver: Literal["files"] = "files"
    """Where the bytes of the zone lie."""
    path: Path | None = None
    """Folder of the blobs; by default in the home."""

    address: ClassVar[None] = None
    secrets: ClassVar[tuple[Secret, ...]] = ()


class S3Bucket(Record):
    driver: Literal["s3"]
    bucket: str
    """Name of the bucket."""
    region: str = "us-east-1"
    """Region of the bucket."""
    endpoint: str | None = None
    """Address of a store other than AWS."""
    prefix: str = ""
    """Beginning of the keys of all blobs."""
    access_key: Secret | None = None
    """Access key; give both keys, or neither."""
    secret_key: Secret | None = None
    """Secret of the access key."""

    path: ClassVar[None] = None

    @property
    def address(self) -> str:
        """What tells this bucket from others; a folder has none, and a bucket no path on this machine."""
        return f"{self.endpoint or 's3'}/{self.bucket}/{self.prefix}"

    @property
    def secrets(self) -> tuple[Secret, ...]:
        return tuple(key for key in (self.access_key, self.secret_key) if key is not None)


def _driver(default: str) -> BeforeValidator:
    """Return a validator that adds the default driver."""
    return BeforeValidator(lambda given: {"driver": default} | given if isinstance(given, dict) else given)


class TableFiles(Record):
    path: Path | None = None
    """Folder of the tables; by default below `blobs.path`, else in the home. Homes on one PostgreSQL must share it."""


class OnlineFile(Record):
    driver: Literal["lmdb", "none"] = "lmdb"
    """Store of online values; none: this home serves none, which a second machine on one PostgreSQL needs."""
    path: Path | None = None
    """File of the online values; by default below `blobs.path`, else in the home. Homes on one machine may share it."""

    @property
    def is_here(self) -> bool:
        """Whether this machine has the online values."""
        return self.driver != "none"


class ZoneConfig(Record):
    """A zone: its jurisdiction, where its bytes lie, and the addresses of callers in it.

    Tables and online values lie where `tables` and `online` say, else below the folder of the blobs, else in the home.
    A zone in a bucket that this machine is not in must say it.
    """

    jurisdiction: Jurisdiction
    """Country whose law applies there, as two capital letters."""
    default: bool = False
    """Whether bytes go there unless told otherwise; else the first zone is the default."""
    blobs: Annotated[LocalFiles | S3Bucket, Field(discriminator="driver"), _driver("files")] = LocalFiles()
    tables: TableFiles = TableFiles()
    online: OnlineFile = OnlineFile()
    networks: tuple[IPv4Network | IPv6Network, ...] = ()
    """Addresses in the zone, like `10.1.0.0/16`. Once a zone has some, what a label restricts is handed out only to
    callers in a zone that the label permits."""


class KeyFileConfig(Record):
    driver: Literal["keyfile"] = "keyfile"
    """Where the root key is."""
    path: Path | None = None
    """Key file; by default in the configuration directory."""


class Pkcs11Config(Record):
    driver: Literal["pkcs11"]
    module: Path
    """PKCS#11 library of the HSM."""
    token: str
    """Label of the token."""
    pin: Secret
    """PIN of the token."""


class AuditConfig(Record):
    witness: Path | None = None
    """File in which signed heads are kept outside the database; by default in the configuration directory."""
    sign_every: timedelta = timedelta(seconds=1)
    """How often the head of the audit log is signed."""


def _length(given: object) -> object:
    """A length of time as people write it: 90s, 12h; or as TOML knows it, in seconds."""
    return read_duration(given) or given


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError("the folder of a virtualenv, from / on")
    return path


Virtualenv = Annotated[Path, AfterValidator(_absolute)]


def _from_root(path: Path) -> Path:
    if not path.is_absolute() or ".." in path.parts:
        raise ValueError("a folder, from / on, and no '..'")
    return path


class MachineVolume(Record):
    """A folder of this machine that jobs may ask for by name (`falaj train --volume NAME`). They only read it."""

    folder: Annotated[Path, AfterValidator(_from_root)]
    """The folder, from / on; the users that jobs run as must be able to read it."""
    workspaces: Annotated[frozenset[Name], Field(min_length=1)]
    """Workspaces whose jobs may read it."""
    zone: Name | None = None
    """Zone that it lies in; needed if there are several. A job that reads it, and what that makes, stay in the
    zone's jurisdiction."""


class JobsConfig(Record):
    """The settings of jobs.

    A job that makes room for another has `preemption_grace` to save itself. A workspace has at most `unfinished_limit`
    jobs that wait or run. One checkpoint of a job takes at most `checkpoint_limit`, like "200GiB"; a twentieth of the
    disk stays free beside all of them, at most 10 GiB. `environments` are virtualenvs by the names under which jobs ask
    for them.
    """

    launcher: Literal["processes", "kubernetes"] = "processes"
    """Where jobs run: as processes of this machine, or in pods of the cluster of `kubernetes`."""
    preemption_grace: Annotated[
        timedelta, BeforeValidator(_length), Field(ge=timedelta(0), le=timedelta(hours=1))
    ] = timedelta(seconds=60)
    """Time in which a preempted job can save a checkpoint."""
    unfinished_limit: Annotated[int, Field(ge=1, le=10_000_000)] = 10_000
    """Largest number of jobs of a workspace that wait or run."""
    checkpoint_limit: Annotated[int, BeforeValidator(_size), Field(ge=1 << 20)] = 1 << 40
    """Largest size of one checkpoint of a job; a twentieth of the disk, at most 10 GiB, stays free besides."""
    fence_after: Annotated[
        timedelta, BeforeValidator(_length), Field(ge=timedelta(seconds=10), le=timedelta(days=7))
    ] = timedelta(minutes=2)
    """With PostgreSQL: after so long without a controller on its machine a job stops, and another machine may run it;
    see [jobs](jobs.md)."""
    memory_default: Annotated[int, BeforeValidator(_size), Field(ge=1 << 20)] | None = None
    """Memory of a job that names none, like "8GiB"; by default its share of the machine, see [limits](limits.md)."""
    disk_default: Annotated[int, BeforeValidator(_size), Field(ge=1 << 20)] | None = None
    """What a job that names no disk may add to its folder; by default its share of what is free."""
    environments: dict[Name, Virtualenv] = {}
    """Virtualenvs by name, each the absolute path of its folder, which jobs may ask for; see
    [frameworks](frameworks.md)."""
    volumes: dict[Name, MachineVolume] = {}
    """Folders by name, which jobs on this machine may ask for; see [jobs](jobs.md#volumes)."""


class Prices(Record):
    """The prices of an hour and of energy. A GPU whose model is not named costs `gpu_hour`."""

    currency: Annotated[str, TextRule("[A-Z]{3}", "a currency is three capital letters, like AED", limit=3)]
    """Three capital letters, like AED."""
    cpu_hour: Price = 0.0
    """Price of an hour of a CPU."""
    gpu_hour: Price = 0.0
    """Price of an hour of a GPU whose model is not in `gpu_models`."""
    gpu_models: dict[str, Price] = {}
    """Price of an hour by model, like `"NVIDIA H200" = 12.5`."""
    energy_kwh: Price = 0.0
    """Price of a kWh of energy that was measured."""


class FeaturesConfig(Record):
    """The settings of the feature store."""

    memory: Annotated[int, BeforeValidator(_size), Field(ge=256 << 20)] | None = None
    """Memory that one process spends on rows of all calls, like "16GiB"; by default a quarter of the machine's."""


class QueueConfig(Record):
    """The settings of queues. Fair share: resources held `half_life` ago count half."""

    half_life: Annotated[
        timedelta, BeforeValidator(_length), Field(ge=timedelta(minutes=1), le=timedelta(days=3650))
    ] = timedelta(days=7)
    """Fair share: resources that a queue held so long ago count half; see [queues](queues.md)."""


class NodeConfig(Record):
    """This machine as jobs see it: the pool it is in, further labels, and where NVIDIA's MPS daemon listens on it.

    `cgroup` is one (version 2) made for jobs, below which each has its own; without it, one that systemd delegated.

    Labels such as isa-avx512 and gpu-nvidia-h200 are found, and need not stand here.
    """

    zone: Name | None = None
    """Zone that this machine is in. Needed if there are several: without it, what a label restricts neither runs nor is
    served here."""
    pool: Name = "default"
    """Pool of this machine, for jobs that ask for one; see [hardware](hardware.md)."""
    labels: tuple[Name, ...] = ()
    """Labels of this machine, beside those that are detected."""
    mps: Path = Path(MPS_DIRECTORY)
    """Folder in which NVIDIA's MPS daemon listens."""
    cgroup: Path | None = None
    """A cgroup (version 2) made for jobs, without processes of its own; see [limits](limits.md)."""


LabelKey = Annotated[
    str,
    TextRule(
        r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?",
        "the key of a label, like topology.kubernetes.io/zone",
        limit=317,
    ),
]


def _address(given: str) -> str:
    host, _, port = given.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError("a host and a port, like 0.0.0.0:7482")
    return given


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _agent_url(given: str) -> str:
    if not given.startswith("tls://"):
        raise ValueError("tls://HOST:PORT, like tls://falaj.example.com:7482")
    _address(given.removeprefix("tls://"))
    return given


def _image_rule(given: str) -> str:
    read_image_rule(given)
    return given


ClaimName = Annotated[
    str,
    TextRule(
        r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?",
        "the name of a PersistentVolumeClaim: a-z, 0-9, '-' and '.'",
        limit=253,
    ),
]
StorageClassName = Annotated[
    str, TextRule(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", "the name of a StorageClass", limit=253)
]
ClaimPath = Annotated[
    str,
    TextRule(
        r"(?!\.{1,2}(/|$))[\w.+=@-]+(/(?!\.{1,2}(/|$))[\w.+=@-]+)*",
        "a folder in the claim, no '..'",
        limit=500,
    ),
]


class ClusterVolume(Record):
    """A PersistentVolumeClaim that jobs may ask for by name (`falaj train --volume NAME`).

    It is in the namespace of each workspace that may use it; an administrator of the cluster makes it there.
    """

    claim: ClaimName
    """Name of the PersistentVolumeClaim."""
    workspaces: Annotated[frozenset[Name], Field(min_length=1)]
    """Workspaces whose jobs may mount it."""
    path: ClaimPath | None = None
    """Folder in the claim that jobs see; by default all of it."""
    read_only: bool = True
    """Whether jobs can only read it."""
    zone: Name | None = None
    """Zone that it lies in; needed if there are several. A job that mounts it, and what that makes, stay in the
    zone's jurisdiction."""


class ScratchConfig(Record):
    """The disk space of pods: `/tmp` and the folder of the job, which has its code, inputs and outputs."""

    size: Annotated[int, BeforeValidator(_size), Field(ge=1 << 20)]
    """Size of each of the two, like "100GiB", and the most that a job may ask for by `--disk`."""
    storage_class: StorageClassName | None = None
    """StorageClass from which each pod gets a volume for the folder of its job, which goes away with the pod; by
    default it is on the disk of the node."""


ClusterName = Annotated[
    str, TextRule("[a-z]([-a-z0-9]*[a-z0-9])?", "the name of a cluster is a-z, 0-9 and '-'", limit=20)
]


class ClusterPrices(Record):
    """The prices of an hour in one cluster, in the currency of `prices`; what is not named costs what it says there."""

    cpu_hour: Price | None = None
    """Price of an hour of a CPU."""
    gpu_hour: Price | None = None
    """Price of an hour of a GPU whose model is not in `gpu_models`."""
    gpu_models: dict[str, Price] = {}
    """Price of an hour by model, like `"NVIDIA H200" = 12.5`."""


class ClusterConfig(Record):
    """One of several clusters that jobs run on. Its nodes are a pool of its name, and are called `NAME.NODE`."""

    kubeconfig: Path | None = None
    """Kubeconfig file of this cluster; by default that of `kubernetes`."""
    context: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """Context of the kubeconfig; by default its current one."""
    zone: Name | None = None
    """Zone of its nodes whose labels are not in `kubernetes.zones`."""
    burst: bool = False
    """Use it only for jobs that no other cluster can take now."""
    prices: ClusterPrices | None = None
    """Its prices, where they are not those of `prices`."""
    agent_url: Annotated[str, AfterValidator(_agent_url)] | None = None
    """Address of the controller as pods of this cluster see it; by default that of `kubernetes`."""


class KubernetesConfig(Record):
    """The cluster that jobs run on: how it is reached, which labels of its nodes say what, and what runs in its pods.

    Without `kubeconfig` the platform runs in the cluster, and uses the service account of its pod. `zones` maps values
    of the labels for zone and region to zones of the platform. A node whose labels map to none is in no zone, so that
    what a label restricts does not run there.
    """

    kubeconfig: Path | None = None
    """Kubeconfig file of the cluster; without it, the service account of the platform's own pod."""
    context: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """Context of the kubeconfig; by default its current one."""
    prefix: Annotated[
        str,
        TextRule(
            "(?!(kube|openshift)(-|$))[a-z]([-a-z0-9]*[a-z0-9])?",
            "a-z, 0-9 and '-', and not kube or openshift, whose namespaces belong to the cluster",
            limit=20,
        ),
    ] = "falaj"
    """Beginning of the names of namespaces and cluster-wide objects; each platform on a cluster needs its own."""
    namespaces: Literal["create", "given"] = "create"
    """Who makes the namespaces of workspaces: the platform, or an administrator by `falaj clusters render`."""
    zones: dict[str, Name] = {}
    """Zones by the value of a node's label `topology.kubernetes.io/zone` or `topology.kubernetes.io/region`, like
    `me-central-1 = "local"`."""
    pool_label: LabelKey | None = None
    """Label of nodes whose value is their pool; see [Kubernetes](kubernetes.md)."""
    fabric_label: LabelKey | None = None
    """Label of nodes whose value names their InfiniBand or RoCE fabric."""
    rack_label: LabelKey | None = None
    """Label of nodes whose value names their rack; it becomes the label `rack-…`."""
    tolerate: tuple[LabelKey, ...] = ("nvidia.com/gpu",)
    """Keys of taints that jobs tolerate. A node with another taint that keeps pods off takes no jobs."""
    topology: tuple[LabelKey, ...] = ()
    """Labels that Kueue places gangs by, the widest first, like block, rack. Every node must have them."""
    image: str | None = None
    """Image of the pods of jobs, by digest if possible; Python and falaj are in it, see
    [build images](../howto/build-images.md)."""
    environments: dict[Name, PinnedImage] = {}
    """Images by the names under which jobs ask for them (`falaj train --environment NAME`), each by its digest."""
    images: tuple[Annotated[str, AfterValidator(_image_rule)], ...] = ()
    """Images that may run: `REPOSITORY@sha256:…`, or `REPOSITORY` for all of its images by digest. By default `image`
    and those of `environments`."""
    volumes: dict[Name, ClusterVolume] = {}
    """PersistentVolumeClaims by the names under which jobs ask for them; see [Kubernetes](kubernetes.md#volumes)."""
    scratch: ScratchConfig | None = None
    """Disk space of pods; by default that of their nodes, without a limit by the cluster."""
    egress: tuple[Annotated[str, AfterValidator(require_egress_addresses)], ...] = ()
    """Addresses that jobs with `--network` may reach, like `10.1.0.0/16` or `10.1.2.3:443`. By default none, and
    such jobs are refused."""
    store: tuple[Annotated[str, AfterValidator(require_egress_addresses)], ...] = ()
    """Addresses of the object store that pods may reach, like `10.1.2.3:443`: then checkpoints go straight there,
    encrypted in the pod. By default none, and they go through the platform."""
    objects: Literal["auto", "trainjob", "jobset", "job"] = "auto"
    """Objects that jobs become; auto: a TrainJob where Kubeflow Trainer is installed, else a JobSet, else a Job."""
    scheduler: Literal["falaj", "kueue"] = "falaj"
    """Who decides when and where jobs run: the platform, whose pods name their nodes, or Kueue."""
    waiting_limit: Annotated[int, Field(ge=1, le=1000)] = 20
    """Jobs of a queue and priority class that wait in Kueue at once, if it decides; the others wait in the platform."""
    sync_queues: bool = True
    """If Kueue decides, keep its objects as the queues say; else an operator does it (`falaj queues apply`)."""
    scale_up: Annotated[int, Field(ge=0, le=1000)] = 0
    """Placeholder pods at most by which waiting jobs ask an autoscaler for nodes, if the platform decides; 0: none."""
    agent: Annotated[str, AfterValidator(_address)] = "0.0.0.0:7482"
    """Address at which the controller listens for the pods of jobs, over TLS."""
    agent_url: Annotated[str, AfterValidator(_agent_url)] | None = None
    """The same address as pods see it, like `tls://falaj.example.com:7482`."""
    clusters: dict[ClusterName, ClusterConfig] = {}
    """Several clusters by name, each a pool; without them the settings above are those of the only one."""

    def each_cluster(self) -> dict[str | None, KubernetesConfig]:
        """Return the settings of every cluster by its name; the only one of a platform has none."""
        if not self.clusters:
            return {None: self}
        return {name: self._of(each) for name, each in self.clusters.items()}

    def _of(self, cluster: ClusterConfig) -> KubernetesConfig:
        own: dict[str, object] = {
            "kubeconfig": cluster.kubeconfig or self.kubeconfig,
            "context": cluster.context,
            "agent_url": cluster.agent_url or self.agent_url,
            "clusters": {},
        }
        return self.model_copy(update=own)

    @model_validator(mode="after")
    def _clusters_differ(self) -> KubernetesConfig:
        if not self.clusters:
            return self
        for name, wrong in (("context", self.context), ("pool_label", self.pool_label)):
            if wrong is not None:
                raise ValueError(
                    f"kubernetes.{name} is for one cluster; kubernetes.clusters names several pools"
                )
        if self.scheduler == "kueue":
            raise ValueError(
                'kubernetes.scheduler = "kueue" is for one cluster: with several the platform decides'
            )
        found: dict[tuple[Path | None, str | None], str] = {}
        for name, each in self.clusters.items():
            place = each.kubeconfig or self.kubeconfig, each.context
            if each.context is not None and place[0] is None:
                raise ValueError(
                    f"kubernetes.clusters.{name}.context names a context of a kubeconfig that is not set"
                )
            if place in found:
                raise ValueError(
                    f"kubernetes.clusters.{name} is the same cluster as {found[place]}: set its context"
                )
            found[place] = name
        return self

    @model_validator(mode="after")
    def _context_of_a_file(self) -> KubernetesConfig:
        if self.context is not None and self.kubeconfig is None:
            raise ValueError("kubernetes.context names a context of kubernetes.kubeconfig, which is not set")
        if self.scale_up and self.scheduler == "kueue":
            raise ValueError(
                "kubernetes.scale_up is for where the platform decides: pods of jobs wait in Kueue already"
            )
        if len(set(self.topology)) != len(self.topology):
            raise ValueError("kubernetes.topology names a label twice")
        return self

    @model_validator(mode="after")
    def _images_are_allowed(self) -> KubernetesConfig:
        named = {f"kubernetes.environments.{name}": image for name, image in self.environments.items()}
        for setting, image in {"kubernetes.image": self.image, **named}.items():
            if self.images and image is not None and not is_allowed(image, self.images):
                raise ValueError(f"{setting} {image} is not in kubernetes.images: {ALLOWED_RULE}")
        return self

    @property
    def agent_address(self) -> tuple[str, int]:
        return _host_and_port(self.agent)

    @property
    def agent_as_seen(self) -> tuple[str, int] | None:
        """The host and port of `agent_url`."""
        return None if self.agent_url is None else _host_and_port(self.agent_url.removeprefix("tls://"))


class EgressConfig(Record):
    """Where the platform may send requests of its own: those of webhooks, and traces. By default nowhere."""

    allow: tuple[Annotated[str, AfterValidator(require_egress_host)], ...] = ()
    """Hosts like `hooks.example.com` or `hooks.example.com:8443`. A private address needs its own entry, like
    `10.0.0.0/8`, also where an allowed name leads to it."""
    ca: Path | None = None
    """PEM file with certificates of further authorities, for hosts of your own."""


class TrackingConfig(Record):
    """Runs of experiments."""

    keep_deleted: Annotated[
        timedelta, BeforeValidator(_length), Field(ge=timedelta(0), le=timedelta(days=3650))
    ] = timedelta(days=30)
    """How long deleted experiments, runs and logged models can be restored, like 30d; then they are removed."""


class Config(Record):
    """The whole of falaj.toml."""

    server: ServerConfig = ServerConfig()
    console: ConsoleConfig = ConsoleConfig()
    serving: ServingConfig = ServingConfig()
    metadata: MetadataConfig = MetadataConfig()
    zones: Annotated[dict[Name, ZoneConfig], Field(min_length=1)] = {"local": ZoneConfig(jurisdiction="AE")}
    """Zones by name; by default one, `local`, in AE."""
    keys: Annotated[KeyFileConfig | Pkcs11Config, Field(discriminator="driver"), _driver("keyfile")] = (
        KeyFileConfig()
    )
    audit: AuditConfig = AuditConfig()
    policies: tuple[str, ...] = ()
    """Cedar files, relative to the home."""
    isolation: Literal["auto", "bubblewrap", "landlock", "uid", "same-uid", "none"] = "auto"
    """Sandbox of user code; auto takes the strongest that works, none runs jobs with the platform's own rights; see
    [security](../explanation/security.md)."""
    jobs: JobsConfig = JobsConfig()
    features: FeaturesConfig = FeaturesConfig()
    tracking: TrackingConfig = TrackingConfig()
    queue: QueueConfig = QueueConfig()
    prices: Prices | None = None
    """Prices for the accounting of usage; without them there is none of money."""
    node: NodeConfig = NodeConfig()
    egress: EgressConfig = EgressConfig()
    kubernetes: KubernetesConfig | None = None
    """The Kubernetes cluster of this platform; see [Kubernetes](kubernetes.md)."""

    @model_validator(mode="after")
    def _traces_may_leave(self) -> Config:
        url = self.serving.tracing.endpoint
        if url is not None and not is_listed(url, [read_egress_host(each) for each in self.egress.allow]):
            host = urlsplit(url).netloc.rpartition("@")[2]
            raise ValueError(
                f'serving.tracing.endpoint: {host} is not in egress.allow; fix: [egress] allow = ["{host}"]'
            )
        return self

    @property
    def tls_of_serving(self) -> Tls | None:
        return self.serving.tls or self.server.tls

    @property
    def tls_of_console(self) -> Tls | None:
        return self.console.tls or self.server.tls

    @property
    def kubernetes_of_jobs(self) -> KubernetesConfig | None:
        """The cluster, or the clusters, whose pods jobs run in; none if they run on this machine."""
        return self.kubernetes if self.jobs.launcher == "kubernetes" else None

    @property
    def kueue_waiting_limit(self) -> int | None:
        """How many jobs of a queue wait in Kueue at once; none unless Kueue decides."""
        there = self.kubernetes_of_jobs
        return there.waiting_limit if there is not None and there.scheduler == "kueue" else None

    @property
    def can_grow(self) -> bool:
        """Whether autoscalers of clusters are asked for nodes."""
        there = self.kubernetes_of_jobs
        return there is not None and there.scale_up > 0

    @property
    def keeps_kueue(self) -> bool:
        """Whether the controller keeps the objects of Kueue as the queues say."""
        there = self.kubernetes_of_jobs
        return there is not None and there.scheduler == "kueue" and there.sync_queues

    @property
    def machine_zone(self) -> str | None:
        """The zone that this machine is in; none if there are several and it names none of them."""
        return self.node.zone or (next(iter(self.zones)) if len(self.zones) == 1 else None)

    @property
    def default_zone(self) -> str:
        """The zone in which bytes lie unless another is named."""
        return next((name for name, zone in self.zones.items() if zone.default), next(iter(self.zones)))

    @model_validator(mode="after")
    def _pods_have_an_image_and_an_address(self) -> Config:
        there = self.kubernetes
        if self.jobs.launcher == "kubernetes" and (
            there is None or there.image is None or there.agent_url is None
        ):
            raise ValueError(
                'jobs.launcher = "kubernetes" needs kubernetes.image and kubernetes.agent_url: what runs in pods, and '
                "where they find the platform"
            )
        return self

    @model_validator(mode="after")
    def _serving_has_tls_beyond_loopback(self) -> Config:
        if self.tls_of_serving is None and not is_loopback(self.serving.bind):
            raise ValueError(
                f"serving.bind {self.serving.bind} without TLS is refused; set serving.tls, or bind to 127.0.0.1"
            )
        return self

    @model_validator(mode="after")
    def _console_has_tls_beyond_loopback(self) -> Config:
        if self.tls_of_console is None and not is_loopback(self.console.bind):
            raise ValueError(
                f"console.bind {self.console.bind} without TLS is refused; set console.tls, or bind to 127.0.0.1"
            )
        return self

    @model_validator(mode="after")
    def _zones_are_known(self) -> Config:
        if self.node.zone is not None and self.node.zone not in self.zones:
            raise ValueError(f"node.zone {self.node.zone} is none of the zones {', '.join(self.zones)}")
        for value, zone_name in ({} if self.kubernetes is None else self.kubernetes.zones).items():
            if zone_name not in self.zones:
                raise ValueError(
                    f"kubernetes.zones maps {value} to {zone_name}, which is none of the zones {', '.join(self.zones)}"
                )
        volumes = {f"jobs.volumes.{name}": each.zone for name, each in self.jobs.volumes.items()}
        if self.kubernetes is not None:
            of_claims = self.kubernetes.volumes.items()
            volumes |= {f"kubernetes.volumes.{name}": each.zone for name, each in of_claims}
        for setting, named in volumes.items():
            if named not in ({*self.zones} if len(self.zones) > 1 else {*self.zones, None}):
                given = "names no zone" if named is None else f"is in zone {named}"
                raise ValueError(f"{setting} {given}; set its zone to one of {', '.join(self.zones)}")
        for cluster, each in ({} if self.kubernetes is None else self.kubernetes.clusters).items():
            if each.zone is not None and each.zone not in self.zones:
                raise ValueError(
                    f"kubernetes.clusters.{cluster}.zone {each.zone} is none of the zones {', '.join(self.zones)}"
                )
            if each.prices is not None and self.prices is None:
                raise ValueError(f"kubernetes.clusters.{cluster}.prices needs prices.currency")
        for name, zone in self.zones.items():
            if name == UNKNOWN.name or zone.jurisdiction == UNKNOWN.jurisdiction:
                raise ValueError(f"zone {name}: {UNKNOWN.name} and {UNKNOWN.jurisdiction} mean no zone")
        return self

    @model_validator(mode="after")
    def _networks_are_apart(self) -> Config:
        named = [(net, name) for name, zone in self.zones.items() for net in zone.networks]
        for number, (net, name) in enumerate(named):
            for other, of in named[:number]:
                if of != name and net.version == other.version and net == other:
                    raise ValueError(f"{net} is in both zones {of} and {name}")
        return self

    @model_validator(mode="after")
    def _one_default_zone(self) -> Config:
        chosen = [name for name, zone in self.zones.items() if zone.default]
        if len(chosen) > 1:
            raise ValueError(f"zones {', '.join(chosen)} are all marked default; only one can be")
        return self
