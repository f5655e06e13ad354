"""How a topology file is read: its text, its tables, and every way in which they can be wrong.

A topology file is data that a stranger may have written. Its names and titles reach the docstring
of emitted code, so they are held to a small alphabet here, where they enter.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mercurygen.errors import Span, UserError, closest, printable, shorten

# The shipped files have 4 kB; the limit keeps a wrong path from costing time or memory.
MAX_BYTES = 64 * 1024

# tomllib takes quadratic time and memory for a dotted key: 20,000 parts cost 4 s and 2 GB.
MAX_DOTS = 100

# A word of a link ("PCIe 4.0") has no `=`: a schedule's header puts it between `node=2` and a rate.
LINK = re.compile(r"[A-Za-z][A-Za-z0-9._/+-]*( [A-Za-z0-9._/+-]+)*", re.ASCII)
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,40}", re.ASCII)
PLAIN = re.compile(r"""[!$-&(-\[\]-_a-~]([ !$-&(-\[\]-_a-~]*[!$-&(-\[\]-_a-~])?""")


@dataclass(frozen=True, slots=True)
class Quantity:
    """A kind of number: the units it may be written in, and its sensible range.

    Attributes:
        units: name of a unit -> (multiply, divide) to get to the base unit; two whole numbers,
            because 1e-6 is none that a float can hold.
        least: smallest legal value in the base unit; 0 itself is never legal.
        most: largest legal value in the base unit.
        legal: the range in words, for the error message.
        whole: whether it must be a whole number in the base unit.
    """

    units: Mapping[str, tuple[int, int]]
    least: float
    most: float
    legal: str
    whole: bool = False

    def help(self, value: float, unit: str) -> str:
        """What a value out of range must be, with the nearest legal one if there is one."""
        multiply, divide = self.units[unit]
        bound = self.most if value > self.most * divide / multiply else self.least
        if not bound or value != value:  # nothing is nearest to NaN, or to an open end
            return f"must be {self.legal}"
        nearest = f"{bound * divide / multiply:.15g}" + (f" {unit}" if unit != "1" else "")
        return f"must be {self.legal}; nearest: {nearest}"


@dataclass(frozen=True, slots=True)
class Section:
    """One table of a topology file, and where it stands in the text.

    Attributes:
        file: the file's name as the user gave it.
        text: the whole text, to find lines in.
        header: "" for the top of the file, else "gpu" or "level".
        index: which of the tables with that header, from 0.
        table: what tomllib made of it.
    """

    file: str
    text: str
    header: str
    index: int
    table: Mapping[str, object]

    def error(self, slug: str, key: str, message: str, help: str | None = None) -> UserError:
        """A mistake at this key; the message is to name the key."""
        return UserError(f"topology-{slug}", message, span=self._span(key), help=help)

    def label(self, key: str) -> str:
        """How messages call a key of this section."""
        where = {"": "", "gpu": " of [gpu]", "level": f" of [[level]] {self.index + 1}"}
        return f"`{shorten(key, 40)}`{where[self.header]}"

    def only(self, known: Iterable[str]) -> None:
        """Refuses keys that mean nothing: a misspelt one would otherwise go unnoticed."""
        known = list(known)
        for key in self.table:
            if key not in known:
                message = f"{self.label(key)} is not a key of a topology"
                raise UserError(
                    "unknown-key", message, span=self._span(key), help=closest(key, known)
                )

    def words(self, key: str, pattern: re.Pattern[str], limit: int, legal: str) -> str:
        """A string that matches the pattern and is not longer than the limit."""
        value = self._typed(key, self.table, key, str, "a string")
        if len(value) <= limit and value.isprintable() and pattern.fullmatch(value):
            return value
        message = f"{self.label(key)} is {shorten(repr(value))}"
        raise self.error("text", key, message, f"at most {limit} characters: {legal}")

    def choice(self, key: str, known: Iterable[str]) -> str:
        """One of a few words."""
        value = self._typed(key, self.table, key, str, "a string")
        if value not in known:
            message = f"{self.label(key)} is {shorten(repr(value))}"
            raise self.error("choice", key, message, closest(value, known))
        return value

    def number(self, key: str, quantity: Quantity) -> float:
        """The number in its base unit; an int if the quantity is whole."""
        entry = self._entry(key)
        value = self._typed(key, entry, "value", (int, float), "a number")
        unit = self._unit(key, entry, quantity)
        multiply, divide = quantity.units[unit]
        # Compare before converting: an int may be too large for a float.
        if not 0 < value < 1e30 or not quantity.least <= value * multiply / divide <= quantity.most:
            shown = _shown(value) + (f" {unit}" if unit != "1" else "")
            message = f"{self.label(key)} is {shown}"
            raise self.error("range", key, message, quantity.help(value, unit))
        if not quantity.whole:
            return value * multiply / divide
        base = round(value * multiply / divide)
        if unit == "1" and base != value:
            message = f"{self.label(key)} is {value}, not a whole number"
            raise self.error("range", key, message, f"nearest: {max(base, 1)}")
        return base

    def given(self, keys: Iterable[str]) -> list[str]:
        """Those of some keys that the section has."""
        return [key for key in keys if key in self.table]

    def row(self, key: str) -> tuple[str, str]:
        """The number as it is written, with its unit, and its source."""
        entry = self._entry(key)
        unit = str(entry["unit"])
        return _shown(entry["value"]) + (f" {unit}" if unit != "1" else ""), str(entry["source"])

    def _entry(self, key: str) -> Mapping[str, object]:
        shape = 'an inline table `{ value = 25, unit = "GB/s", source = "..." }`'
        entry = self._typed(key, self.table, key, dict, shape)
        for part in entry:
            if part not in ("value", "unit", "source"):
                message = f"`{shorten(part, 40)}` in {self.label(key)} is not a key of a number"
                help = closest(part, ("value", "unit", "source"))
                raise UserError("unknown-key", message, span=self._span(key), help=help)
        source = self._typed(key, entry, "source", str, "a string")
        if not 0 < len(source) <= 400 or not source.isprintable() or not source.strip():
            message = f"the source of {self.label(key)} is {shorten(repr(source))}"
            raise self.error("source", key, message, "one line that says where the number is from")
        return entry

    def _unit(self, key: str, entry: Mapping[str, object], quantity: Quantity) -> str:
        unit = self._typed(key, entry, "unit", str, "a string")
        if unit not in quantity.units:
            message = f"the unit of {self.label(key)} is {shorten(repr(unit))}"
            raise self.error("unit", key, message, closest(unit, quantity.units))
        return unit

    def _typed(self, key: str, table: Mapping[str, Any], part: str, kind: Any, shape: str) -> Any:
        """The part of a table, if it is there and of the right kind."""
        name = self.label(key) if part == key else f"`{part}` in {self.label(key)}"
        if part not in table:
            raise self.error("missing", key, f"{name} is missing", f"write {shape}")
        # bool is an int to Python, and never what is wanted here
        if not isinstance(table[part], kind) or isinstance(table[part], bool):
            message = f"{name} is {_shown(table[part])}"
            raise self.error("type", key, message, f"must be {shape}")
        return table[part]

    def _span(self, key: str) -> Span:
        """The line of the key; of its section if the key is not there."""
        lines = self.text.split("\n")
        header, seen, place = "", {"": 0, "gpu": 0, "level": 0}, 0
        for number, line in enumerate(lines):
            if found := re.match(r"\s*\[+\s*(\w+)", line):
                header = found[1]
                seen[header] = seen.get(header, 0) + 1
            if header == self.header and seen[header] == self.index + (header != ""):
                if re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[=.]", line):
                    column = len(line) - len(line.lstrip()) + 1
                    return Span(self.file, number + 1, column, line, max(1, len(line.strip())))
                place = place or number
        return Span(self.file, place + 1, 1, lines[place], max(1, len(lines[place])))


def read_text(path: str) -> str:
    """The text of a topology file, with line ends normalised to a newline."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            help = "name a .toml file in it"
            raise UserError("topology-file", f"{shorten(path)} is a directory", help=help)
        if not stat.S_ISREG(mode):  # a pipe would block, /dev/zero would never end
            raise UserError("topology-file", f"{shorten(path)} is not a regular file")
        with open(path, "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        help = "`mercurygen topo list` shows the topologies that are shipped"
        raise UserError("no-such-file", f"no file {shorten(path, 200)}", help=help) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        message = f"cannot read {shorten(path)}: {reason}"
        raise UserError("topology-file", message) from None
    return decode(path, data)


def decode(path: str, data: bytes) -> str:
    """The bytes of a topology file as text."""
    if len(data) > MAX_BYTES:
        message = f"{shorten(path)} is larger than {MAX_BYTES // 1024} KiB: not a topology"
        raise UserError("topology-file", message)
    if b"\0" in data:
        message = f"{shorten(path)} has a NUL byte at {data.index(0)}: not a text"
        raise UserError("topology-file", message)
    try:
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        message = f"{shorten(path)} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}"
        raise UserError("topology-file", message) from None


def parse(file: str, text: str) -> Section:
    """The top of the file as a section."""
    file = printable(file)
    lines = text.split("\n")
    try:
        if any(line.count(".") > MAX_DOTS and not line.startswith("#") for line in lines):
            raise RecursionError
        return Section(file, text, "", 0, tomllib.loads(text))
    except RecursionError:
        message, place = "nested too deeply", None
    except ValueError as error:  # also what int() says to 5000 digits, which is no TOMLDecodeError
        message = str(error)
        place = re.search(r" \(at line (\d+), column (\d+)\)$", message)
    if place is None:  # at the end of the document, mostly
        number = max((i for i, line in enumerate(lines, 1) if line.strip()), default=1)
        span = Span(file, number, 1, lines[number - 1], max(1, len(lines[number - 1])))
    else:
        message = message[: place.start()]
        span = Span(file, int(place[1]), int(place[2]), lines[int(place[1]) - 1])
    raise UserError("topology-syntax", f"not TOML: {shorten(message, 120)}", span=span)


def _shown(value: object) -> str:
    """A value as a message shows it; never a long or a deep one."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and value.bit_length() > 100:
        return "an absurdly large whole number"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str):
        return shorten(repr(value))
    return {dict: "a table", list: "an array"}.get(type(value), "a date or a time")
