"""The file of tokens: who calls with which, and what for. Knows no call.

A line for each, `NAME SCOPE,SCOPE TOKEN`; `#` begins a comment. One name may have several tokens, of which one may go
once the other is in use.
"""

import hashlib
import hmac
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from blockplane.protos.access import read_file
from blockplane.protos.errors import BlockplaneError, ConfigurationError

logger = logging.getLogger(__name__)

SCOPES = frozenset({"client", "admin", "peer"})
MIN_TOKEN_LENGTH = 16
"""Characters; shorter ones can be guessed."""
_LOOK_SECONDS = 1.0
"""How often, at most, it is looked whether the file has changed."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who calls, and what for: `scopes` are some of SCOPES."""

    name: str
    scopes: frozenset[str]


class Tokens:
    """What the file says, as of a second ago."""

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigurationError if the file cannot be read, or a line is not understood."""
        self._path, self._clock = path, clock
        self._signature = self._sign()
        self._identities = dict(_identities(path))
        """By the token's digest: whoever reads our memory has no token."""
        self._look_at = clock() + _LOOK_SECONDS
        if os.stat(path).st_mode & stat.S_IROTH:
            logger.warning("whoever is on this machine can read %s; `chmod o-r` it", path)

    def identity(self, token: str) -> Identity | None:
        """Whose token it is; None = nobody's. It takes as long whatever the token has in common with others."""
        if self._clock() >= self._look_at:
            self._look_again()
        digest, found = _digest(token), None
        for known, identity in self._identities.items():
            if hmac.compare_digest(known, digest):
                found = identity
        return found

    def _look_again(self) -> None:
        self._look_at = self._clock() + _LOOK_SECONDS
        signature = self._sign()
        if signature == self._signature:
            return
        self._signature = signature
        try:
            self._identities = dict(_identities(self._path))
        except BlockplaneError as error:
            logger.error("going on with the tokens of before: %s", error)
        else:
            logger.info("%s has %d tokens now", self._path, len(self._identities))

    def _sign(self) -> tuple[int, ...]:
        """What is another once the file is another."""
        try:
            status = os.stat(self._path)
        except OSError:
            return ()
        return status.st_mtime_ns, status.st_size, status.st_ino


def _identities(path: str) -> Iterator[tuple[bytes, Identity]]:
    text = read_file("tokens", path).decode(errors="replace")
    seen = set()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        # No line is shown: it may hold a token.
        place = f"line {number} of {path}"
        if len(words) != 3:
            raise ConfigurationError(f"{place} has {len(words)} words; write NAME SCOPE,SCOPE TOKEN.")
        name, scopes, token = words
        if unknown := {*scopes.split(",")} - SCOPES:
            raise ConfigurationError(f"{place} has the scope {min(unknown)!r}; choose of {', '.join(sorted(SCOPES))}.")
        if len(token) < MIN_TOKEN_LENGTH:
            raise ConfigurationError(
                f"{place} has a token of {len(token)} characters; draw one of {MIN_TOKEN_LENGTH} at least, such as by"
                " `openssl rand -hex 32`."
            )
        digest = _digest(token)
        if digest in seen:
            raise ConfigurationError(f"{place} has a token that a line before has; draw another.")
        seen.add(digest)
        yield digest, Identity(name, frozenset(scopes.split(",")))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
