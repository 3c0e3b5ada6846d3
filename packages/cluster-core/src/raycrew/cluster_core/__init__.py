"""Virtual clusters on Ray."""
