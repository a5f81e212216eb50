"""The exceptions a caller may want to catch by name."""


class UnsupportedActivationError(ValueError):
    """An activation uses an operation that cannot run inside a fused kernel; the message names it."""


class UnsupportedProblemError(ValueError):
    """A backend that was asked for by name cannot run these arguments; the message says why."""
