"""What a start is told about its settings, before anything slow happens: one sentence each, no reason to stop."""

from __future__ import annotations

import difflib
import ipaddress
from collections.abc import Iterator, Mapping

from chatsvc.config import ServeConfig

# Read by other verbs (chat, simulate) or by the tests: nothing of serve's, and no mistake.
_OTHERS = (
    *("URL", "IN_PROCESS", "SYSTEM", "TEMPERATURE", "MAX_TOKENS", "API_KEY"),
    *("SCENARIO", "ONLY", "SCALE", "TRACE", "WRITE_TRACE", "KIND", "REQUESTS", "RATE", "JSON", "PLOTS"),
    *("WALKS", "EXAMPLES"),
)


def remarks(config: ServeConfig, environ: Mapping[str, str]) -> Iterator[str]:
    """Sentences about variables that nobody reads, and about a door that is open to everybody."""
    known = [name.upper() for name in ServeConfig.model_fields]
    for variable in sorted(environ):
        name = variable.removeprefix("CHATSVC_")
        if name == variable or name in known or name in _OTHERS:
            continue
        close = difflib.get_close_matches(name, known, 1, 0.6)
        hint = f"; the closest is CHATSVC_{close[0]} (--{close[0].lower().replace('_', '-')})" if close else ""
        yield f"the variable {variable} is unknown and does nothing{hint}"
    if not is_loopback(config.host) and config.api_key_file is None:
        yield (
            f"--host {config.host}: everybody who reaches this address can use the server and read its sessions, for "
            "there are no API keys"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address. A name other than localhost counts as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
