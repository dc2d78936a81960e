"""What goes wrong while a service starts."""

from __future__ import annotations


class ServicekitError(Exception):
    """Root of this package's exceptions."""


class SettingsError(ServicekitError):
    """The operator's mistake: settings that cannot be used. One line a setting; each names the variable or flag and the value."""


class StartError(ServicekitError):
    """What a service needs to start is not there or not usable; the message says what and what to do. No trace is logged for it."""


class AddressUnavailableError(ServicekitError):
    """The address that a server was told to listen on cannot be bound."""


class TlsError(ServicekitError):
    """A certificate or key file is missing or unreadable."""
