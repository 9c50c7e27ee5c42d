"""Logs as lines of JSON, for every process of a cluster. Knows no request."""

import json
import logging
import sys
from collections.abc import Mapping


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


def write_logs_as_json() -> None:
    """Let this process write pagefleet's logs as lines of JSON on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    ours = logging.getLogger("pagefleet")
    ours.handlers = [handler]
    ours.propagate = False
    ours.setLevel(logging.INFO)
