"""One sequence over several ranks."""
