"""The record of losses by chunks of rows, whose many rules are loaded where they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import fx

from hybridremat.graph.rewrites.rewrite import Joint, Rewrite


def _products(joint: Joint) -> Sequence[fx.Node]:
    from hybridremat.graph.rewrites.loss_chunks import products_of

    return products_of(joint)


def _make_by_chunks(joint: Joint, products: Sequence[fx.Node]) -> None:
    from hybridremat.graph.rewrites.loss_chunks import make_by_chunks

    make_by_chunks(joint, products)


LOSS_BY_CHUNKS: Final = Rewrite(
    name="a loss by chunks of rows", exact=False, find=_products, write=_make_by_chunks
)
