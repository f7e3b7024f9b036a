"""Limits as people write them: what is read, what is refused, and in which words."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridremat.errors import HybridRematError, LimitError
from hybridremat.units import (
    format_bytes,
    format_overhead_up,
    format_share_up,
    parse_bytes,
    parse_overhead,
    resolve_limit,
)

SIZES = 'bytes as a whole number (6442450944) or a size ("6GiB", "512 MiB", "1.5GB")'
LIMITS = f'{SIZES}, or a share of the plain step\'s memory ("40%")'
OVERHEADS = 'a fraction of the plain step\'s time that is zero or more (0.1), or a percentage ("10%")'


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (6442450944, 6442450944),
        (0, 0),
        (np.int64(4096), 4096),
        ("6442450944", 6442450944),
        ("6_442_450_944", 6442450944),
        ("6GiB", 6 * 2**30),
        ("512 MiB", 512 * 2**20),
        (" 512mib ", 512 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("300MB", 300_000_000),
        ("1kB", 1000),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("2TB", 2 * 10**12),
        ("0.5 TiB", 2**39),
        (".5KiB", 512),
        ("12 B", 12),
        ("12 bytes", 12),
        ("0.0001KiB", 0),
        ("1.0000005MB", 1_000_000),
    ],
)
def test_sizes_that_are_read(size, expected):
    result = parse_bytes(size)
    assert result == expected
    assert type(result) is int


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (0.4, f'memory_limit=0.4 cannot be read: did you mean "40%"? Give {LIMITS}.'),
        (1.0, f'memory_limit=1.0 cannot be read: did you mean "100%"? Give {LIMITS}.'),
        ("0.4", f"memory_limit='0.4' cannot be read: did you mean \"40%\"? Give {LIMITS}."),
        (6e9, f"memory_limit=6000000000.0 cannot be read: did you mean 6000000000? Give {LIMITS}."),
        (2.5, f"memory_limit=2.5 cannot be read. Give {LIMITS}."),
        (math.nan, f"memory_limit=nan cannot be read. Give {LIMITS}."),
        (math.inf, f"memory_limit=inf cannot be read. Give {LIMITS}."),
        (True, f"memory_limit=True cannot be read. Give {LIMITS}."),
        (None, f"memory_limit=None cannot be read. Give {LIMITS}."),
        (b"6GiB", f"memory_limit=b'6GiB' cannot be read. Give {LIMITS}."),
        (-5, f"memory_limit=-5 is negative: give {LIMITS}."),
        ("-5MiB", f"memory_limit='-5MiB' cannot be read: it is negative. Give {LIMITS}."),
        ("-5%", f"memory_limit='-5%' cannot be read: it is negative. Give {LIMITS}."),
        (0, f"memory_limit=0 leaves no memory at all: no step runs in that. Give {LIMITS}."),
        ("0%", f"memory_limit='0%' leaves no memory at all: no step runs in that. Give {LIMITS}."),
        ("0GiB", f"memory_limit='0GiB' leaves no memory at all: no step runs in that. Give {LIMITS}."),
        ("", f"memory_limit='' cannot be read. Give {LIMITS}."),
        ("nan%", f"memory_limit='nan%' cannot be read. Give {LIMITS}."),
        ("half", f"memory_limit='half' cannot be read. Give {LIMITS}."),
        ("6GiB/2", f"memory_limit='6GiB/2' cannot be read. Give {LIMITS}."),
        ("6 parsecs", f"memory_limit='6 parsecs' cannot be read. Give {LIMITS}."),
        ("12.5 B", f"memory_limit='12.5 B' cannot be read. Give {LIMITS}."),
        ("1__0", f"memory_limit='1__0' cannot be read. Give {LIMITS}."),
        (
            "6G",
            'memory_limit=\'6G\' cannot be read: did you mean "6GiB" (powers of 1024) or "6GB" (of 1000)? '
            f"Give {LIMITS}.",
        ),
    ],
)
def test_limits_that_are_refused(limit, message):
    with pytest.raises(LimitError) as caught:
        resolve_limit(limit, 1000)
    assert str(caught.value) == message
    assert isinstance(caught.value, HybridRematError)
    assert isinstance(caught.value, ValueError)


def test_a_size_names_its_argument_and_takes_no_percentage():
    with pytest.raises(LimitError) as caught:
        parse_bytes("40%", name="reserve")
    assert str(caught.value) == f"reserve='40%' cannot be read. Give {SIZES}."


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("40%", 400), ("40 %", 400), ("33.35%", 333), ("100%", 1000), ("250%", 2500), (77, 77), ("1KiB", 1024)],
)
def test_limits_that_are_read(limit, expected):
    assert resolve_limit(limit, 1000) == expected


@pytest.mark.parametrize(
    ("overhead", "expected"),
    [(0.1, 0.1), (0, 0.0), (2, 2.0), ("10%", 0.1), ("0%", 0.0), ("2.5 %", 0.025), ("150%", 1.5)],
)
def test_overheads_that_are_read(overhead, expected):
    result = parse_overhead(overhead)
    assert result == expected
    assert type(result) is float


@pytest.mark.parametrize(
    ("overhead", "message"),
    [
        (-0.1, f"max_overhead=-0.1 is out of range: give {OVERHEADS}."),
        (math.nan, f"max_overhead=nan is out of range: give {OVERHEADS}."),
        (math.inf, f"max_overhead=inf is out of range: give {OVERHEADS}."),
        (True, f"max_overhead=True cannot be read. Give {OVERHEADS}."),
        (None, f"max_overhead=None cannot be read. Give {OVERHEADS}."),
        ("0.1", f"max_overhead='0.1' cannot be read: did you mean \"10%\"? Give {OVERHEADS}."),
        ("-10%", f"max_overhead='-10%' cannot be read. Give {OVERHEADS}."),
        ("ten", f"max_overhead='ten' cannot be read. Give {OVERHEADS}."),
    ],
)
def test_overheads_that_are_refused(overhead, message):
    with pytest.raises(LimitError) as caught:
        parse_overhead(overhead)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (228_798_616, "218.2 MiB"),
        (6 * 2**30, "6.00 GiB"),
        (2**30 - 1, "1.00 GiB"),
        (10 * 2**20 - 1, "10.0 MiB"),
        (2**60, "1048576.0 TiB"),
        (-1536, "-1.50 KiB"),
    ],
)
def test_bytes_for_people(size, text):
    assert format_bytes(size) == text


@given(st.integers(min_value=0, max_value=2**55))
def test_what_is_printed_reads_back_within_its_precision(size):
    assert abs(parse_bytes(format_bytes(size)) - size) <= 0.005 * size + 1


@given(st.integers(min_value=0, max_value=10**25))
def test_integers_read_back_exactly(size):
    assert parse_bytes(size) == parse_bytes(str(size)) == parse_bytes(f"{size} B") == size


@given(
    st.decimals(min_value=0, max_value=10**6, places=6),
    st.sampled_from([("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("kB", 10**3), ("GB", 10**9)]),
)
def test_sizes_are_exact_and_rounded_down(amount, unit):
    name, factor = unit
    exact = Fraction(amount) * factor
    assert 0 <= exact - parse_bytes(f"{amount:f}{name}") < 1


@given(st.integers(min_value=1, max_value=10**12), st.decimals(min_value="0.01", max_value=300, places=2))
def test_a_share_never_exceeds_what_it_says(plain_peak, percent):
    exact = Fraction(percent) * plain_peak / 100
    if exact >= 1:
        assert 0 <= exact - resolve_limit(f"{percent:f}%", plain_peak) < 1


@given(st.text(max_size=12) | st.floats() | st.none() | st.binary(max_size=4))
def test_anything_is_read_or_refused_with_what_was_given(limit):
    for read in (parse_bytes, parse_overhead, lambda given: resolve_limit(given, 10**9)):
        try:
            assert read(limit) >= 0
        except LimitError as error:
            assert repr(limit) in str(error)


@given(size=st.integers(1, 2**50), plain_peak=st.integers(1, 2**50))
def test_a_share_that_is_shown_works_as_a_limit(size, plain_peak):
    shown = format_share_up(size, plain_peak)
    assert size <= resolve_limit(shown, plain_peak)
    assert Fraction(shown.removesuffix(" %")) - Fraction(100 * size, plain_peak) < Fraction(1, 10)


@given(st.floats(0, 1e6))
def test_an_overhead_that_is_shown_works_as_a_limit(overhead):
    shown = format_overhead_up(overhead)
    assert overhead <= parse_overhead(shown)
    assert Fraction(shown.removesuffix("%")) - 100 * Fraction(overhead) < Fraction(1, 10)


@pytest.mark.parametrize(
    ("size", "of", "shown"),
    [(45, 100, "45.0 %"), (45_001, 100_000, "45.1 %"), (3, 2, "150.0 %"), (0, 0, "0.0 %")],
)
def test_shares_are_rounded_up(size, of, shown):
    assert format_share_up(size, of) == shown
