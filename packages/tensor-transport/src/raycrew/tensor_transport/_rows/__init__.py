"""Which rows: one normaliser for every way to name them, and views on runs of them."""
