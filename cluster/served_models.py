"""The pools of every model: one for each set of weights that some replica of it has.

New requests go to the pool where most replicas serve, of equals to the newest weights: in a
rolling update that changes once, half way. Knows names and aliases; nothing of single requests.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..protos.errors import ModelNotFound
from ..protos.messages import ModelCard, ReplicaInfo, Weights
from .model_pool import ModelPool


@dataclass(frozen=True, slots=True)
class Election:
    """What an election changed. before, after: where new requests went and go. forsaken: pools
    whose weights no replica will serve again.
    """

    before: ModelPool
    after: ModelPool
    forsaken: tuple[ModelPool, ...]


class ServedModels:
    """By model, the pool that new requests go to first."""

    def __init__(self, make_pool: Callable[[ReplicaInfo, ModelCard], ModelPool]) -> None:
        self._make_pool = make_pool
        self._pools: dict[str, list[ModelPool]] = {}
        self._aliases: dict[str, str] = {}

    def __iter__(self) -> Iterator[ModelPool]:
        """Every pool of every model."""
        return iter([pool for pools in self._pools.values() for pool in pools])

    @property
    def names(self) -> tuple[str, ...]:
        """The models' own, in order."""
        return tuple(sorted(self._pools))

    @property
    def current(self) -> dict[str, ModelPool]:
        """By model, the pool that new requests go to."""
        return {model: pools[0] for model, pools in self._pools.items()}

    def name_of(self, model: str) -> str:
        """Its own name, of a name or an alias; raises ModelNotFound."""
        name = self._aliases.get(model, model)
        if name not in self._pools:
            raise ModelNotFound(model, self.names)
        return name

    def of(self, model: str) -> tuple[ModelPool, ...]:
        """The pools of a model, by its own name; none where it is not known."""
        return tuple(self._pools.get(model, ()))

    def find(self, model: str, weights: Weights | None) -> ModelPool | None:
        """Where a request goes that has begun with such weights, or with none yet; None where
        nobody has these any more. Raises ModelNotFound.
        """
        pools = self._pools[self.name_of(model)]
        if weights is None:
            return pools[0]
        for pool in pools:
            if pool.identity.weights == weights and (pool.num_serving or pool is pools[0]):
                return pool
        return None

    def pool_for(self, info: ReplicaInfo, card: ModelCard) -> ModelPool:
        """The pool that a replica belongs to, made where its weights are new; `elect` follows."""
        for alias in card.aliases:
            self._aliases[alias] = info.model
        pools = self._pools.setdefault(info.model, [])
        for pool in pools:
            if pool.identity == info.identity:
                pool.card = card
                return pool
        pool = self._make_pool(info, card)
        if pools:
            pool.gate.lengths = pools[0].gate.lengths  # outputs of other weights are as long
        pools.append(pool)
        return pool

    def elect(self, model: str) -> Election:
        """After replicas came, went or began to drain: which pool new requests go to now."""
        pools = self._pools[model]
        before = pools[0]
        pools.sort(key=_precedence, reverse=True)
        forsaken = tuple(pool for pool in pools[1:] if not pool.num_serving)
        return Election(before, pools[0], forsaken)

    def forget_empty(self, model: str) -> None:
        """Drop pools that no replica and no request needs; one always stays."""
        pools = self._pools[model]
        pools[1:] = [pool for pool in pools[1:] if pool.pool.replicas or len(pool.queue)]


def _precedence(pool: ModelPool) -> tuple[int, int]:
    return pool.num_serving, pool.identity.weights_version
