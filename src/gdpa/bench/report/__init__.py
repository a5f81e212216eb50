"""Results as tables, plots, pages and parts of documents."""
