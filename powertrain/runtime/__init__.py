"""What every kernel needs: settings, targets, compilation, storage, launching and dispatch. Knows no transformer."""
