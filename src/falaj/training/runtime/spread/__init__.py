"""How a model lies on the processes that train it, and how their gradients become one."""
