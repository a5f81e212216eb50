"""gdpa inside other libraries, each an optional extra: ``gdpa.integrations.transformers``."""

from gdpa.lazy import attributes

__getattr__ = attributes(globals(), {}, ("transformers",))
