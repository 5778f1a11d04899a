"""Find pickles, also within archives, without loading them."""
