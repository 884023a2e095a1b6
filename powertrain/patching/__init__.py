"""Replacement of slow parts of a model that was written elsewhere, found by their shape and checked by running them.

patch.py       `patch` and `unpatch`: what is looked for, in which order, and the report
replace.py     how a module's forward is replaced and put back
verify.py      a candidate beside the module it would replace: outputs and gradients, against float64
norms.py, mlps.py, rotary.py, attention.py, loss.py    one kind each: candidates, and the forward that replaces
"""
