"""Data in Arrow's form, tables and files of Parquet, as tensors. pyarrow is imported here, and only on first use."""
