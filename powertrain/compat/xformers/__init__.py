"""xFormers' attention under its own names: `from powertrain.compat.xformers import ops as xops`."""
