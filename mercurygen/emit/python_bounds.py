"""What interpreted code may spend, and Python's own functions within that.

A stranger's module must not take the memory or the time of the machine: numbers have 64 bits, a
value few parts, and every expression and every round of a loop costs a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby, product
from typing import Any

LARGEST_NUMBER = 2**63
MOST_PARTS = 4096  # of a value; a list of the chunks of 1024 ranks has 2048
MOST_CALLS = 50  # one inside another
MOST_STEPS, STEPS_AN_EVENT = 50_000, 500  # of one run; an emitted module takes 50 an event,
STEPS_A_RANK = 16  # and of many ranks some for each: it goes through lists of their chunks

_LAZY = (len, zip, reversed, enumerate, next, abs, divmod, slice)
_EAGER = (list, tuple, sum, min, max, sorted)


class Complaint(Exception):
    """What is wrong, in words; the interpreter adds where."""


def weigh(value: Any) -> int:
    """How many parts a value has, those of its parts included.

    Raises:
        Complaint: too many, or too large a number among them.
    """
    todo, weight = [value], 0
    while todo:
        one = todo.pop()
        weight += 1
        kind = type(one)
        if kind is int:
            if not -LARGEST_NUMBER < one < LARGEST_NUMBER:
                raise Complaint("not understood: a number of more than 64 bits")
        elif kind is list or kind is tuple:
            todo += one
        elif kind is dict:
            todo += [*one, *one.values()]
        elif kind is str:
            weight += len(one) // 64
        elif kind is range:
            weight += len(one) // 64
        if weight + len(todo) > MOST_PARTS:
            raise Complaint(f"not understood: a value of more than {MOST_PARTS} parts")
    return weight


class Bounded:
    """Counts steps, and has the functions that a module may call.

    Attributes:
        steps: taken so far.
        budget: of them.
    """

    steps = 0
    budget = MOST_STEPS

    def spend(self, steps: int) -> None:
        """Count steps.

        Raises:
            Complaint: there are none left.
        """
        self.steps += steps
        if self.steps > self.budget:
            raise Complaint(f"not understood: more than {self.budget} steps")

    def items(self, value: Any) -> Iterator[Any]:
        """The items of a value that has some, a step each."""
        raise NotImplementedError

    def call(self, function: Callable, *args: Any, **keywords: Any) -> Any:
        """Call what the text calls, with what it gives."""
        self.spend(weigh(args) + weigh(keywords))
        return function(*args, **keywords)

    def builtins(self) -> dict[str, Callable]:
        """Python's functions, as the text may call them."""
        own: dict[str, Callable] = {function.__name__: function for function in _LAZY}
        own |= {function.__name__: partial(self._eager, function) for function in _EAGER}
        own |= {"any": lambda x: any(self.items(x)), "all": lambda x: all(self.items(x))}
        own |= {"range": self._range, "iter": lambda x: self.items(x)}
        own["map"] = lambda f, *args: map(partial(self.call, f), *args)
        return own

    def groups(self, values: Any, key: Callable | None = None) -> Iterator[Any]:
        """`itertools.groupby`."""
        return groupby(self.items(values), partial(self.call, key) if key else None)

    def products(self, *values: Any) -> Iterator[Any]:
        """`itertools.product`."""
        return product(*(list(self.items(each)) for each in values))

    def _range(self, *ends: int) -> range:
        value = range(*ends)
        if len(value) > 8 * MOST_PARTS:
            raise Complaint(f"not understood: a range of {len(value)}")
        return value

    def _eager(self, function: Callable, *args: Any, **keywords: Any) -> Any:
        """One that goes through an iterable, or compares several values."""
        if len(args) == 1 or function is sum:
            args = (list(self.items(args[0])), *args[1:])
        self.spend(weigh(args))
        if function is sum and not all(isinstance(x, int | float) for x in args[0]):
            raise Complaint("not understood: a sum of something else than numbers")
        if keywords.get("key"):
            keywords["key"] = partial(self.call, keywords["key"])
        return function(*args, **keywords)
