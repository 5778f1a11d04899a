"""The fastest safe way to run a model on this hardware: candidates, tried and compared with plain fp32."""
