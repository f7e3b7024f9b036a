"""The version, apart from the package's face: what records it in a file stands below that."""

__version__ = "0.1.0"
