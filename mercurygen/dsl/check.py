"""What must hold of an operator beyond the grammar: names, subscripts, outputs, combines."""

from __future__ import annotations

from mercurygen.dsl.check_body import Body, fail, refuse_reserved
from mercurygen.dsl.runtime import solvable
from mercurygen.errors import closest
from mercurygen.ir.operator import Combine, Contribute, Derivation, Loop, Merge, Operator


def check_operator(op: Operator, imported: frozenset[str], taken: frozenset[str]) -> None:
    """Refuse an operator that does not hold together.

    Args:
        op: as parsed.
        imported: words of the language that the file imported.
        taken: every name of the file's top level.
    """
    _check_names(op, taken)
    _check_tensors(op)
    _check_together(op)
    for combine in op.combines:
        _check_combine(op, combine)
        if combine.merge:
            check_merge(combine.merge, imported, taken)
    used: set[str] = set()
    for nest in (*op.derivations, None):
        body = Body(imported, taken, op, nest)
        for statement in (nest or op).body:
            body.statement(statement)
        used |= body.used
        if nest:
            _check_derivation(op, nest, body)
    _check_written(op)
    for declared in (*op.inputs, *op.derived, *op.scalars):
        if declared.name not in used:
            fail("dsl-unused", f"`{declared.name}` is never read", declared.span)
    if op.mask and op.mask.name not in used:
        fail("dsl-unused", f"mask `{op.mask.name}` is never read", op.mask.span)


def check_merge(merge: Merge, imported: frozenset[str], taken: frozenset[str]) -> None:
    """Refuse a merge function that reads what it has not got."""
    refuse_reserved(merge.name, merge.span)
    body = Body(imported, taken, None)
    for name in merge.parameters:
        body.define(name, merge.span)
    for statement in merge.body:
        body.statement(statement)
    for expr in merge.result:
        body.value(expr)


def _check_names(op: Operator, taken: frozenset[str]) -> None:
    own = [(t.name, t.span) for t in (*op.tensors, *op.scalars)]
    own += [(op.mask.name, op.mask.span)] if op.mask else []
    refuse_reserved(op.name, op.span)
    for axis in op.axes:
        refuse_reserved(axis.name, axis.span)
    for loops in (*(derivation.loops for derivation in op.derivations), op.loops):
        variables = [(variable, loop.span) for loop in loops for variable in loop.variables]
        seen: set[str] = set()
        for name, span in own + variables:
            refuse_reserved(name, span)
            if name in taken or name in seen:
                fail("dsl-duplicate-name", f"`{name}` is taken", span)
            seen.add(name)
        _check_loops(loops)


def _check_loops(loops: tuple[Loop, ...]) -> None:
    seen: set[str] = set()
    for loop in loops:
        for axis in loop.axes:
            if axis in seen:
                fail("dsl-loop", f"`{axis}` is looped over twice", loop.span)
            seen.add(axis)


def _check_derivation(op: Operator, nest: Derivation, body: Body) -> None:
    """Each element gets one contribution, and what it reads gives every extent."""
    decl = op.tensor(nest.name)
    written = [line for line in nest.body if isinstance(line, Contribute)]
    if len(written) > 1:
        message = f"a nest before the last one writes one tensor, once: `{nest.name}`"
        fail("dsl-derived", message, written[1].span)
    if op.derivation(nest.name) is not nest:
        fail("dsl-derived", f"`{nest.name}` is written twice", nest.span)
    over = next((a for loop in nest.loops for a in loop.axes if a not in decl.axes), None)
    if over:
        help = "a derived tensor gets one contribution an element: sum over the axis with `sum`"
        fail("dsl-derived", f"`{nest.name}` does not carry `{over}`", nest.span, help)
    reads = [op.tensor(name) for name in nest.reads]
    known, dims = solvable(reads), {dim for tensor in reads for dim in tensor.dims}
    for dim in decl.dims:
        if not set(dim) <= known and dim not in dims:
            message = f"nothing that `{nest.name}` is derived from gives `{' * '.join(dim)}`"
            fail("dsl-derived", message, nest.span)
    for axis in op.axes:
        if axis.name in body.used and axis.name not in known:
            message = f"nothing that `{nest.name}` is derived from gives the extent `{axis.name}`"
            fail("dsl-derived", message, nest.span)


def _check_tensors(op: Operator) -> None:
    for what, found in (("input", op.inputs), ("output", op.outputs)):
        if not found:
            fail("dsl-parameter", f"`{op.name}` has no {what}", op.span)
    known = solvable(op.inputs)
    for axis in op.axes:
        if axis.name not in known:
            help = "an input must have a dimension from which it follows"
            fail("dsl-unbound-axis", f"no input gives the extent of `{axis.name}`", op.span, help)


def _check_together(op: Operator) -> None:
    seen: set[str] = set()
    for group in op.together:
        for name in group:
            if name not in {t.name for t in op.tensors}:
                help = closest(name, [t.name for t in op.tensors])
                fail("dsl-together", f"no tensor `{name}`", op.span, help)
            if name in seen:
                fail("dsl-together", f"`{name}` stands in `together` twice", op.span)
            seen.add(name)
        if len(group) < 2 or len({op.tensor(name).role == "output" for name in group}) > 1:
            message = "`together` takes two or more inputs, or two or more outputs"
            fail("dsl-together", message, op.span)


def _check_combine(op: Operator, combine: Combine) -> None:
    outputs = [t.name for t in op.outputs]
    for name in combine.outputs:
        if name not in outputs:
            help = closest(name, outputs)
            if name in [t.name for t in op.derived]:
                help = "a derived tensor gets one contribution an element"
            fail("dsl-combine", f"`{name}` is not an output", combine.span, help)
        if sum(c.outputs.count(name) for c in op.combines) > 1:
            fail("dsl-combine", f"`{name}` is combined twice", combine.span)
        if not op.reduced_axes(name):
            message = f"`{name}` carries every axis that is looped over: nothing to combine"
            fail("dsl-combine", message, combine.span)
    if len({frozenset(op.reduced_axes(name)) for name in combine.outputs}) != 1:
        message = "outputs that are combined as one must carry the same looped axes"
        fail("dsl-combine", message, combine.span)
    for name, value in zip(combine.outputs, combine.identity, strict=False):
        whole = isinstance(value, int) and abs(value) < 2**63
        if op.tensor(name).dtype == "integer" and not whole:
            fail("dsl-combine", f"{value} is no identity of integers `{name}`", combine.span)
    if combine.kind == "softmax":
        _check_softmax(op, combine)
    elif combine.merge:
        n, merge = len(combine.outputs), combine.merge
        counts = (len(merge.parameters), len(merge.result), len(combine.identity))
        if counts != (2 * n, n, n):
            message = f"for {n} outputs `{merge.name}` takes {2 * n} parameters and returns {n}"
            help = f"it takes {counts[0]} and returns {counts[1]}; {counts[2]} identities"
            fail("dsl-combine", message, combine.span, help)


def _check_softmax(op: Operator, combine: Combine) -> None:
    if len(combine.outputs) != 2:
        fail("dsl-combine", "`softmax` combines (out, lse)", combine.span)
    out, lse = (op.tensor(name) for name in combine.outputs)
    single = {a for loop in op.loops if loop.kind == "points" for a in loop.axes}
    tiled = [[dim for dim in t.dims if not set(dim) <= single] for t in (out, lse)]
    if tiled[0][:-1] != tiled[1] or "integer" in (out.dtype, lse.dtype):
        message = f"`{lse.name}` must have the tiled dimensions of `{out.name}` but the last"
        fail("dsl-combine", message, combine.span)


def _check_written(op: Operator) -> None:
    for tensor in op.derived:
        if tensor.name not in [derivation.name for derivation in op.derivations]:
            help = "a loop nest before the last one writes it"
            fail("dsl-derived", f"derived `{tensor.name}` is never written", tensor.span, help)
    for tensor in op.outputs:
        written = [s for s in op.body if isinstance(s, Contribute) and s.output == tensor.name]
        if not written:
            fail("dsl-output", f"output `{tensor.name}` is never written", tensor.span)
        if len(written) > 1:
            fail("dsl-output", f"`{tensor.name}` is written twice in one tile", written[1].span)
        reduced = op.reduced_axes(tensor.name)
        if reduced and op.combine_of(tensor.name) is None:
            message = f"`{tensor.name}` does not carry {', '.join(reduced)}, and no combine merges"
            help = f"write `combine({tensor.name}, by=sum)`, or what merges two contributions"
            fail("dsl-combine-missing", message, tensor.span, help)
