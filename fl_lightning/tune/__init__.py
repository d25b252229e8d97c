"""Searches for hyperparameters, on validation parts only, with the same budget for every method."""
