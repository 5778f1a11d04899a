"""Cursors of pages: opaque, and good only for the caller and the list that they were given for."""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from hashlib import blake2b

from falaj.errors import InvalidInput
from falaj.governance.operations.call import Call

MAC_BYTES = 12
_OF_PAGES = frozenset({"after", "limit"})
"""The parameters that differ from page to page of one list."""


class Cursors:
    """Writes positions in a list as cursors, and reads them again."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def write(self, call: Call, position: str) -> str:
        """Return the cursor of the list of `call` behind `position`."""
        data = position.encode()
        return _text(self._mac(call, data) + data)

    def read(self, call: Call, cursor: str) -> str:
        """Return the position in `cursor`, "" for the beginning; InvalidInput if it is not one of this list."""
        if not cursor:
            return ""
        try:
            raw = urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
            mac, data = raw[:MAC_BYTES], raw[MAC_BYTES:]
            if _text(raw) == cursor and hmac.compare_digest(mac, self._mac(call, data)):
                return data.decode()
        except ValueError:
            pass
        raise InvalidInput.at(
            "after",
            given=cursor,
            allowed="`next` of an earlier page of this list, for the same caller and conditions",
            fix="leave it out to begin with the first page",
        )

    def _mac(self, call: Call, position: bytes) -> bytes:
        conditions = call.given.model_dump_json(exclude=set(_OF_PAGES))
        state = blake2b(key=self._key, digest_size=MAC_BYTES)
        for part in (call.operation.name.encode(), call.caller.id.encode(), conditions.encode(), position):
            state.update(len(part).to_bytes(8, "big") + part)
        return state.digest()


def _text(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()
