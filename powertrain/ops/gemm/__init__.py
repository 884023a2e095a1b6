"""Matrix products, with an activation or a gate behind them: Hopper's kernel or cuBLAS, and why."""
