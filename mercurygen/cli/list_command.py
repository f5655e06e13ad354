"""`mercurygen topo` and `ops`: the machines and operators that there are."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING

import click

from mercurygen.cli.usage import Group

if TYPE_CHECKING:
    from mercurygen.cost.topology import Topology

WIDTH = 100


@click.group(cls=Group)
def topo() -> None:
    """Topologies: the machines that schedules are made for."""


@topo.command("list")
def list_topologies() -> None:
    """List the shipped topologies."""
    from mercurygen.cli import words
    from mercurygen.cost import topology as topologies

    rows = []
    for name in topologies.shipped():
        found = topologies.load(name)
        levels = " ".join(f"{level.name}={level.size}" for level in found.levels)
        rows.append([name, str(found.size), levels, found.about])
    click.echo("\n".join(words.table([["name", "GPUs", "levels", "what"], *rows], right=[1])))


def warn(topology: Topology) -> None:
    """Say on stderr what looks wrong in a topology."""
    from mercurygen.cost.topology_words import contradictions

    for line in contradictions(topology):
        click.echo(f"warning: {line}", err=True)


@topo.command("show")
@click.argument("name", metavar="T")
def show_topology(name: str) -> None:
    """Show the numbers of a topology, shipped or a file, each with its source."""
    from mercurygen.cost import topology as topologies
    from mercurygen.cost.topology_words import describe

    found = topologies.load(name)
    warn(found)
    click.echo(describe(found, topologies.sources(name)))


@click.command()
def ops() -> None:
    """List the shipped operators with their signatures."""
    from mercurygen import operators

    for name in operators.shipped():
        operator = operators.load(name)
        click.echo("\n".join(wrap(f"{name}: {' '.join(operator.doc.split())}", WIDTH)))
        for tensor in operator.tensors:
            dims = ", ".join(" * ".join(dim) for dim in tensor.dims)
            dtype = "" if tensor.dtype == "inputs" else f"  {tensor.dtype}"
            click.echo(f"  {tensor.role:8}{tensor.name:6}[{dims}]{dtype}")
        for axis in operator.axes:
            click.echo(f"  axis    {axis.name:6}{axis.doc}")
