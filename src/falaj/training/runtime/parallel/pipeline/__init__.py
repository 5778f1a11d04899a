"""Pipeline parallelism: stages of consecutive layers in different processes that work on different micro-batches."""
