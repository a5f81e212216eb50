"""Which program does what: lists of tiles, made on the device."""
