"""What can go wrong between two workers.

TransportError
├── FabricUnavailable   no UCX binding, or a listener that cannot be opened
├── ConnectFailed       the peer did not answer in time; names address and devices
├── ConnectionLost      the peer or the lane went away under an open connection
├── WireError           bytes that are no message of this version, or over a bound
├── PairingRefused      the peer is another incarnation, or its fingerprint differs; names the field
├── TransferError       this transfer ended without the receiver's acknowledgement; says why
└── ProbeFailed         the start-up probe moved nothing, or other bytes than it sent
"""

from __future__ import annotations


class TransportError(Exception):
    """Base of everything the transport raises on purpose."""


class FabricUnavailable(TransportError):
    """No binding for the fabric, or its listener cannot be opened."""


class ConnectFailed(TransportError):
    """The peer did not answer within the bound."""


class ConnectionLost(TransportError):
    """The peer or the lane went away."""


class WireError(TransportError):
    """Bytes that are no message of this version, or over a bound."""


class PairingRefused(TransportError):
    """Another incarnation, or a fingerprint that differs."""


class TransferError(TransportError):
    """The transfer ended without an acknowledgement."""


class ProbeFailed(TransportError):
    """The self-probe did not bring back what it sent."""
