"""Sizes in bytes, read and written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everygpu.errors import OptionError
from everygpu.units import format_size, parse_size

UNITS = {
    "": 1,
    "B": 1,
    "K": 10**3,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "Ki": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


@pytest.mark.parametrize(("unit", "factor"), UNITS.items())
@pytest.mark.parametrize("write", ["{}{}", "{} {}", "  {}  {} "])
@pytest.mark.parametrize("change_case", [str, str.lower, str.upper])
def test_every_unit_in_every_spelling(unit, factor, write, change_case):
    assert parse_size(change_case(write.format(3, unit))) == 3 * factor


@given(size=st.integers(0, 2**70))
def test_int_is_bytes(size):
    assert parse_size(size) == size


@given(whole=st.integers(0, 999), thousandths=st.integers(0, 999))
def test_fraction_of_a_unit_is_exact(whole, thousandths):
    assert parse_size(f"{whole}.{thousandths:03d} kB") == whole * 1000 + thousandths


def test_part_of_a_byte_is_dropped():
    assert parse_size("1.9") == 1
    assert parse_size("0.3 KiB") == 307


@pytest.mark.parametrize(
    "size", ["", "GiB", "8 GiBs", "-1 GB", "1,5 GB", "1e9", "8 G iB", ".5 GB", "5. GB", "8 PB", "∞"]
)
def test_text_that_is_no_size(size):
    with pytest.raises(OptionError, match="looks like '8GiB' or '500 MB', got") as caught:
        parse_size(size)
    assert repr(size) in str(caught.value)


def test_negative_number():
    with pytest.raises(OptionError, match="must not be negative, got -1"):
        parse_size(-1)


@pytest.mark.parametrize("size", [8e9, None, b"8GiB"])
def test_value_of_another_type(size):
    with pytest.raises(OptionError, match="got"):
        parse_size(size)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1.0 MiB"),  # never 1024.0 KiB
        (2**20, "1.0 MiB"),
        (15 * 2**29, "7.5 GiB"),
        (2**40, "1.0 TiB"),
        (5000 * 2**40, "5000.0 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_size_is_written_in_the_largest_unit_that_fits(size, text):
    assert format_size(size) == text


@given(size=st.integers(0, 2**60))
def test_written_size_reads_back_to_a_tenth_of_its_unit(size):
    assert abs(parse_size(format_size(size)) - size) <= 0.05 * size + 1
