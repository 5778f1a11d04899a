"""Environment variables that switch off the usage reporting of other libraries.

`falaj/__init__.py` sets them for the platform's own processes before anything else is imported, and the launcher for
jobs. A value that the operator or the job has set wins.
"""

from __future__ import annotations

from typing import Final

NO_TELEMETRY: Final = {
    "ORT_DISABLE_TELEMETRY": "1",  # onnxruntime: on by default, and only this stops it before the first session
    "DO_NOT_TRACK": "1",  # huggingface_hub, gradio and others that follow the convention
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "RAY_USAGE_STATS_ENABLED": "0",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "VLLM_NO_USAGE_STATS": "1",
    "FEAST_USAGE": "False",
    "SCARF_NO_ANALYTICS": "true",  # airflow and others
    "AZURE_CORE_COLLECT_TELEMETRY": "0",
    "STREAMLIT_BROWSER_GATHER_USAGE_STATS": "false",
    "ANONYMIZED_TELEMETRY": "False",  # chromadb
}
