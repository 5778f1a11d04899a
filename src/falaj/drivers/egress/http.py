"""Outgoing HTTPS requests by an allow-list of hosts, ports and networks."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from falaj.drivers.egress.connections import KeptConnections, PinnedConnection, describe_failure
from falaj.errors import InvalidInput
from falaj.ports.egress import Admit, DeliveryFailed
from falaj.records.governance.egress import read_egress_host

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

DEADLINE_S = 10.0
"""Time for a whole request, from the connection to the end of the answer's head."""
MOST_CONNECTIONS = 16
PORTS = {"https": 443, "http": 80}
NOT_PUBLIC = [
    ipaddress.ip_network(each)
    for each in (
        # these lead to an IPv4 address inside them
        *("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "::/96", "::ffff:0:0:0/96"),
        # these are local, or nobody's
        *("fec0::/10", "3fff::/20", "5f00::/16", "192.0.0.0/24", "192.88.99.0/24"),
    )
]
"""Networks that Python takes for public ones."""


class HttpEgress:
    """Sends requests to the hosts in `allow`; to a private address only if its network is listed there too.

    `ca` is a PEM file with the certificates of further authorities.
    """

    def __init__(self, allow: Sequence[str], *, ca: Path | None = None) -> None:
        rules = [read_egress_host(each) for each in allow]
        self._names = {(rule.host, rule.port) for rule in rules if rule.network is None}
        self._networks = [(rule.network, rule.port) for rule in rules if rule.network is not None]
        self._ca = ca

    def require(self, url: str) -> None:
        target = _split(url)
        host, port = _host(target), _port(target)
        if not self._is_listed(host, port):
            where = host if port == PORTS[target.scheme] else f"{host}:{port}"
            raise InvalidInput.at(
                "url",
                given=where,
                allowed="a host in egress.allow of falaj.toml; nothing leaves this host otherwise",
                fix=f'ask the operator for:  [egress]  allow = ["{where}"]',
            )

    def post(self, url: str, *, headers: Mapping[str, str], body: bytes, admit: Admit) -> int:
        with self._exchange("POST", url, headers, body, DEADLINE_S, admit) as answer:
            return answer.status

    def connect(
        self, url: str, *, headers: Mapping[str, str], ca: Path | None = None, most: int = MOST_CONNECTIONS
    ) -> KeptConnections:
        self.require(url)
        target = _split(url)
        host, port = _host(target), _port(target)
        tls = self._context(ca) if target.scheme == "https" else None

        def open_connection(within_s: float) -> PinnedConnection:
            address = self._resolve(host, port, secure=tls is not None)
            return PinnedConnection(host, port, str(address), tls, within_s)

        return KeptConnections(open_connection, path=target.path.rstrip("/"), headers=headers, most=most)

    @contextmanager
    def _exchange(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes, within_s: float, admit: Admit
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request; the answer can be read inside, until the time is over."""
        try:
            self.require(url)
        except InvalidInput as error:
            raise DeliveryFailed(error.faults[0].allowed or error.message) from None
        target = _split(url)
        host, port = _host(target), _port(target)
        address = self._resolve(host, port, secure=target.scheme == "https")
        admit(str(address))
        tls = self._context() if target.scheme == "https" else None
        connection = PinnedConnection(host, port, str(address), tls, within_s)
        overdue = threading.Timer(within_s, connection.abort)
        overdue.daemon = True
        overdue.start()
        try:
            path = (target.path or "/") + (f"?{target.query}" if target.query else "")
            connection.request(method, path, body=body, headers=dict(headers))
            yield connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise DeliveryFailed(describe_failure(error, host, port, within_s)) from None
        finally:
            overdue.cancel()
            connection.close()

    def _resolve(self, host: str, port: int, *, secure: bool) -> Address:
        """Return the address of `host` that the request goes to: the first one that is allowed."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise DeliveryFailed(f"the name {host} cannot be resolved: {error.strerror}") from None
        addresses = [ipaddress.ip_address(entry[4][0].partition("%")[0]) for entry in found]  # type: ignore[union-attr]
        fitting = [each for each in map(_plain, addresses) if self._is_reachable(each, port)]
        if not fitting:
            shown = ", ".join(str(each) for each in dict.fromkeys(addresses))
            raise DeliveryFailed(f"{host} is {shown}, a private address that egress.allow does not list")
        if not secure and not fitting[0].is_loopback:
            raise DeliveryFailed("http is allowed to this machine only; use https")
        return fitting[0]

    def _is_listed(self, host: str, port: int) -> bool:
        if (host, None) in self._names or (host, port) in self._names:
            return True
        try:
            return self._is_in_networks(_plain(ipaddress.ip_address(host)), port)
        except ValueError:
            return False

    def _is_reachable(self, address: Address, port: int) -> bool:
        public = address.is_global and not any(address in network for network in NOT_PUBLIC)
        return public or self._is_in_networks(address, port)

    def _is_in_networks(self, address: Address, port: int) -> bool:
        return any(address in network and only in (None, port) for network, only in self._networks)

    def _context(self, ca: Path | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context()
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        for file in filter(None, (self._ca, ca)):
            try:
                context.load_verify_locations(file)
            except OSError as error:  # also what is no certificate
                allowed = f"a readable PEM file with certificates ({error.strerror or error})"
                raise InvalidInput.at("ca", given=str(file), allowed=allowed) from None
        return context


def _split(url: str) -> SplitResult:
    try:
        target = urlsplit(url)
        _ = target.port
    except ValueError as error:
        raise InvalidInput.at("url", given="a URL that cannot be read", allowed=str(error)) from None
    rule = "https://HOST[:PORT]/PATH, without a user, a password or a fragment; http to this machine only"
    plain = url.isascii() and url.isprintable() and " " not in url
    if (
        target.scheme not in PORTS
        or not target.hostname
        or "@" in target.netloc
        or target.fragment
        or not plain
    ):
        raise InvalidInput.at("url", given=f"{target.scheme or '(none)'}://…", allowed=rule)
    return target


def _host(target: SplitResult) -> str:
    return (target.hostname or "").rstrip(".").lower()


def _port(target: SplitResult) -> int:
    return target.port or PORTS[target.scheme]


def _plain(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 one stands for, or the address itself."""
    return getattr(address, "ipv4_mapped", None) or address
