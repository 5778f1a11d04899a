"""One training step: micro-batches, gradients, optimizer, random numbers and CUDA graphs."""
