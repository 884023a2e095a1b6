"""GEMMs, optionally with an activation or gate as epilogue, and the choice between cuBLAS and the Hopper kernel."""
