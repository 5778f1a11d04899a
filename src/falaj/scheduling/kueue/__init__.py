"""The queues as objects of Kueue, which then decides on a cluster: rendering, drift, and its repair."""
