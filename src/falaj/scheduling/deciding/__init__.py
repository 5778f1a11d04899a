"""Who starts, who waits and who makes room, and why: pure functions over a snapshot."""
