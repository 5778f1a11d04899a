"""The peer for a slow model: FastAPI, uvicorn and orjson, with one thread per core for the ONNX session."""

from __future__ import annotations

import asyncio
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import orjson
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi_server import session

app = FastAPI()
pool = ThreadPoolExecutor(os.cpu_count())


@app.get("/v2/health/ready")
async def ready() -> dict[str, bool]:
    return {"ready": True}


@app.post("/v2/models/a/infer")
async def infer(request: Request) -> Response:
    given: dict[str, Any] = orjson.loads(await request.body())
    tensor = given["inputs"][0]
    rows = np.array(tensor["data"], np.float32).reshape(tensor["shape"])
    loop = asyncio.get_running_loop()
    (scores,) = await loop.run_in_executor(pool, app.state.session.run, None, {"x": rows})
    output = {"name": "y", "datatype": "FP32", "shape": scores.shape, "data": scores.ravel().tolist()}
    answer = {"model_name": "a", "model_version": "1", "outputs": [output]}
    return Response(orjson.dumps(answer), media_type="application/json")


if __name__ == "__main__":
    app.state.session = session(sys.argv[1])
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning", access_log=False)
