"""What runs in a worker's process, and what is known of its class and options before it does."""
