"""``plain``: nothing is recomputed. All that the backward reads is saved, as PyTorch does it.

Of least time, and of the most memory that is of any use.
"""

from __future__ import annotations

from typing import Final

from hybridremat.sequence.strategies.strategy import Strategy, fastest_option

PLAIN: Final = Strategy("plain", fastest_option, lambda _: ())
