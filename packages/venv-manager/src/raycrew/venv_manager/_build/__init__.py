"""Building one environment: its recipe, the packages that it carries along, probing and inventory."""
