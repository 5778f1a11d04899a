"""Model cards, bills of materials and differences, all made from the facts of versions."""
