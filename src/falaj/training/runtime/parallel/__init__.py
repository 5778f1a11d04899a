"""Parallel training strategies: data parallel (ddp), sharded (fsdp), tensor parallel and pipeline."""
