"""Model execution: engines, batch queues and cost probing; the only part of serving that imports ONNX Runtime."""
