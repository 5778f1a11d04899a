"""Server reflection: tells clients like grpcurl which services and messages there are."""

from __future__ import annotations

from typing import Any

from falaj.apps.model_server.grpc.messages import FILES, POOL, message_class
from falaj.apps.model_server.grpc.statuses import StatusCode
from falaj.apps.model_server.grpc.tensors import parse_message

SERVICES = {
    f"{package}.ServerReflection": package for package in ("grpc.reflection.v1", "grpc.reflection.v1alpha")
}


def reflect(package: str, data: bytes) -> bytes:
    """Return the answer to one request of reflection. Raise InvalidInput if it is not one."""
    asked = parse_message(message_class(f"{package}.ServerReflectionRequest"), data)
    answer = message_class(f"{package}.ServerReflectionResponse")(
        valid_host=asked.host, original_request=asked
    )
    kind = asked.WhichOneof("message_request")
    if kind == "list_services":
        for file in FILES.values():
            for service in file.service:
                answer.list_services_response.service.add(name=f"{file.package}.{service.name}")
    elif kind == "file_by_filename":
        _add_file(answer, asked.file_by_filename)
    elif kind == "file_containing_symbol":
        _add_file(answer, _file_of(asked.file_containing_symbol))
    elif kind == "all_extension_numbers_of_type":
        answer.all_extension_numbers_response.base_type_name = asked.all_extension_numbers_of_type
    else:
        _add_file(answer, "")
    found: bytes = answer.SerializeToString()
    return found


def _add_file(answer: Any, name: str) -> None:
    file = FILES.get(name)
    if file is not None:
        answer.file_descriptor_response.file_descriptor_proto.append(file.SerializeToString())
    else:
        answer.error_response.error_code = StatusCode.NOT_FOUND
        answer.error_response.error_message = "there is no such file or symbol"


def _file_of(symbol: str) -> str:
    """Return the name of the file that has a service, a method, a message or a field."""
    while symbol:
        try:
            return str(POOL.FindFileContainingSymbol(symbol).name)
        except KeyError:
            symbol = symbol.rpartition(".")[0]
    return ""
