"""The pages, one a file; each module has its `PAGE`, or several as `PAGES`."""
