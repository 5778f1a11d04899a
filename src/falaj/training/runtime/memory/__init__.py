"""How much memory a training step takes, found without computing it, and what that means for several processes."""
