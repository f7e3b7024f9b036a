"""Short names of ops: what tables show and policies match."""

from __future__ import annotations


def short_op(op: str) -> str:
    """``layer_norm`` for ``aten.native_layer_norm.default``."""
    parts = op.split(".")
    name = (parts[1] if len(parts) > 1 else op).lstrip("_").removeprefix("native_")
    return name.removeprefix("scaled_dot_product_").removesuffix("_for_cpu").removesuffix("_legit_functional")
