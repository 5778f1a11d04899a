"""What a run logs beside numbers: figures, images and tables as files, and the load of the machine."""
