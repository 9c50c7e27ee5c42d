"""One line of JSON per ended request, for who has to find out what became of it.

Holds ids, counts and times; never prompts, answers, keys or salts.
"""

import json
import logging
import sys
from collections.abc import Mapping

_LOGGER = logging.getLogger("pagefleet.requests")


class JsonFormatter(logging.Formatter):
    """A record as one JSON object; fields given as `extra={"fields": …}` stand at its top."""

    def format(self, record: logging.LogRecord) -> str:
        """See Formatter."""
        line: dict[str, object] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        fields: Mapping[str, object] = getattr(record, "fields", {})
        line.update(fields)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_request_end(fields: Mapping[str, object]) -> None:
    """A request is over."""
    _LOGGER.info("request ended", extra={"fields": fields})


def write_logs_as_json() -> None:
    """Let this process write its logs as lines of JSON on stderr, ended requests among them."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    ours = logging.getLogger("pagefleet")
    ours.handlers = [handler]
    ours.propagate = False
    ours.setLevel(logging.INFO)
