"""Who calls and what is theirs: from a call's credentials to a tenant, its salt and its rights.

Both fronts ask here before they do anything. Without keys everybody is who they say they are, and
may do everything; with keys a tenant is what its key says, and sees its own requests only.
"""

import hashlib
from dataclasses import dataclass, replace

from ..protos.errors import PermissionDenied, Unauthenticated
from .api_keys import ApiKey, KeyRing, TenantQuota
from .generation import GenerateCall

_SCHEME = "bearer "


@dataclass(frozen=True, slots=True)
class Caller:
    """An identified client. `key` None: this gateway has no keys."""

    tenant: str
    key: ApiKey | None = None

    @property
    def quota(self) -> TenantQuota | None:
        """Its tenant's bounds."""
        return None if self.key is None else self.key.quota

    def own(self, call: GenerateCall) -> GenerateCall:
        """The call as this caller's: its tenant, its quota, a cache that is not others'."""
        if self.key is None:
            return replace(call, tenant=self.tenant)
        scope = "" if self.key.shares_cache else self.tenant
        salt = scoped_salt(scope, call.cache_salt)
        return replace(call, tenant=self.tenant, quota=self.quota, cache_salt=salt)

    def require_admin(self) -> None:
        """Raises PermissionDenied for what concerns the whole cluster."""
        if self.key is not None and not self.key.is_admin:
            raise PermissionDenied("this needs an admin key")


class Access:
    """The door of a gateway."""

    def __init__(self, keys: KeyRing | None = None) -> None:
        self._keys = keys

    @property
    def is_open(self) -> bool:
        """No key is needed."""
        return self._keys is None

    def identify(self, authorization: str, claimed_tenant: str = "") -> Caller:
        """Who this is. `authorization`: "Bearer KEY", or empty. Raises Unauthenticated, or
        PermissionDenied where a tenant is claimed that is not the key's."""
        if self._keys is None:
            return Caller(claimed_tenant)
        if not authorization[: len(_SCHEME)].lower() == _SCHEME:
            raise Unauthenticated("an API key is needed: authorization: Bearer KEY")
        key = self._keys.find(authorization[len(_SCHEME) :].strip())
        if claimed_tenant and claimed_tenant != key.tenant:
            raise PermissionDenied("the API key is not of the tenant that is named")
        return Caller(key.tenant, key)


def scoped_salt(scope: str, salt: str) -> str:
    """A salt that no other scope can come by, whatever its clients send."""
    parts = [part.encode("utf-8", "surrogatepass") for part in (scope, salt)]
    data = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hashlib.blake2b(data, digest_size=16, person=b"pagefleet-salt").hexdigest()
