"""The errors of this field: patterns in logs, causes, fixes, in English and Chinese, and where each was seen.

A pattern is searched in every line that holds one of the literals that its matches must (diagnose.py); it takes time in
proportion to the line: what can begin in the middle of a word, or has two open gaps, does not. Where two causes are
found, the one that stands first here is said first: causes before their consequences. In tests/doctor texts.py,
messages.py, cases.jsonl and fresh_cases.jsonl have a text for each.
"""

from powertrain.doctor.causes import (
    builds,
    compilers,
    cuda,
    data,
    gpu,
    headers,
    hosts,
    installing,
    interfaces,
    launching,
    libraries,
    loading,
    models,
    own_check,
    packages,
    programs,
    ranks,
    rocm,
    sharded,
    shared_libraries,
    stops,
    system,
    tensors,
    toolchain,
    training,
    triton,
    values,
)
from powertrain.doctor.causes.cause import Cause, Confidence

CAUSES = (
    *builds.CAUSES,
    *compilers.CAUSES,
    *toolchain.CAUSES,
    *packages.CAUSES,
    *headers.CAUSES,
    *interfaces.CAUSES,
    *loading.CAUSES,
    *shared_libraries.CAUSES,
    *libraries.CAUSES,
    *rocm.CAUSES,
    *sharded.CAUSES,
    *values.CAUSES,
    *models.CAUSES,
    *data.CAUSES,
    *gpu.CAUSES,
    *cuda.CAUSES,
    *hosts.CAUSES,
    *triton.CAUSES,
    *ranks.CAUSES,
    *launching.CAUSES,
    *training.CAUSES,
    *programs.CAUSES,
    *interfaces.GENERAL,
    *tensors.CAUSES,
    *installing.CAUSES,
    *own_check.CAUSES,
    *system.CAUSES,
    *interfaces.LAST,
    *stops.CAUSES,
)

__all__ = ["CAUSES", "Cause", "Confidence"]
