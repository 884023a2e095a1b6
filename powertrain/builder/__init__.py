"""Builds of other projects' CUDA extensions: planned, monitored, limited to the available memory, stalls explained.

host.py      facts of the machine         recipes.py   resources of known projects
plan.py      jobs, archs, refusals          run.py       one build, supervised
launcher.py, shims.py  compilers delayed    memory_scheduler.py  which compiler may run
processes.py  sampled process tree          progress.py  the builder's own output
stall.py     reason of a standstill         terminal.py  prompts of the build
ending.py    cause of a failure             history.py   figures of earlier builds
watchdog.py  ends a build whose supervisor was killed
"""
