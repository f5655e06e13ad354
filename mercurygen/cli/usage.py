"""click, with every mistake in mercurygen's own form and nothing imported before it is needed."""

from __future__ import annotations

import difflib
from importlib import import_module

import click

from mercurygen.errors import UserError, closest, printable, shorten

# What design.md promises for later: refused by name, so that nobody takes it for a slip.
LATER_OPTIONS = (
    "--backward",
    "--reduce-dtype",
    "--documents",
    "--tune",
)
# What other attentions have and none of ours: option -> (what it is called, what to do instead).
_SINK = "with `return_lse=True`, multiply out by sigmoid(lse - sink): a sink is in no rank's share"
ABSENT_OPTIONS = {
    "--dropout": ("dropout of attention's weights", "train without it, as long contexts do"),
    "--softcap": ("a cap of the scores", "normalize q and k, which needs no other kernel"),
    "--alibi": ("a bias of the scores", "positions in q and k (RoPE): see `positions`"),
    "--bias": ("a bias of the scores", "positions in q and k (RoPE): see `positions`"),
    "--sinks": ("attention sinks", _SINK),
    "--fp8": ("products in 8 bits", "bfloat16 or float16"),
}
LATER_COMMANDS = ("diff", "timeline", "vendor", "tune", "probe")


class LazyGroup(click.Group):
    """A group whose commands are imported when they are asked for.

    Args:
        lazy: name of a command -> "module:attribute".
    """

    def __init__(self, *args, lazy: dict[str, str], **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands, in the order in which a person meets them."""
        return [*self.lazy, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """The command of this name, or None."""
        if name not in self.lazy:
            return super().get_command(ctx, name)
        module, attribute = self.lazy[name].split(":")
        return getattr(import_module(module), attribute)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple:
        """The command that the arguments name, or a refusal with the closest name."""
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise unknown_command(args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)


class Group(click.Group):
    """A group that refuses an unknown command with the closest name."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple:
        """The command that the arguments name, or a refusal with the closest name."""
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise unknown_command(args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)


def unknown_command(name: str, known: list[str]) -> UserError:
    """The refusal of a command that there is not."""
    if name in LATER_COMMANDS:
        return UserError("usage", f"`{name}` is not supported by this version")
    return UserError("usage", f"no command {_quoted(name)}", help=closest(name, known))


def translate(error: click.UsageError) -> UserError:
    """A usage error of click's as one of ours."""
    command = error.ctx.command if error.ctx else None
    path = error.ctx.command_path if error.ctx else "mercurygen"
    if isinstance(error, click.NoSuchOption):
        return _unknown_option(error.option_name, command)
    if isinstance(error, click.MissingParameter) and error.param is not None:
        name = error.param.human_readable_name.strip("[]")
        return UserError("usage", f"{path} needs {name}", help=f"see `{path} --help`")
    return UserError("usage", shorten(error.format_message(), 300), help=f"see `{path} --help`")


def _unknown_option(name: str, command: click.Command | None) -> UserError:
    if name in LATER_OPTIONS:
        return UserError("usage", f"{name} is not supported by this version")
    for option, (said, instead) in ABSENT_OPTIONS.items():
        if name.startswith(option.removesuffix("s")):
            return UserError("usage", f"{name[:40]}: no schedule has {said}", help=instead)
    known = ["--help"]
    for parameter in command.params if command else ():
        if isinstance(parameter, click.Option) and not parameter.hidden:
            known += [*parameter.opts, *parameter.secondary_opts]
    near = difflib.get_close_matches(name[:80], known, n=1)
    help = f"did you mean `{near[0]}`?" if near else "known: " + ", ".join(known)
    return UserError("usage", f"no option {_quoted(name)}", help=help)


def _quoted(text: str) -> str:
    return repr(shorten(printable(text), 40))
