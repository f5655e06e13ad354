"""The text of an operator's file: what is refused before it is parsed, and places in it.

A file may come from anywhere, so size, characters and nesting are checked first: the parser
behind this is native code and recursive.
"""

from __future__ import annotations

import io
import re
import token
import tokenize
import unicodedata

from mercurygen.errors import Span, UserError, shorten

MAX_CHARACTERS = 200_000
MAX_BRACKETS = 40
MAX_INDENTS = 20
MAX_TOKENS_PER_STATEMENT = 600
MAX_PREFIXES = 20  # - - - x
MAX_ELIFS = 20  # each is inside the one before

COOKIE = re.compile(r"^[ \f]*#.*?coding[:=][ ]*([-\w.]+)")  # as Python reads it (PEP 263)


class Source:
    """A text and its name.

    Args:
        text: of the whole file, with any line ends.
        file: its name as the user gave it.
    """

    def __init__(self, text: str, file: str) -> None:
        self.file = file
        if len(text) > MAX_CHARACTERS:
            raise UserError(
                "dsl-too-large",
                f"the file has {len(text)} characters, an operator at most {MAX_CHARACTERS}",
                span=Span(file, 1, 1, text[:100].split("\n")[0]),
            )
        self.text = text.removeprefix("\ufeff").replace("\r\n", "\n")
        self.lines = self.text.split("\n")

    def span(self, line: int, column: int, length: int = 1) -> Span:
        """A place; line and column are 1-based."""
        text = self.lines[line - 1] if 0 < line <= len(self.lines) else ""
        return Span(self.file, line, column, text, max(1, length))

    def fail(
        self, slug: str, message: str, line: int, column: int, length: int = 1, help: str = ""
    ) -> UserError:
        """An error at a place."""
        return UserError(slug, message, span=self.span(line, column, length), help=help or None)

    def check(self) -> None:
        """Refuse what must not reach the parser."""
        self._check_characters()
        self._check_encoding()
        try:
            self._check_tokens()
        except tokenize.TokenError as error:
            line, column = error.args[1]
            raise self.fail("dsl-syntax", str(error.args[0]), line, max(1, column)) from None
        except SyntaxError as error:  # IndentationError is one
            line, column = error.lineno or 1, error.offset or 1
            raise self.fail("dsl-syntax", error.msg, line, max(1, column)) from None

    def _check_characters(self) -> None:
        for number, line in enumerate(self.lines, 1):
            if line.isprintable():
                continue
            column = next(i for i, c in enumerate(line, 1) if not c.isprintable())
            code = f"U+{ord(line[column - 1]):04X}"
            name = unicodedata.name(line[column - 1], "a control character")
            message = f"the file holds {code} ({name.lower()}), which does not print"
            raise self.fail("dsl-character", message, number, column)

    def _check_encoding(self) -> None:
        """Python would read the file in the encoding that a comment on top names."""
        for number, line in enumerate(self.lines[:2], 1):
            cookie = COOKIE.match(line)
            if cookie and cookie[1].lower().replace("_", "-") not in ("utf-8", "utf8"):
                message = f"an operator's file is UTF-8, and this one says {shorten(cookie[1])}"
                raise self.fail("dsl-character", message, number, cookie.start(1) + 1)
            if line.strip()[:1] not in ("", "#"):
                return

    def _check_tokens(self) -> None:
        nesting = _Nesting()
        for t in tokenize.generate_tokens(io.StringIO(self.text).readline):
            place = t.start[0], t.start[1] + 1, len(t.string)
            message = nesting.refuse(t)
            if message:
                raise self.fail("dsl-too-deep", message, *place)
            if t.type == token.NAME and not t.string.isascii():
                message = f"the name {ascii(t.string)[1:-1]} is not ASCII"
                raise self.fail("dsl-identifier", message, *place)
            if _is_f_string(t):
                message = "an f-string is not part of the operator language"
                raise self.fail("dsl-expression", message, *place)


class _Nesting:
    """Counts what makes a parser recurse."""

    def __init__(self) -> None:
        self.brackets = self.indents = self.tokens = self.prefixes = self.elifs = 0

    def refuse(self, t: tokenize.TokenInfo) -> str | None:
        """Why the text up to this token is too much, if it is."""
        self.indents += (t.type == token.INDENT) - (t.type == token.DEDENT)
        self.elifs += t.string == "elif"
        if t.type == token.NEWLINE:
            self.tokens = 0
        elif t.type not in (token.NL, token.COMMENT):
            self.tokens += 1
        if t.type == token.OP:
            self.brackets += (t.string in "([{") - (t.string in ")]}")
        self.prefixes = self.prefixes + 1 if t.string in ("-", "+", "~", "not") else 0
        if self.tokens > MAX_TOKENS_PER_STATEMENT:
            return "the statement is too long"
        deep = self.brackets > MAX_BRACKETS or self.indents > MAX_INDENTS
        if deep or self.prefixes > MAX_PREFIXES or self.elifs > MAX_ELIFS:
            return "nested too deeply"
        return None


def _is_f_string(t: tokenize.TokenInfo) -> bool:
    if token.tok_name[t.type] in ("FSTRING_START", "TSTRING_START"):  # Python 3.12, 3.14
        return True
    prefix = t.string[: min(t.string.find(q) % 1000 for q in "'\"")]
    return t.type == token.STRING and "f" in prefix.lower()
