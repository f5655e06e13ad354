"""One module per directive: `refuse(program, directive)` and `rewrite(program, directive)`.

`refuse` is cheap and formats nothing: the search refuses thousands. `rewrite` cannot fail on what
`refuse` lets pass. What involves several directives is checked once all are in, by
`mercurygen.schedule.complete`.
"""

from mercurygen.schedule import directives as d
from mercurygen.schedule.rules import (
    border,
    join,
    order,
    parallelize,
    patch,
    pin,
    reorder,
    replicate,
    shard,
    shift,
    tile,
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
    d.Tile: tile,
    d.Join: join,
    d.Reorder: reorder,
}
