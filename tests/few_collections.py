"""Imported by processes of tests ahead of torch: the cycle collector runs less often.

It goes through torch's heap again and again: a tenth of the CPU time of the tests of models and compat.
"""

import gc

# Python's defaults are (700, 10, 10). Garbage in cycles is freed later: peak memory was 1040 MB, 15 MB more than before
gc.set_threshold(50_000, 20, 100)
