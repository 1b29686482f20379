"""Retry: repeating of a request that a store did not answer well, with growing pauses and a stated end."""

from __future__ import annotations

import functools
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from ..errors import EchelonError, StoreError

T = TypeVar("T")

_FINAL: Final = (
    *(FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, EchelonError),
    *(TypeError, ValueError, AttributeError, NotImplementedError, MemoryError, ImportError),
)
"""Errors that the same request would get again."""
_REFUSED: Final = re.compile(
    r"AccessDenied|Forbidden|Unauthorized|InvalidAccessKeyId|SignatureDoesNotMatch|NoCredentials|"
    r"Unable to locate credentials|RequestTimeTooSkewed|Invalid bucket name|PermanentRedirect|authentic",
    re.IGNORECASE,
)
_EXPIRED: Final = re.compile(r"expired|InvalidToken|TokenRefresh|Bad Request", re.IGNORECASE)
"""S3 says no more than ``400 Bad Request`` where an answer has no body, as one about the size of an object."""
_SECRET: Final = re.compile(
    r"(?i)((?:secret|token|password|signature|credential|accesskeyid|access_key)[\w-]*[\"']?\s*[=:]\s*[\"']?)[^\s&\"',}]+"
)


@dataclass(frozen=True)
class Retry:
    """How often, and for how long, a request is repeated after a status such as 429 or 503, a reset, or a timeout."""

    tries: int = 8
    seconds: float = 120.0
    """The time after which it is not repeated any more."""
    first_pause: float = 0.2
    longest_pause: float = 20.0

    def call(self, what: str, request: Callable[[], T], renew: Callable[[], None] | None = None) -> T:
        """Return what a request returns.

        Args:
            what: the request, for the error: ``writing s3://...``.
            request: it is called again after an error that may pass.
            renew: called after an error of credentials that have expired.

        Raises:
            FileNotFoundError: if there is no such object.
            FileExistsError: if there is one, and must not be.
            StoreError: after the last try, or at once for an error that does not pass.
        """
        began = time.monotonic()
        for number in range(1, self.tries + 1):
            try:
                return request()
            except _FINAL:
                raise
            except Exception as error:  # noqa: BLE001 - each client has errors of its own, which have no common base
                is_expired = _EXPIRED.search(_describe_error(error)) is not None
                if _is_refused(error) and not (is_expired and renew is not None):  # who renews them may be late
                    raise _permission_error(what, error) from None
                if is_expired and renew is not None:
                    renew()
                # the pauses of many ranks must differ, or all of them ask again at once
                pause = min(self.longest_pause, self.first_pause * 2 ** (number - 1)) * random.uniform(0.5, 1.0)
                if number == self.tries or time.monotonic() - began + pause > self.seconds:
                    raise _given_up(what, error, number, time.monotonic() - began) from None
                time.sleep(pause)
        raise AssertionError("a Retry has at least one try")


@functools.cache
def default_retry() -> Retry:
    """Return the rule of all requests of a run."""
    return Retry()


def _is_refused(error: BaseException) -> bool:
    return isinstance(error, PermissionError) or _REFUSED.search(f"{type(error).__name__} {error}") is not None


def _describe_error(error: BaseException) -> str:
    """Return a client's error in one line, without what could be a secret."""
    text = _SECRET.sub(r"\1...", " ".join(str(error).split()))
    return (f"{type(error).__name__}: {text}" if text else type(error).__name__)[:300]


def _permission_error(what: str, error: BaseException) -> StoreError:
    return StoreError(
        f"{what} is not permitted ({_describe_error(error)}); {_clock_remedy(error)}check the credentials of this "
        "process (environment variables, config file or role), and that they may list, read, write and delete there."
    )


def _clock_remedy(error: BaseException) -> str:
    return "set the clock of this machine, and " if "Skewed" in str(error) else ""


def _given_up(what: str, error: BaseException, tries: int, seconds: float) -> StoreError:
    return StoreError(
        f"{what} failed {tries} times in {seconds:.0f} s ({_describe_error(error)}); check the network, the endpoint "
        "and the store's limits, and start again."
    )
