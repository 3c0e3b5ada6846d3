"""Reading handles: from names of shards to tensors, in nested objects and in arguments of calls."""
