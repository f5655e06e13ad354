"""One module per directive: `refuse(program, directive)` and `rewrite(program, directive)`.

`refuse` is cheap and formats nothing: the search refuses thousands. `rewrite` cannot fail on what
`refuse` lets pass. What involves several directives is checked once all are in, by
`mercurygen.schedule.complete`.
"""

from mercurygen.schedule import directives as d
from mercurygen.schedule.rules import (
    border,
    later,
    order,
    parallelize,
    patch,
    pin,
    replicate,
    shard,
    shift,
)

RULES = {
    d.OrderTokens: order,
    d.Pin: pin,
    d.Reshard: border,
    d.Parallelize: parallelize,
    d.Shard: shard,
    d.Replicate: replicate,
    d.Shift: shift,
    d.Patch: patch,
    d.Tile: later,
    d.Join: later,
    d.Reorder: later,
}
