"""Several ranks: processes, models and tables spread over them."""
