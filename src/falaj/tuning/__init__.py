"""Search for hyperparameters: studies, their trials, and the process in which Optuna samples and prunes."""
