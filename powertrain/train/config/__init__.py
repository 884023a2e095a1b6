"""A run's configuration: typed sections, YAML with file and line, GPT-NeoX's keys."""
