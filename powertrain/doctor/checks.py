"""Every check of this package, in the order they are run."""

from powertrain.doctor import builds, code, echo, gpus, kernel_store, limits, links, symbols, versions
from powertrain.doctor.finding import Check

CHECKS: tuple[Check, ...] = (
    *gpus.CHECKS,
    *code.CHECKS,
    *versions.CHECKS,
    *symbols.CHECKS,
    *builds.CHECKS,
    *kernel_store.CHECKS,
    *limits.CHECKS,
    *links.CHECKS,
    *echo.CHECKS,
)
