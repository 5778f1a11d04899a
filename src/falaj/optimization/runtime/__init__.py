"""The parts that import ONNX, ONNX Runtime, torch, scikit-learn and XGBoost; loaded by jobs and user code only."""
