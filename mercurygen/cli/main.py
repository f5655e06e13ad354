"""The command `mercurygen`: the commands by name, and what becomes of errors."""

from __future__ import annotations

import errno
import gc
import os
import sys
import traceback
from typing import Any

import click

import mercurygen
from mercurygen.cli.usage import LazyGroup, translate
from mercurygen.errors import UserError, printable, shorten

_COMMANDS = {
    name: f"mercurygen.cli.{module}:{name}"
    for name, module in (
        ("emit", "emit_command"),
        ("search", "search_command"),
        ("verify", "verify_command"),
        ("check", "check_command"),
        ("show", "show_command"),
        ("explain", "show_command"),
        ("topo", "list_command"),
        ("ops", "list_command"),
    )
}
INTERRUPTED, BROKEN_PIPE = 130, 141  # as a shell calls SIGINT and SIGPIPE
# Objects between two rounds of Python's garbage collector, and rounds: a search keeps many and
# makes no circles, so that at Python's own 700 a fifth of its time went into looking for some.
COLLECT_AFTER = 100_000, 50, 100


@click.group(
    cls=LazyGroup,
    lazy=_COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(mercurygen.__version__, message="mercurygen %(version)s")
@click.option("--traceback", "wants_traceback", is_flag=True, hidden=True)
@click.pass_obj
def cli(settings: dict[str, Any], wants_traceback: bool) -> None:
    """Choose how to distribute attention over GPUs, prove it, and write it as a module.

    `mercurygen emit attention --topo a100x16` is the main job: it needs no GPU.
    """
    if settings is not None:
        settings["traceback"] = wants_traceback


def main(args: list[str] | None = None) -> int:
    """Run a command line; the console script exits with what this returns.

    Returns:
        0 done, 1 a check failed or nothing fits, 2 bad use.
    """
    if args is None:  # a process of our own
        gc.set_threshold(*COLLECT_AFTER)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    settings: dict[str, Any] = {"traceback": False}
    try:
        code = cli.main(args, "mercurygen", standalone_mode=False, obj=settings)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except UserError as error:
        return _fail(error)
    except click.UsageError as error:
        return _fail(translate(error))
    except click.ClickException as error:
        return _fail(UserError("usage", error.format_message()))
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except SystemExit:  # click's word for a closed pipe
        _close_output()
        return BROKEN_PIPE
    except OSError as error:
        return _output_failed(error, settings)
    except Exception as error:
        return _bug(error, settings)


def _fail(error: UserError) -> int:
    try:
        sys.stdout.flush()
        print(error.render(), file=sys.stderr)
    except OSError:  # nobody reads it; the exit code still tells
        _close_output()
    return error.exit_code


def _output_failed(error: OSError, settings: dict[str, Any]) -> int:
    """What to say if standard output takes no more; another OSError is a bug."""
    if isinstance(error, BrokenPipeError):
        _close_output()
        return BROKEN_PIPE
    if error.errno in (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG) and not error.filename:
        _close_output()
        reason = error.strerror or "no reason given"
        return _fail(UserError("cannot-write", f"standard output: {reason}", exit_code=1))
    return _bug(error, settings)


def _close_output() -> None:
    """Point standard output at nothing, so that Python's last flush does not complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _bug(error: Exception, settings: dict[str, Any]) -> int:
    if settings["traceback"]:
        traceback.print_exception(error)
    else:
        what = shorten(printable(f"{type(error).__name__}: {error}"), 200)
        print(f"error[internal]: {what}", file=sys.stderr)
        print(
            "note: a bug in mercurygen; please report it, with what "
            "`mercurygen --traceback …` prints",
            file=sys.stderr,
        )
    return 1
