"""The local machine as a node: the CPUs, memory, GPUs and RDMA ports that the platform may use."""
