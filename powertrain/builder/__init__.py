"""Builds of other projects' CUDA extensions: planned, shown, kept inside the memory there is, never stuck silently.

machine.py what is here; recipes.py what a build wants; plan.py both together; launcher.py and shims.py how compilers
are made to wait; room.py who may run; processes.py what runs; progress.py what the builder says; stall.py why nothing
moves; terminal.py what is asked; ending.py what went wrong; history.py what earlier builds took; watchdog.py what ends
a build whose governor was killed; run.py all of it.
"""
