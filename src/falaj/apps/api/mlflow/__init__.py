"""MLflow's REST API: each of its routes performs one operation, so that policy, audit and lineage hold there too."""
