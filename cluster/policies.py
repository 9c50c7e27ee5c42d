"""The routing policies by name."""

from .binding_costs import LateBindingConfig
from .late_binding import LateBinding
from .routing_baselines import BASELINES
from .routing_policy import PolicyFactory, RoutingPolicy

_FACTORIES: dict[str, PolicyFactory] = {baseline.name: baseline for baseline in BASELINES}
POLICY_NAMES = ("default", *_FACTORIES)


def make_policy(name: str, late_binding: LateBindingConfig) -> RoutingPolicy:
    """A fresh policy of that name; ValueError if there is none."""
    if name == LateBinding.name:
        return LateBinding(late_binding)
    factory = _FACTORIES.get(name)
    if factory is None:
        raise ValueError(f"policy {name!r} is not one of {', '.join(POLICY_NAMES)}")
    return factory()
