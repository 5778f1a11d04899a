"""The messages of the services, made from their schemas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pool, message_factory

from falaj.apps.model_server.grpc.schema import read_schema

_FOLDER = Path(__file__).with_name("protos")

FILES = {
    file.name: file
    for file in (
        read_schema(_FOLDER / "inference.proto"),
        read_schema(_FOLDER / "health.proto"),
        read_schema(_FOLDER / "reflection.proto"),
        read_schema(_FOLDER / "reflection.proto", package="grpc.reflection.v1alpha"),
    )
}
"""Descriptors of the schemas by file name."""

POOL = descriptor_pool.DescriptorPool()
"""A pool of our own: that of the process may have these messages from a client library."""
for _file in FILES.values():
    POOL.AddSerializedFile(_file.SerializeToString())


def message_class(name: str) -> Any:
    """Return the class of a message by its full name."""
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(name))


ModelInferRequest = message_class("inference.ModelInferRequest")
ModelStreamInferResponse = message_class("inference.ModelStreamInferResponse")
HealthCheckResponse = message_class("grpc.health.v1.HealthCheckResponse")
