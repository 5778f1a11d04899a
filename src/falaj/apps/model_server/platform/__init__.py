"""The server's side of the platform: admission, deployments, the prediction log and reports."""
