"""Problems of this machine and their fixes: `powertrain doctor` and `powertrain diagnose`.

    finding.py      Check, Finding, and how checks are run
    machine.py      the machine as a check sees it: files, environment, processes, programs
    fatbin.py       which GPUs a shared library has code for
    elf.py          sections and symbols of a shared library
    one file each   gpus, code, versions, symbols, builds, limits, links, kernel_store, echo, hosts, overlap
    diagnose.py     a log, searched for the errors in causes/; log.py and literals.py make it fast
    releases.py     a name that a library lacks: too old or too new? from api_history.json and known_names.py
    frames.py       whose code asked, from a traceback; own_words.py: the advice in a message
    library_names.py  shared libraries and symbols: which package has them

A check is a function over a `Machine`; it imports no torch and starts no CUDA, so that a broken installation can still
be looked at. Checks that need torch run in their own process, with a deadline.
"""
