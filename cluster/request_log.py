"""One line of JSON per ended request, for who has to find out what became of it.

Holds ids, counts and times; never prompts, answers, keys or salts.
"""

import logging
from collections.abc import Mapping

_LOGGER = logging.getLogger("pagefleet.requests")


def log_request_end(fields: Mapping[str, object]) -> None:
    """A request is over."""
    _LOGGER.info("request ended", extra={"fields": fields})
