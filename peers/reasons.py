"""Why something with an address went wrong, in a few plain words, out of p2pd's or the system's long ones."""

import re

REFUSED = "connection refused"
"""The reason when nobody listens at an address."""


def plain_reason(message: str, timeout_s: float) -> str:
    """A short reason in words, out of libp2p's or the system's long one."""
    lower = message.lower()
    other = re.search(r"peer id mismatch:.*?remote key matches (\w+)", message)
    if other:
        return f"answers with another id: {other[1]}"
    for part, reason in _REASONS:
        if part in lower:
            return reason.format(timeout_s=timeout_s)
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no reason given"


def port_trouble(where: str, said: str) -> str:
    """Why nothing can listen at `where`, and what to do, out of what was said."""
    lower = said.lower()
    if "address already in use" in lower:
        return f"{where} is already in use; choose another port, or 0 for any free one"
    if "permission denied" in lower:
        return f"{where} may not be used by this user; choose a port from 1024 up"
    if "cannot assign requested address" in lower:
        return f"{where} is not an address of this machine; use 0.0.0.0 for every interface"
    return f"p2pd did not start on {where}; it said: {said[:300]}"


_REASONS = (
    ("connection refused", REFUSED),
    ("connect call failed", REFUSED),
    ("dial to self", "it is this peer itself"),
    ("no route to host", "no route to host"),
    ("network is unreachable", "network is unreachable"),
    ("name or service not known", "no such host name"),
    ("no such host", "no such host name"),
    ("temporary failure in name resolution", "the host name cannot be looked up now"),
    ("protocols not supported", "it does not speak this protocol"),
    ("protocol not supported", "it does not speak this protocol"),
    ("dial backoff", "it did not answer a moment ago"),
    ("context deadline exceeded", "silent for {timeout_s:.2g} s"),
    ("i/o timeout", "silent for {timeout_s:.2g} s"),
    ("failed to negotiate security protocol", "what listens there is not a peer"),
    ("failed to find any peer in table", "no address of it is known"),
    ("routing: not found", "no address of it is known"),
    ("no addresses", "no address of it is known"),
    ("no good addresses", "no address of it can be dialled from here"),
    ("connection reset", "closed the connection"),
    ("stream reset", "closed the stream"),
)
