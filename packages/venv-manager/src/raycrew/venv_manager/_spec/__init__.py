"""What an environment is, and the digest of everything that decides its content."""
