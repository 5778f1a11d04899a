"""The model server: the Open Inference Protocol over HTTP/1.1, on asyncio protocols for speed."""
