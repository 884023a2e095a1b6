"""Infrastructure of every kernel: settings, targets, compilation, storage, launch, dispatch. Names no op."""
