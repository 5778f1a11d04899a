"""Where a job goes on the nodes, so that little of them becomes unusable."""
