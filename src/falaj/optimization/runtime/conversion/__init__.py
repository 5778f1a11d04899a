"""Converters from torch, scikit-learn, XGBoost and CatBoost to ONNX."""
