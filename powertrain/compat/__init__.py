"""Functions of other libraries under their own names, computed by ours. docs/migrating.md lists the differences."""
