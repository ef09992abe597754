"""Sizes in bytes, read and written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everygpu.errors import OptionError
from everygpu.units import format_size, parse_size

UNITS = {"": 1, "B": 1, "K": 10**3, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
         "KiB": 2**10, "Ki": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}  # fmt: skip


def test_every_unit_in_every_spelling():
    for unit, factor in UNITS.items():
        for write in ("{}{}", "{} {}", "  {}  {} "):
            for change_case in (str, str.lower, str.upper):
                assert parse_size(change_case(write.format(3, unit))) == 3 * factor


@given(whole=st.integers(0, 999), thousandths=st.integers(0, 999))
def test_int_is_bytes_and_a_fraction_of_a_unit_is_exact(whole, thousandths):
    assert parse_size(whole * 2**60) == whole * 2**60
    assert parse_size(f"{whole}.{thousandths:03d} kB") == whole * 1000 + thousandths


def test_part_of_a_byte_is_dropped():
    assert parse_size("1.9") == 1
    assert parse_size("0.3 KiB") == 307


@pytest.mark.parametrize(
    "size",
    ["", "GiB", "8 GiBs", "-1 GB", "1,5 GB", "1e9", "8 G iB", ".5 GB", "5. GB", "8 PB", "∞", -1, 8e9, None, b"8"],
)
def test_what_is_no_size(size):
    with pytest.raises(OptionError, match="got") as caught:
        parse_size(size)
    assert repr(size) in str(caught.value)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (2**20 - 1, "1.0 MiB"),  # never 1024.0 KiB
     (15 * 2**29, "7.5 GiB"), (2**40, "1.0 TiB"), (5000 * 2**40, "5000.0 TiB"), (-2048, "-2.0 KiB")],
)  # fmt: skip
def test_size_is_written_in_the_largest_unit_that_fits(size, text):
    assert format_size(size) == text


@given(size=st.integers(0, 2**60))
def test_written_size_reads_back_to_a_tenth_of_its_unit(size):
    assert abs(parse_size(format_size(size)) - size) <= 0.05 * size + 1
