"""Imported by processes of tests ahead of torch: the cycle collector runs less often.

It goes through torch's heap again and again: a tenth of the CPU time of the tests of models and compat.
"""

import gc

# of Python's (700, 10, 10). What a test leaves in cycles stays longer: 15 of 1040 MB were more
gc.set_threshold(50_000, 20, 100)
