"""What goes wrong while a service starts."""

from __future__ import annotations


class ServicekitError(Exception):
    """Root of this package's exceptions."""


class SettingsError(ServicekitError):
    """The operator's mistake: settings, or files that they name, that cannot be used. One line a setting; each names the variable or flag and
    the value."""


class StartError(ServicekitError):
    """What a service needs to start is not there or not usable; the message says what and what to do. No trace is logged for it."""


class AddressUnavailableError(ServicekitError):
    """The address that a server was told to listen on cannot be bound."""


class TlsError(SettingsError):
    """A certificate, key or CA file is missing, unreadable or expired, or the key is not the certificate's."""


class SecretFileError(SettingsError):
    """A file of secrets or of API keys is missing, unreadable or wrong. The message names the file and the line's number, never what is in it."""


class EtcdError(ServicekitError):
    """etcd refused, is away, or did not answer in time."""
