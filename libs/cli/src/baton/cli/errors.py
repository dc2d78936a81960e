"""What the `baton` command can fail with. Every message names what was wrong, with its value, and what to do."""


class CliError(Exception):
    """Base of every failure that the command explains to its user in one line; its exit status is 1."""


class UsageError(CliError):
    """The caller's mistake: an unknown name, a value out of range."""


class OutputError(CliError):
    """What was to be printed could not be: the disk is full, the terminal has gone."""


class OutputGoneError(OutputError):
    """The reader of a pipe has gone: it knows, and nothing need be said."""


class ModelError(CliError):
    """Base of what can go wrong with a model folder."""


class DownloadError(ModelError):
    """The package could not be fetched."""


class IntegrityError(ModelError):
    """Bytes that are not the pinned ones."""


class ConversionError(ModelError):
    """A GGUF file that is not of the kind that can be converted."""


class ServiceError(CliError):
    """Base of what can go wrong with the services that `baton up` starts."""


class ServiceStartError(ServiceError):
    """A service did not become ready in time, or ended before it was."""


class ServiceLostError(ServiceError):
    """A service ended while it should have been running."""


class CallError(CliError):
    """The gateway answered a call with an error, or could not be reached."""
