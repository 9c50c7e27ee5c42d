"""Updates of the cluster's view as JSON for the page: the names are those of `ClusterView`.

Knows values, not what they mean. Bytes become base64; what is not for the outside is left out.
"""

import base64
import math
from dataclasses import fields, is_dataclass
from typing import cast

from ..cluster_watch import ClusterUpdate

_INTERNAL = frozenset({"address"})  # stays inside the cluster


def update_to_json(update: ClusterUpdate) -> dict[str, object]:
    """One event of the page's stream."""
    view = cast("dict[str, object]", _to_json(update.view))
    rates = cast("dict[str, object]", _to_json(update.rates))
    hits = {"query_tokens": update.query_tokens, "hit_tokens": update.hit_tokens}
    return view | {"rates": rates | hits}


def _to_json(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, tuple):
        return [_to_json(item) for item in cast("tuple[object, ...]", value)]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if is_dataclass(value):
        names = (field.name for field in fields(value) if field.name not in _INTERNAL)
        return {name: _to_json(getattr(value, name)) for name in names}
    return value
