"""One JSON object with typed access. Errors name the file and the field; knows no field's name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from .config import ModelError


class ConfigFields:
    """Fields by name; null counts as absent.

    defaults: for fields that are not there at all; null is what it says.
    """

    def __init__(
        self,
        values: dict[str, object],
        source: str,
        defaults: Mapping[str, object] | None = None,
    ) -> None:
        self.values = {**(defaults or {}), **values}
        self.source = source

    @classmethod
    def read(cls, path: Path) -> "ConfigFields":
        """Parse a JSON file."""
        try:
            values: object = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ModelError(f"{path} does not exist: not a checkpoint folder") from None
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ModelError(f"{path} is not valid JSON: {error}") from None
        if not isinstance(values, dict):
            raise ModelError(f"{path} does not hold a JSON object")
        return cls(cast(dict[str, object], values), str(path))

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive whole number."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(name, "a positive whole number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.wrong(name, "a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str, default: str) -> str:
        """A string."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id, a list of them, or nothing."""
        value = self.values.get(name)
        ids = cast(list[object], value) if isinstance(value, list) else [value]
        if value is None:
            return ()
        if not all(isinstance(item, int) and item >= 0 for item in ids):
            raise self.wrong(name, "a token id or a list of them")
        return tuple(cast(list[int], ids))

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers, empty where the field is absent."""
        return self.token_ids(name)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """A list of that many positive numbers."""
        items = self._list(name)
        if len(items) != count or not all(isinstance(i, int | float) and i > 0 for i in items):
            raise self.wrong(name, f"a list of {count} positive numbers")
        return tuple(float(item) for item in cast(list[float], items))

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings, empty where the field is absent."""
        if not self.has(name):
            return ()
        items = self._list(name)
        if not all(isinstance(item, str) for item in items):
            raise self.wrong(name, "a list of strings")
        return tuple(cast(list[str], items))

    def section(self, name: str) -> "ConfigFields | None":
        """A nested object, or None where it is absent or null."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return ConfigFields(cast(dict[str, object], value), f"{self.source}, {name}")

    def wrong(self, name: str, wanted: str) -> ModelError:
        """The error to raise for a field that is not what it should be."""
        return ModelError(f"{self.source}: {name} is {self.values.get(name)!r}, not {wanted}")

    def _list(self, name: str) -> list[object]:
        value = self._get(name, None)
        if not isinstance(value, list):
            raise self.wrong(name, "a list")
        return cast(list[object], value)

    def _get(self, name: str, default: object) -> object:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.source}: {name} is missing")
        return value
