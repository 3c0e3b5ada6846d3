"""A small GRPO run: sorting digits, learnt from verified rewards."""
