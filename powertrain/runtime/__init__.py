"""Infrastructure shared by all kernels: settings, targets, compilation, storage, launch, dispatch. It names no op."""
