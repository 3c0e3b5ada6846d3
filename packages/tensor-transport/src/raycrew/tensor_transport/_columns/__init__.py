"""Columns of batches: their kinds, the checked table, joining, padding and frames."""
