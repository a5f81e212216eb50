"""gdpa inside other libraries, each an optional extra: ``gdpa.integrations.transformers``."""
