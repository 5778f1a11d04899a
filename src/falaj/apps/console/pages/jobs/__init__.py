"""Jobs: the table with the last day on the machines, and one job."""
