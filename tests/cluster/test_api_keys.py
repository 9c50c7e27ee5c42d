"""Keys: their file, the environment, reloading, and what is never said."""

import json
import logging

import pytest

from pagefleet.cluster.api_keys import (
    ApiKey,
    KeyRing,
    KeysError,
    TenantQuota,
    digest_of,
    keys_from_environment,
    new_key,
    read_key_file,
)
from pagefleet.protos.errors import Unauthenticated

KEY = "pf-0123456789abcdefghij"


def write(path, *entries: dict[str, object]) -> None:
    path.write_text(json.dumps({"keys": list(entries)}))


def entry(tenant: str, key: str, **more: object) -> dict[str, object]:
    return {"tenant": tenant, "sha256": digest_of(key).hex()} | more


def test_reads_a_file(tmp_path):
    path = tmp_path / "keys.json"
    quota = {"requests_per_minute": 60, "max_concurrent_requests": 2}
    write(path, entry("acme", KEY, admin=True, cache="shared", quota=quota))
    (found,) = read_key_file(path)
    assert found == ApiKey("acme", digest_of(KEY), True, True, TenantQuota(60.0, None, None, 2))


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"keys": [{"tenant": "a"}]}', '{"keys": [], "kes": []}', "pf-my-secret-key"],
)
def test_refuses_a_broken_file_without_quoting_it(tmp_path, content):
    path = tmp_path / "keys.json"
    path.write_text(content)
    with pytest.raises(KeysError) as caught:
        KeyRing(file=path)
    assert "secret" not in str(caught.value)


def test_a_file_of_another_shape_is_told_the_right_one(tmp_path):
    path = tmp_path / "keys.json"
    path.write_text('{"tenant": "a", "sha256": "0"}')
    with pytest.raises(KeysError, match=r'is not \{"keys": \[ENTRY'):
        KeyRing(file=path)


def test_a_hash_in_the_wrong_place_is_not_quoted(tmp_path):
    path = tmp_path / "keys.json"
    write(path, {"tenant": "a", "sha256": "pf-my-secret-key"})
    with pytest.raises(KeysError, match=r"keys\.0\.sha256") as caught:
        read_key_file(path)
    assert "secret" not in str(caught.value)


def test_finds_only_what_is_there():
    ring = KeyRing([ApiKey("a", digest_of(KEY)), ApiKey("b", digest_of(KEY + "b"))])
    assert (ring.find(KEY).tenant, ring.find(KEY + "b").tenant) == ("a", "b")
    for wrong in ("", KEY[:-1], KEY + " ", "\udcff"):
        with pytest.raises(Unauthenticated) as caught:
            ring.find(wrong)
        assert KEY[:-1] not in str(caught.value)


def test_refuses_contradictions():
    with pytest.raises(KeysError, match="same key"):
        KeyRing([ApiKey("a", digest_of(KEY)), ApiKey("b", digest_of(KEY))])
    with pytest.raises(KeysError, match="differ"):
        KeyRing([ApiKey("a", digest_of(KEY)), ApiKey("a", digest_of("x"), quota=TenantQuota(1.0))])
    with pytest.raises(KeysError, match="no API key"):
        KeyRing()


def test_follows_its_file(tmp_path, caplog):
    path, now = tmp_path / "keys.json", [0.0]
    write(path, entry("a", KEY))
    ring = KeyRing(file=path, clock=lambda: now[0])
    write(path, entry("a", KEY + "-new"))
    now[0] = 2.0
    assert ring.find(KEY + "-new").tenant == "a"
    with pytest.raises(Unauthenticated):
        ring.find(KEY)
    path.write_text("broken")
    now[0] = 4.0
    with caplog.at_level(logging.ERROR):
        assert ring.find(KEY + "-new").tenant == "a"
    assert "stay as they were" in caplog.text


def test_environment():
    found = keys_from_environment({"PAGEFLEET_API_KEYS": f"a={KEY}, b={KEY}="})
    assert [key.tenant for key in found] == ["a", "b"]
    assert found[1].digest == digest_of(KEY + "=")
    for wrong in (KEY, f"={KEY}", "a=short"):
        with pytest.raises(KeysError) as caught:
            keys_from_environment({"PAGEFLEET_API_KEYS": wrong})
        assert KEY not in str(caught.value)


def test_new_keys_differ():
    assert len({new_key() for _ in range(10)}) == 10
