"""The models a gateway can serve now: their cards from the controller, their tokenizers from disk.

Knows names and aliases; nothing of requests. Cards are asked for again in the background, and at
once when a name is not known, so a model is there as soon as its first replica is.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..protos.errors import (
    InternalError,
    InvalidArgument,
    ModelNotFound,
    PagefleetError,
    Unavailable,
)
from ..protos.messages import ModelCard
from .controller_client import ControllerClient
from .gateway_spec import OnDemand
from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_REFRESH_S = 2.0
_NO_REPLICA_RETRY_S = 2.0
_MIN_REFRESH_S = 0.2  # unknown names must not become a flood of questions

LoadTokenizer = Callable[[Path], Tokenizer]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model's card and what turns text into its tokens."""

    card: ModelCard
    tokenizer: Tokenizer


class ModelCatalog:
    """Names to served models."""

    def __init__(
        self,
        controller: ControllerClient,
        load_tokenizer: LoadTokenizer = Tokenizer.load,
        clock: Callable[[], float] = time.monotonic,
        on_demand: OnDemand | None = None,
    ) -> None:
        self._controller = controller
        self._load_tokenizer = load_tokenizer
        self._clock = clock
        self._on_demand = on_demand or OnDemand()
        self._held: Counter[str] = Counter()
        self._cards: tuple[ModelCard, ...] = ()
        self._tokenizers: dict[str, asyncio.Future[Tokenizer]] = {}
        self._refreshed: float | None = None

    @property
    def is_ready(self) -> bool:
        """Some model can be asked."""
        return bool(self._cards) or (bool(self._on_demand.models) and self._refreshed is not None)

    @property
    def held(self) -> dict[str, int]:
        """Requests by model that wait for its first card."""
        return {model: count for model, count in self._held.items() if count}

    async def run(self) -> None:
        """Keep the cards fresh, for ever."""
        while True:
            try:
                await self.refresh()
            except PagefleetError as error:
                logger.warning("asking for the models: %s", error)
            await asyncio.sleep(_REFRESH_S)

    async def refresh(self) -> None:
        """Ask the controller."""
        self._cards = await self._controller.model_cards()
        self._refreshed = self._clock()

    async def resolve(self, name: str) -> ServedModel:
        """The model of that name or alias; an empty name is the only model there is.

        Waits for one that comes on demand. Raises Unavailable while no model has a replica,
        ModelNotFound, InvalidArgument.
        """
        card = await self._look_up(name)
        expected = self._expected(name) if card is None else None
        if expected is not None:
            card = await self._hold(expected)
        if card is not None:
            return ServedModel(card, await self._tokenizer(card))
        known = tuple(card.model for card in self._cards)
        if not known:
            raise Unavailable("no replica is ready", retry_after_s=_NO_REPLICA_RETRY_S)
        if not name:
            raise InvalidArgument("model", f"is empty and several are served: {', '.join(known)}")
        raise ModelNotFound(name, known)

    def comes_on_demand(self, model: str) -> bool:
        """Whether a replica of it comes when somebody asks."""
        return model in self._on_demand.models

    async def wait_again(self, model: str) -> None:
        """The controller has forgotten the model, as it does when it restarts while there is no
        replica: wait as for the first one. Raises Unavailable where none comes in time."""
        self._cards = tuple(card for card in self._cards if card.model != model)
        await self._hold(model)

    async def all(self) -> tuple[ServedModel, ...]:
        """Every model; those known before, while the controller is away."""
        try:
            await self.refresh()
        except Unavailable:
            if not self._cards:
                raise
        return tuple([ServedModel(card, await self._tokenizer(card)) for card in self._cards])

    async def _look_up(self, name: str) -> ModelCard | None:
        card = self._find(name)
        if card is None and self._may_refresh():
            await self.refresh()
            card = self._find(name)
        return card

    def _expected(self, name: str) -> str | None:
        """The model on demand that is meant."""
        models = self._on_demand.models
        if not name:
            return models[0] if len(models) == 1 and not self._cards else None
        return name if name in models else None

    async def _hold(self, model: str) -> ModelCard:
        """Until it has a card. Whoever decides how many replicas there are sees `held`."""
        self._held[model] += 1
        try:
            async with asyncio.timeout(self._on_demand.hold_s):
                while True:
                    with suppress(Unavailable):  # the controller restarts
                        card = await self._look_up(model)
                        if card is not None:
                            return card
                    await asyncio.sleep(_MIN_REFRESH_S)
        except TimeoutError:
            problem = f"no replica of {model} came within {self._on_demand.hold_s:g} s"
            raise Unavailable(problem, retry_after_s=_NO_REPLICA_RETRY_S) from None
        finally:
            self._held[model] -= 1

    def _find(self, name: str) -> ModelCard | None:
        if not name:
            return self._cards[0] if len(self._cards) == 1 else None
        return next((c for c in self._cards if name == c.model or name in c.aliases), None)

    def _may_refresh(self) -> bool:
        return self._refreshed is None or self._clock() - self._refreshed >= _MIN_REFRESH_S

    async def _tokenizer(self, card: ModelCard) -> Tokenizer:
        """Loaded once per folder, in a thread: it can take a second."""
        loading = self._tokenizers.get(card.tokenizer_dir)
        if loading is None:
            work = asyncio.to_thread(self._load_tokenizer, Path(card.tokenizer_dir))
            loading = self._tokenizers[card.tokenizer_dir] = asyncio.ensure_future(work)
        try:
            # One caller's cancellation must not take the tokenizer from the others.
            return await asyncio.shield(loading)
        except (OSError, ValueError) as error:
            self._tokenizers.pop(card.tokenizer_dir, None)
            logger.error("the tokenizer of %s cannot be read: %s", card.model, error)
            problem = f"the tokenizer of {card.model} cannot be read"
            raise InternalError(problem) from error
