"""Functions and modules that were called before, found again without their fingerprints."""
