"""Gates of aliases: what a version must meet before it is approved or promoted."""
