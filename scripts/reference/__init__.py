"""The reference pages, one module for each: a function that returns the text of a page."""
