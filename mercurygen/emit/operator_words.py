"""What the text of a user's operator needs to know: names that are free, and how axes are dealt."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from mercurygen.emit.words import variable
from mercurygen.ir.expr import Call, Expr, Index, Name, children, walk
from mercurygen.ir.operator import Assign, Operator
from mercurygen.ir.program import Program, Tensor
from mercurygen.lower.plan import Gather, Plan, Walk

State = dict[str, str | None]  # per dimension of an axis' order: whose part, or None for all


@dataclass(frozen=True)
class Words:
    """A plan and its operator, and the words of the module about them."""

    plan: Plan
    operator: Operator

    @property
    def program(self) -> Program:
        """The plan's program."""
        return self.plan.program

    # --- names ----------------------------------------------------------------------------------

    @cached_property
    def taken(self) -> frozenset[str]:
        """Names that the operator's own lines use: none of ours may be one of them."""
        op = self.operator
        names = {op.name, *(t.name for t in op.tensors), *(s.name for s in op.scalars)}
        names |= {axis.name for axis in op.axes} | set(self.dsl_words)
        names |= {op.mask.name} if op.mask else set()
        names |= {v for loop in op.loops for v in loop.variables}
        names |= {line.target for line in op.body if isinstance(line, Assign)}
        names |= {c.merge.name for c in op.combines if c.merge}
        return frozenset(names)

    def free(self, name: str) -> str:
        """The name, or one like it that the operator does not use."""
        while name in self.taken:
            name += "_"
        return name

    def group(self, dim: str) -> str:
        """The variable of a dimension's process group."""
        return self.free(variable(dim))

    def owner(self, dim: str) -> str:
        """The variable of the rank whose tile is here, along a dimension."""
        walks = self.plan.nest.walks
        return self.free("owner" if len(walks) == 1 else f"{dim}_owner")

    @cached_property
    def expressions(self) -> tuple[Expr, ...]:
        """Every expression of the operator's lines and merge functions."""
        found: list[Expr] = [line.value for line in self.operator.body]
        for combine in self.operator.combines:
            if combine.merge:
                found += [line.value for line in combine.merge.body]
                found += combine.merge.result
        return tuple(found)

    @cached_property
    def dsl_words(self) -> tuple[str, ...]:
        """Words of the language that the lines use, sorted: functions, `inf`, `position`."""
        found = set()
        for expr in self.expressions:
            for node in walk(expr):
                if isinstance(node, Call):
                    found.add(node.function)
                elif isinstance(node, Name) and node.id == "inf":
                    found.add("inf")
        return tuple(sorted(found))

    @cached_property
    def positioned(self) -> tuple[str, ...]:
        """Loop variables whose global positions the lines ask for."""
        found: dict[str, None] = {}
        for expr in self.expressions:
            for node in walk(expr):
                if isinstance(node, Call) and node.function == "position":
                    found[node.args[0].id] = None
        return tuple(v for v in self.axis_of if v in found)

    @cached_property
    def axis_of(self) -> dict[str, str]:
        """The axis of every loop variable."""
        loops = self.operator.loops
        return {v: a for x in loops for v, a in zip(x.variables, x.axes, strict=True)}

    @cached_property
    def variable_of(self) -> dict[str, str]:
        """The loop variable of every axis that is looped over."""
        return {axis: variable for variable, axis in self.axis_of.items()}

    @cached_property
    def points(self) -> tuple[str, ...]:
        """Loop variables that are single indices."""
        loops = self.operator.loops
        return tuple(v for loop in loops if loop.kind == "points" for v in loop.variables)

    @cached_property
    def placed(self) -> tuple[str, ...]:
        """Axes whose global positions the body is given, in the order of the loops."""
        masked = self.operator.mask.axes if self.operator.mask else ()
        asked = {self.axis_of[v] for v in self.positioned}
        return tuple(a for a in self.operator.loop_axes if a in asked or a in masked)

    def at(self, axis: str) -> str:
        """The variable of an axis' global positions."""
        return self.free(f"at_{self.variable_of[axis]}")

    @cached_property
    def extents(self) -> tuple[str, ...]:
        """Axes that the lines name: their extents over all ranks."""
        return tuple(a.name for a in self.operator.axes if self._named(a.name))

    def _named(self, axis: str) -> bool:
        indices = [n for line in self.operator.body for n in getattr(line, "index", ())]
        return any(
            isinstance(node, Name) and node.id == axis
            for expr in (*self.expressions, *indices)
            for node in walk(expr)
        )

    @cached_property
    def values(self) -> frozenset[str]:
        """Axes whose extents are part of a value, not only of a subscript of a tensor."""
        found: set[str] = set()

        def visit(expr) -> None:
            if isinstance(expr, Name):
                found.add(expr.id)
            elif isinstance(expr, Index) and isinstance(expr.base, Name):
                return
            else:
                for child in children(expr):
                    visit(child)

        for expr in self.expressions:
            visit(expr)
        return frozenset(found & {axis.name for axis in self.operator.axes})

    # --- tensors --------------------------------------------------------------------------------

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The inputs' names, in the order of the signature."""
        return tuple(t.name for t in self.operator.inputs)

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """The outputs' names, in the order of the program."""
        return tuple(t.name for t in self.program.outputs)

    @cached_property
    def floating(self) -> tuple[str, ...]:
        """Inputs that are no integers."""
        return tuple(t.name for t in self.operator.inputs if t.dtype != "integer")

    def shape(self, tensor: Tensor) -> str:
        """`[B, S, H * G, D]`"""
        return "[" + ", ".join(" * ".join(dim) for dim in tensor.dims) + "]"

    def order_dims(self, axis: str) -> tuple[str, ...]:
        """The dimensions that an axis is dealt over, the most significant first."""
        atoms, program = self.plan.atoms, self.program
        if axis in program.mask_axes:
            return program.order.dims
        return max(
            (atoms.split(t, axis) for t in program.tensors if t.carries(axis)),
            key=len,
            default=(),
        )

    def order_kind(self, axis: str) -> str:
        """How an axis is dealt."""
        return self.program.order.kind if axis in self.program.mask_axes else "contiguous"

    def stored(self, tensor: Tensor, axis: str) -> State:
        """Whose part of an axis of a tensor a rank has before anything moves."""
        split = {d for d in self.program.mesh.names if self.program.stored(tensor, d) == axis}
        return {d: "mine" if d in split else None for d in self.order_dims(axis)}

    def here(self, axis: str) -> State:
        """Whose part of an axis the body works on."""
        owners = self.owners(axis)
        return {
            d: "mine" if self.program.parallel_axis(d) == axis else owners.get(d)
            for d in self.order_dims(axis)
        }

    def owners(self, axis: str) -> State:
        """Per dimension along which an axis is walked, the variable of the owner."""
        return {
            w.dim: self.owner(w.dim)
            for loop in self.plan.nest.loops
            if loop.axis == axis
            for w in loop.walks
        }

    def result(self, tensor: Tensor, axis: str) -> State:
        """Whose part of an axis the results have while tiles are merged into them."""
        here = self.here(axis)
        home = {w.dim for x in self.plan.nest.loops if tensor.name in x.outputs for w in x.walks}
        return {d: who if who == "mine" or d in home else None for d, who in here.items()}

    def ways(self, state: State) -> int:
        """Ranks that share an axis, where a state says whose part it is."""
        return prod(self.program.mesh.extent(d) for d, who in state.items() if who)

    def count(self, axis: str, state: State) -> int:
        """Chunks of an axis in a part."""
        order = self.program.order
        halves = order.halves if axis in self.program.mask_axes else 1
        dims = self.order_dims(axis)
        return halves * prod(self.program.mesh.extent(d) for d in dims if not state.get(d))

    def chunks(self, axis: str, state: State) -> str:
        """Text of the list of chunks of a part."""
        mesh, dims = self.program.mesh, self.order_dims(axis)
        places = []
        for d in dims:
            who = state.get(d)
            mine = f"{self.group(d)}.rank()"
            places.append(
                f'range(MESH["{d}"])' if who is None else f"[{mine if who == 'mine' else who}]"
            )
        if not dims:
            return "[0]"
        if len(dims) == 1 and self.order_kind(axis) != "zigzag":
            return places[0] if state.get(dims[0]) else f"[*range({mesh.extent(dims[0])})]"
        return f"{self.chunks_function(axis)}({', '.join(places)})"

    def chunks_function(self, axis: str) -> str:
        """The function that lists an axis' chunks; those of the mask share one."""
        return "_chunks" if axis in self.program.mask_axes else f"_chunks_{axis}"

    @cached_property
    def gathers(self) -> tuple[Gather, ...]:
        """Every gather of the nest."""
        return tuple(s for s in self.plan.nest.stages if isinstance(s, Gather))

    @cached_property
    def walks(self) -> tuple[Walk, ...]:
        """Every walk of the nest."""
        return tuple(w for loop in self.plan.nest.loops for w in loop.walks)
