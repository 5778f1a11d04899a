"""Read files of models without loading them: what each format holds, and whether a reader would run code of it."""
