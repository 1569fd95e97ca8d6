"""Every error that this package raises.

    PeersError
    ├── AddressError            an address is malformed; nothing was tried
    ├── IdentityError           the key file is unreadable, unsafe or not ours
    ├── AccessError             a secret, or a list of peers, is unreadable, unsafe or malformed
    ├── DaemonError             p2pd did not start, or it ended
    ├── UnreachableError        an address or a peer did not answer
    │   └── NotAdmittedError    because it and we do not let each other in
    ├── ProtocolError           the other side sent what the protocol does not allow
    │   ├── WireError           a frame is garbled, truncated or over its limit
    │   │   └── GarbledError    not because the stream broke: the other side wrote it so
    │   └── LayoutError         tensors have other names, shapes or dtypes than agreed
    ├── RefusedError            the other side answered, and said no
    │   ├── BehindError         because what we sent is too old to count there
    │   ├── BusyError           because it does that for others now
    │   └── GoneError           because it keeps no more what we ask for
    └── NoDonorError            nobody could give the whole state

A message names the value, the reason and what to do.
"""


class PeersError(Exception):
    """Base of all errors here. Its text is one line, fit for a user."""


class AddressError(PeersError):
    """Raised when an address cannot be parsed, before anything is dialled."""


class IdentityError(PeersError):
    """Raised when the identity file cannot be read, written, or holds no Ed25519 key."""


class AccessError(PeersError):
    """Raised when a secret's file, or a list of peers, cannot be read, is unsafe or is malformed."""


class DaemonError(PeersError):
    """Raised when p2pd does not start in time, or has ended."""


class UnreachableError(PeersError):
    """Raised when a peer cannot be dialled, or does not answer in time."""


class NotAdmittedError(UnreachableError):
    """Raised when a peer and we do not let each other in: another secret, or a list of peers."""


class ProtocolError(PeersError):
    """Raised when the other side breaks the protocol. The stream is closed."""


class WireError(ProtocolError):
    """Raised when a frame is garbled, truncated, or larger than its limit. Nothing was kept."""


class GarbledError(WireError):
    """Raised when a frame came whole and is not what its header, its checksum or the protocol says."""


class LayoutError(ProtocolError):
    """Raised when announced tensors differ from what was agreed, before allocation."""


class RefusedError(PeersError):
    """Raised when the other side answers with a refusal; the text carries its reason."""


class BehindError(RefusedError):
    """Raised when the other side is so far ahead that ours counts no more there: take fresh state first."""


class BusyError(RefusedError):
    """Raised when the other side does what we ask for others now: ask again later."""


class GoneError(RefusedError):
    """Raised when the other side has dropped what we began to download: begin anew."""


class NoDonorError(PeersError):
    """Raised when no donor could give the whole state. Nothing was changed."""
