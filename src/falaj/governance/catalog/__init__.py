"""The catalog: any stored object, its owner and its label."""
