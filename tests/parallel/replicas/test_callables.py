"""Callables copied to refer to something else, and to the same where nothing changes."""

import functools
import types
import weakref

import pytest

from everygpu.parallel.replicas.callables import open_callable, rebind_function


class Thing:
    def method(self):
        return self


OLD, NEW = Thing(), Thing()


def replace(value, done=None):
    """Old things become new, whatever refers to them too."""
    done = {} if done is None else done
    if value is OLD or id(value) in done:
        return done.get(id(value), NEW)
    if isinstance(value, types.FunctionType):
        return rebind_function(value, functools.partial(replace, done=done), done)
    opened = open_callable(value)
    return value if opened is None else opened.rebuild([replace(child, done) for child in opened.children])


@pytest.mark.parametrize("value", [None, 3, "text", len, [].append, Thing, OLD, [OLD], functools.reduce, weakref.proxy])
def test_other_values_are_not_opened(value):
    assert open_callable(value) is None


@pytest.mark.parametrize(
    ("value", "find"),
    [
        (OLD.method, lambda f: f()),
        (weakref.ref(OLD), lambda f: f()),
        (functools.partial(lambda a, b: a, OLD), lambda f: f(1)),
        (functools.partial(lambda a, b: b, b=OLD), lambda f: f(1)),
        (functools.partial(OLD.method), lambda f: f()),
        (functools.partial(functools.partial(lambda a: a), OLD), lambda f: f()),
    ],
)
def test_parts_are_replaced(value, find):
    assert any(part is OLD or open_callable(part) for part in open_callable(value).children)
    assert find(value) is OLD
    assert find(replace(value)) is NEW
    assert type(replace(value)) is type(value)


def test_partial_keeps_its_arguments_and_attributes():
    partial = functools.partial(lambda *args, **kwargs: (args, kwargs), 1, OLD, a=2, b=OLD)
    partial.label, partial.owner = "mine", OLD
    twin = replace(partial)
    assert twin(5, c=6) == ((1, NEW, 5), {"a": 2, "b": NEW, "c": 6})
    assert (twin.label, twin.owner) == ("mine", NEW)
    assert partial.owner is OLD


def find_nothing():
    return OLD  # by way of the module's globals, which are nobody's own


class TestRebindFunction:
    def test_function_that_refers_to_nothing_replaced_stays_itself(self):
        scale = 3

        def function(x, shift=1):
            return x * scale + shift

        assert replace(function) is function
        assert replace(find_nothing) is find_nothing

    def test_every_way_to_refer(self):
        closed = OLD

        def function(default=OLD, *, keyword=OLD):
            return closed, default, keyword, function.attribute

        function.attribute = OLD
        twin = replace(function)
        assert twin() == (NEW, NEW, NEW, NEW)
        assert function() == (OLD, OLD, OLD, OLD)

    def test_looks_like_the_original(self):
        closed = OLD

        def function(x: int, y: str = "y") -> object:
            return closed

        function.label = "label"
        function.__doc__, function.__qualname__ = "As functools.wraps does.", "Wrapped.function"
        twin = replace(function)
        assert twin is not function
        for name in ("__name__", "__qualname__", "__doc__", "__module__", "__annotations__", "__defaults__", "label"):
            assert getattr(twin, name) == getattr(function, name)

    def test_cells_that_stay_are_shared(self):
        closed, count = OLD, 0

        def function():
            nonlocal count
            count += 1
            return closed, count

        twin = replace(function)
        assert [twin(), function(), twin()] == [(NEW, 1), (OLD, 2), (NEW, 3)]

    def test_function_that_calls_itself_calls_its_copy(self):
        closed = OLD

        def countdown(n):
            return closed if n == 0 else countdown(n - 1)

        twin = replace(countdown)
        assert twin(3) is NEW
        assert countdown(3) is OLD

    def test_all_who_refer_to_it_find_the_one_copy(self):
        closed, done = OLD, {}

        def function():
            return closed

        twin = replace(function, done)
        assert twin() is NEW
        assert replace(function, done) is twin

    def test_cell_that_is_not_filled_yet(self):
        closed = OLD

        def function():
            return closed, later

        twin = replace(function)
        with pytest.raises(NameError, match="later"):
            twin()
        later = 1
        assert twin() == (NEW, 1)
