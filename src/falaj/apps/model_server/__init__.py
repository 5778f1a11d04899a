"""The model server: the Open Inference Protocol over HTTP, on a bare protocol for speed."""
