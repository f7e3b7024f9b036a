"""The cases of the compatibility table, and how they are tried."""
