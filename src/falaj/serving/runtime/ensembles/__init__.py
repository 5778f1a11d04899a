"""Run ensembles: their steps in order, beside each other where it pays, each with its own counts."""
