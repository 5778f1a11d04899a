"""The search for the fastest way to run a model on this hardware with the numerics of plain fp32."""
