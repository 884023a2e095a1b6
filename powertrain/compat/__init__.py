"""Other libraries' functions under their own names, on ours. docs/migrating.md says what differs."""
