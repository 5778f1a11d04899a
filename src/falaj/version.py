"""The version of Falaj."""

VERSION = "0.1.0"
