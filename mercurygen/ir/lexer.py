"""One line of a schedule, or of a program, as tokens; every refusal has its place."""

from __future__ import annotations

import re

from mercurygen.errors import Span, UserError, closest, printable, shorten

_TOKEN = re.compile(r"\s*(?:([A-Za-z_][A-Za-z0-9_]*)|([0-9]+)|([][,:=*()]))")


class Line:
    """A cursor over the tokens of one line."""

    def __init__(self, file: str, number: int, text: str) -> None:
        self.file, self.number, self.text = file, number, text
        self.place = 0

    def span(self, start: int | None = None) -> Span:
        """From a column (default: the whole line) to where the cursor stands."""
        body = self.text.rstrip()
        if start is None:
            indent = len(body) - len(body.lstrip())
            return Span(self.file, self.number, indent + 1, self.text, len(body) - indent)
        return Span(self.file, self.number, start + 1, self.text, max(1, self.place - start))

    def error(self, slug: str, message: str, help: str | None = None) -> UserError:
        """A refusal at the rest of the line."""
        start = len(self.text) - len(self.text[self.place :].lstrip())
        rest = len(self.text.rstrip()) - start
        span = Span(self.file, self.number, start + 1, self.text, max(1, rest))
        return UserError(slug, message, span=span, help=help)

    def _next(self, group: int) -> str | None:
        match = _TOKEN.match(self.text, self.place)
        if match and match.group(group) is not None:
            self.place = match.end()
            return match.group(group)
        return None

    def _found(self) -> str:
        rest = self.text[self.place :].strip()
        return repr(shorten(printable(rest), 24)) if rest else "the end of the line"

    def name(self, what: str) -> str:
        """The next token, which must be a name."""
        found = self._next(1)
        if found is None:
            raise self.error("syntax", f"expected {what}, found {self._found()}")
        return found

    def word(self, *known: str) -> str:
        """The next token, which must be one of these words."""
        start = self.place
        found = self._next(1)
        if found not in known:
            self.place = start
            wanted = " or ".join(f"`{word}`" for word in known)
            help = closest(found, known) if found else None
            raise self.error("syntax", f"expected {wanted}, found {self._found()}", help)
        return found

    def number_(self, what: str) -> int:
        """The next token, which must be a number of at most 15 digits."""
        start = self.place
        found = self._next(2)
        if found is None or len(found) > 15:
            self.place = start
            raise self.error("syntax", f"expected {what}, found {self._found()}")
        return int(found)

    def mark(self, symbol: str) -> None:
        """The next token, which must be this symbol."""
        if not self.take(symbol):
            raise self.error("syntax", f"expected `{symbol}`, found {self._found()}")

    def take(self, symbol: str) -> bool:
        """Step over a symbol or word if it comes next."""
        start = self.place
        if (self._next(3) or self._next(1)) == symbol:
            return True
        self.place = start
        return False

    def ahead(self, *symbols: str) -> bool:
        """Whether one of these symbols or words comes next; the cursor stays."""
        start = self.place
        found = any(self.take(symbol) for symbol in symbols)
        self.place = start
        return found

    def names(self, what: str) -> tuple[str, ...]:
        """A list of names, separated by commas, each once."""
        found = {self.name(what): None}
        while self.take(","):
            name = self.name(what)
            if name in found:
                raise self.error("named-twice", f"{what} {shorten(name)!r} is named twice")
            found[name] = None
        return tuple(found)

    def done(self) -> bool:
        """Whether nothing but blanks is left."""
        return not self.text[self.place :].strip()

    def end(self) -> None:
        """Refuse what is left of the line."""
        if not self.done():
            raise self.error("syntax", f"unexpected {self._found()}")

    def rest(self) -> str:
        """What is left of the line, without outer blanks."""
        rest, self.place = self.text[self.place :].strip(), len(self.text)
        return rest
