"""What touches ONNX, ONNX Runtime, torch, scikit-learn and XGBoost; only jobs and users' own code load it."""
