"""The peer grpc.aio: the same ONNX session behind ModelInfer, on uvloop; messages are those of MLServer."""

from __future__ import annotations

import asyncio
import sys

import grpc
import numpy as np
import onnxruntime as ort
import uvloop
from mlserver.grpc import dataplane_pb2 as pb
from mlserver.grpc import dataplane_pb2_grpc


class OnnxService(dataplane_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, model: str) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    async def ServerReady(self, _request: object, _context: object) -> object:  # noqa: N802
        return pb.ServerReadyResponse(ready=True)

    async def ModelInfer(self, request: pb.ModelInferRequest, _context: object) -> object:  # noqa: N802
        shape = tuple(request.inputs[0].shape)
        rows = np.frombuffer(request.raw_input_contents[0], np.float32).reshape(shape)
        (scores,) = self._session.run(None, {"x": rows})
        answer = pb.ModelInferResponse(model_name=request.model_name, model_version="1")
        answer.outputs.add(name="y", datatype="FP32", shape=scores.shape)
        answer.raw_output_contents.append(scores.tobytes())
        return answer


async def main(model: str, port: int) -> None:
    server = grpc.aio.server()
    dataplane_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(OnnxService(model), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # until the parent ends
    await server.stop(0)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2])))
