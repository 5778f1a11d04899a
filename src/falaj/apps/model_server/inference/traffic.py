"""Which version answers a request: by path, header, sticky key or weight; and by the fallback if that one fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from falaj.apps.model_server.http.exchange import InferenceExchange
from falaj.apps.model_server.inference.protocol import (
    InferRequest,
    InputTensor,
    encode_parameters,
    read_values,
)
from falaj.errors import DeadlineExceeded, FalajError, Fault, NotFound, Unavailable, shorten
from falaj.records.serving.tensors import Datatype
from falaj.serving.deployment_state import ServedEndpoint
from falaj.serving.signatures import invalid_request

if TYPE_CHECKING:
    from falaj.apps.model_server.inference.prediction import Prediction

VERSION_HEADER, KEY_HEADER = b"falaj-version", b"falaj-key"
"""Headers that name the version, and the key that decides about the version."""
MAX_KEY_CHARACTERS = 1024
MAX_KEY_ROWS = 10_000
"""Rows whose sticky keys are compared."""
MAX_PARSED_AGAIN = 256 * 1024
"""Bytes of a body that is parsed again for a fallback with other inputs; it happens on the event loop."""


def named_version(
    served: ServedEndpoint, path_version: str | None, exchange: InferenceExchange
) -> str | None:
    """Return the version that the path or the header of a request names, if any.

    Raise NotFound unless it is routed, also with weight 0; a shadow never answers.
    """
    header = exchange.header(VERSION_HEADER)
    if header is None:
        return path_version
    version = header.decode("latin-1").strip()
    if path_version is not None and version != path_version:
        fault = Fault(
            where="Falaj-Version", given=shorten(version), allowed=f"{path_version}, as in the path"
        )
        raise invalid_request([fault])
    if version not in served.answering:
        allowed = ", ".join(served.answering)
        raise NotFound(
            f"Falaj-Version: given '{shorten(version)}', allowed a routed version of {served.endpoint.name}: {allowed}"
        )
    return version


def sticky_key(served: ServedEndpoint, request: InferRequest, exchange: InferenceExchange) -> str:
    """Return the key that decides about the version; empty if the request has none.

    A request without the key that the operator named is divided by its id, and without an id by turns.
    """
    sticky = served.endpoint.sticky
    if sticky is None or sticky == "request":
        return request.id
    source, _, name = sticky.partition(":")
    if source == "header":
        header = exchange.header(KEY_HEADER)
        key = "" if header is None else header.decode("utf-8", "replace").strip()
    elif source == "parameter":
        value = (request.parameters or {}).get(name)
        key = "" if value is None else _plain(value)
    else:
        key = _input_key(request, name)
    if len(key) > MAX_KEY_CHARACTERS:
        given, allowed = f"{len(key)} characters", f"at most {MAX_KEY_CHARACTERS}"
        raise invalid_request([Fault(where=f"the key ({sticky})", given=given, allowed=allowed)])
    return key or request.id


def _input_key(request: InferRequest, name: str) -> str:
    """Return the one value of an input. Raise InvalidInput if its rows have several: they need the same version."""
    for tensor in request.inputs:
        if tensor.name == name:
            values = _values(tensor)
            if len(values) > 1:
                shown = ", ".join(shorten(value) for value in sorted(values)[:3])
                raise invalid_request(
                    [
                        Fault(
                            where=f"input '{shorten(name)}'",
                            given=f"several keys: {shown}",
                            allowed="one, because the key decides about the version of the whole request",
                            fix="send a request for each key",
                        )
                    ]
                )
            return values.pop() if values else ""
    return ""


def _values(tensor: InputTensor) -> set[str]:
    count = 1
    for size in tensor.shape:
        count *= size
    if not 0 < count <= MAX_KEY_ROWS:
        given, allowed = f"{count} values", f"1 to {MAX_KEY_ROWS}, because it is the sticky key"
        raise invalid_request([Fault(where=f"input '{shorten(tensor.name)}'", given=given, allowed=allowed)])
    try:
        found = read_values(tensor, Datatype(tensor.datatype), count).ravel().tolist()
    except (ValueError, OverflowError) as error:
        raise invalid_request(
            [Fault(where=f"input '{shorten(tensor.name)}'", given=shorten(str(error)), allowed="one key")]
        ) from None
    return {_plain(value) for value in found}


def _plain(value: object) -> str:
    """Return a key as text: 7, 7.0 and "7" are the same key, whatever the type that a client sends."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


# ----------------------------------------------------------------------------------------------- fallback


class Fallback:
    """Has the fallback of an endpoint answer a request whose version has failed."""

    __slots__ = ("_again", "_served")

    def __init__(self, served: ServedEndpoint, again: Callable[[str], Prediction]) -> None:
        """`again` parses the request for another version."""
        self._served = served
        self._again = again

    def takes(self, failed: Prediction, error: FalajError) -> bool:
        """Queue the request for the fallback; false if that cannot take it either, and the error stands."""
        version = self._served.fallback
        if version in (None, failed.queue.model.version) or isinstance(error, DeadlineExceeded):
            return False
        notes = encode_parameters(
            {"fallback_from": failed.queue.model.version, "fallback_reason": error.code}
        )
        try:
            other = self._for(failed, version)
            other.add_notes(notes)
            failed.exchange.queued = other
            other.queue.submit(other)
        except FalajError:
            failed.exchange.queued = failed
            return False
        return True

    def _for(self, failed: Prediction, version: str) -> Prediction:
        """Return the request for another version: with the same arrays if it has the same inputs and outputs."""
        served, chosen = self._served, failed.queue.model
        other = served.queues[version].model
        is_alike = (chosen.inputs, chosen.outputs) == (other.inputs, other.outputs)
        if is_alike and served.joins.get(chosen.version) == served.joins.get(version):
            return failed.for_version(served.queues[version])
        if failed.exchange.size > MAX_PARSED_AGAIN:
            raise Unavailable(
                f"the body is too large to be parsed again for {version}, which has other inputs"
            )
        return self._again(version)
