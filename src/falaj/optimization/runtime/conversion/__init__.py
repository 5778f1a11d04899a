"""Converters from torch, scikit-learn and XGBoost to ONNX."""
