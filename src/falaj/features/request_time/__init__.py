"""Request-time features: values that an expression computes, in training sets and in endpoints, to the same bit."""
