"""Pages of features: the catalogue, one view, and training sets."""
