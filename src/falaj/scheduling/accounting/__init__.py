"""What jobs have used, what it cost, and what is left: the books of the queue."""
