"""Records of monitoring: sketches, drift reports, monitors and alerts."""
