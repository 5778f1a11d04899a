"""Variants of a model: made by recipe, measured on the host they are for, accepted or refused with the reason."""
