"""API keys: who a client is. Keys are known by their SHA-256 alone, here and in the key file.

    {"keys": [{"tenant": "acme", "sha256": "<64 hex digits>", "admin": false, "cache": "private",
               "quota": {"requests_per_minute": 600, "tokens_per_minute": 100000,
                         "block_seconds_per_minute": 5000, "max_concurrent_requests": 32}}]}

A tenant may have several keys. The file is read again when it changes, so keys can be exchanged
without a restart; one that cannot be read changes nothing. Knows no request and no protocol.
"""

import hashlib
import hmac
import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..protos.errors import Unauthenticated

logger = logging.getLogger(__name__)

KEYS_VARIABLE = "PAGEFLEET_API_KEYS"
_MIN_KEY_CHARACTERS = 20
_CHECK_PERIOD_S = 1.0


class SecurityError(Exception):
    """A gateway cannot be guarded as it was told to be; the message holds no secret."""


class KeysError(SecurityError):
    """The keys cannot be used; the message says where and why, and holds no key."""


@dataclass(frozen=True, slots=True)
class TenantQuota:
    """Upper bounds for one tenant at one gateway; None = no bound.

    block_seconds: KV blocks times the seconds that a request holds them.
    """

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    block_seconds_per_minute: float | None = None
    max_concurrent_requests: int | None = None


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key's hash and what it opens.

    is_admin: may see the whole cluster and change it. shares_cache: its tenant's prefixes may be
    reused by other tenants that share too, and its timing can tell them so.
    """

    tenant: str
    digest: bytes
    is_admin: bool = False
    shares_cache: bool = False
    quota: TenantQuota = TenantQuota()


class KeyRing:
    """The keys of a gateway."""

    def __init__(
        self,
        keys: Sequence[ApiKey] = (),
        file: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`keys` are always valid, those of the file besides them. Raises KeysError."""
        self._fixed = tuple(keys)
        self._file = file
        self._clock = clock
        self._checked_at = clock()
        self._stamp = None if file is None else _stamp(file)
        self._keys = _consistent((*keys, *(() if file is None else read_key_file(file))))
        if not self._keys:
            raise KeysError("there is no API key")

    def find(self, key: str) -> ApiKey:
        """The entry of a client's key. Raises Unauthenticated.

        Every entry is compared in full: the time tells nothing of the keys.
        """
        self._reload()
        digest = digest_of(key)
        found: ApiKey | None = None
        for entry in self._keys:
            if hmac.compare_digest(entry.digest, digest):
                found = entry
        if found is None:
            raise Unauthenticated("the API key is not known")
        return found

    def _reload(self) -> None:
        now = self._clock()
        if self._file is None or now - self._checked_at < _CHECK_PERIOD_S:
            return
        self._checked_at = now
        stamp = _stamp(self._file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = _consistent((*self._fixed, *read_key_file(self._file)))
            logger.info("read %d API keys again", len(self._keys))
        except KeysError as error:
            logger.error("the API keys stay as they were: %s", error)


def digest_of(key: str) -> bytes:
    """What is stored of a key. Plain SHA-256: keys are random, there is nothing to guess."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def new_key() -> str:
    """A key with 256 random bits."""
    return f"pf-{secrets.token_urlsafe(32)}"


def keys_from_environment(environment: Mapping[str, str]) -> tuple[ApiKey, ...]:
    """`PAGEFLEET_API_KEYS`: "tenant=key", several with commas between. Raises KeysError."""
    found: list[ApiKey] = []
    for number, entry in enumerate(environment.get(KEYS_VARIABLE, "").split(","), 1):
        if not entry.strip():
            continue
        tenant, separator, key = entry.strip().partition("=")
        if not separator or not tenant:
            raise KeysError(f"{KEYS_VARIABLE}: entry {number} is not written as tenant=key")
        if len(key) < _MIN_KEY_CHARACTERS:
            raise KeysError(
                f"{KEYS_VARIABLE}: the key of {tenant} has fewer than {_MIN_KEY_CHARACTERS} "
                "characters"
            )
        found.append(ApiKey(tenant, digest_of(key)))
    return tuple(found)


class _QuotaEntry(BaseModel):
    model_config = ConfigDict(extra="forbid")

    requests_per_minute: float | None = Field(default=None, gt=0)
    tokens_per_minute: float | None = Field(default=None, gt=0)
    block_seconds_per_minute: float | None = Field(default=None, gt=0)
    max_concurrent_requests: int | None = Field(default=None, gt=0)


class _KeyEntry(BaseModel):
    model_config = ConfigDict(extra="forbid")

    tenant: str = Field(min_length=1, max_length=256)
    sha256: str = Field(pattern="^[0-9a-fA-F]{64}$")
    admin: bool = False
    cache: Literal["private", "shared"] = "private"
    quota: _QuotaEntry = _QuotaEntry()


class _KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: list[_KeyEntry]


def read_key_file(path: Path) -> tuple[ApiKey, ...]:
    """The entries of a key file. Raises KeysError."""
    try:
        content = _KeyFile.model_validate(json.loads(path.read_text("utf-8")))
    except OSError as error:
        raise KeysError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        if len(first["loc"]) < 2:
            entry = "ENTRY is what `pagefleet keys` prints"
            raise KeysError(f'{path}: is not {{"keys": [ENTRY, …]}}; {entry}') from None
        raise KeysError(f"{path}: {where}: {first['msg']}") from None
    except ValueError:
        # no chaining: a parser's error quotes what it read, and that may be a key
        raise KeysError(f"{path}: is no JSON") from None
    return tuple(map(_from_entry, content.keys))


def _from_entry(entry: _KeyEntry) -> ApiKey:
    quota = entry.quota
    return ApiKey(
        entry.tenant,
        bytes.fromhex(entry.sha256),
        entry.admin,
        entry.cache == "shared",
        TenantQuota(
            quota.requests_per_minute,
            quota.tokens_per_minute,
            quota.block_seconds_per_minute,
            quota.max_concurrent_requests,
        ),
    )


def _consistent(keys: tuple[ApiKey, ...]) -> tuple[ApiKey, ...]:
    """One hash, one tenant; one tenant, one quota."""
    if len({key.digest for key in keys}) < len(keys):
        raise KeysError("two entries have the same key")
    first: dict[str, ApiKey] = {}
    for key in keys:
        known = first.setdefault(key.tenant, key)
        if (known.quota, known.shares_cache) != (key.quota, key.shares_cache):
            raise KeysError(f"the keys of {key.tenant} differ in quota or cache")
    return keys


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Changes whenever the file does; None while it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
