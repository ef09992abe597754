"""Stretches of time, against sets of whole numbers."""

from hypothesis import given
from hypothesis import strategies as st

from everygpu.tracing.intervals import gaps, intersect, subtract, total, union

pairs = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


def moments(intervals):
    return {moment for begin, end in intervals for moment in range(begin, end)}


def is_normal(intervals):
    ends = [moment for pair in intervals for moment in pair]
    return ends == sorted(set(ends))


@given(pairs, pairs)
def test_as_sets(one, other):
    a, b = union(one), union(other)
    assert moments(a) == moments(one)
    assert is_normal(a)
    assert moments(intersect(a, b)) == moments(a) & moments(b)
    assert moments(subtract(a, b)) == moments(a) - moments(b)
    assert moments(gaps(a, (5, 20))) == set(range(5, 20)) - moments(a)
    assert total(a) == len(moments(a))
    assert all(is_normal(found) for found in (intersect(a, b), subtract(a, b), gaps(a, (5, 20))))
