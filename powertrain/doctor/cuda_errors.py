"""CUDA's error numbers: the meaning and the remedy of each. Before CUDA 10.1 those below 100 had other meanings."""

_START = ("the driver and the CUDA library (of the container) do not go together, or the driver is in a bad state",
          "nvidia-smi in the same place; reboot or reload the driver after an update; the newest driver; in a "
          "container "
          "--gpus all and an image of the driver's CUDA")  # fmt: skip
_FORK = ("CUDA could not be initialized: most often in a forked child of a process that used CUDA, else the driver",
         "multiprocessing.set_start_method('spawn'), no .cuda() in the data set; nvidia-smi")  # fmt: skip
_OLD_DRIVER = ("the driver is older than the CUDA of the program", "a newer driver, or builds for an older CUDA")
_NO_DEVICE = ("no GPU is visible", "nvidia-smi -L; CUDA_VISIBLE_DEVICES; docker run --gpus all")
_NO_IMAGE = ("the program has no code for this GPU", "a build for its compute capability (a newer or older torch)")
_ADDRESS = ("a kernel read or wrote outside its memory", "CUDA_LAUNCH_BLOCKING=1 names the call; check indices")
_ASSERT = ("an index is out of range inside a kernel", "run on the CPU for the message; ids below the table's size")
_BUSY = ("another process has the GPU for itself", "nvidia-smi names it; compute mode Default (nvidia-smi -c 0)")
_MEMORY = ("the GPU's memory is full", "nvidia-smi names the processes; a smaller batch")
_VALUE = ("a call got an argument that it does not take", "no sizes of 0 or too large; CUDA_LAUNCH_BLOCKING=1")
_ORDINAL = ("the GPU of that number does not exist", "numbers from 0 to device_count() - 1; CUDA_VISIBLE_DEVICES")
_LAUNCH = ("a kernel failed while it ran", "CUDA_LAUNCH_BLOCKING=1 names the call; dmesg for Xid; other GPU")
_SYSTEM = ("the NVSwitch or MIG set-up is not finished", "start nvidia-fabricmanager of the driver's version")
_SYMBOL = ("the driver lacks a function that the CUDA library wants, as under WSL with another driver",
           "update the Windows driver and wsl --update; no Linux driver inside WSL; an older image")  # fmt: skip

# number: the same from CUDA 10.1 on, or only used before it
MEANINGS: dict[int, tuple[str, str]] = {
    1: _VALUE, 2: _MEMORY, 3: _FORK, 4: _LAUNCH, 8: _NO_IMAGE, 9: _VALUE, 10: _ORDINAL, 11: _VALUE, 30: _START,
    34: _START, 35: _OLD_DRIVER, 38: _NO_DEVICE, 46: _BUSY, 48: _NO_IMAGE, 59: _ASSERT, 77: _ADDRESS, 78: _OLD_DRIVER,
    98: _NO_IMAGE, 100: _NO_DEVICE, 101: _ORDINAL, 200: _NO_IMAGE, 209: _NO_IMAGE, 222: _OLD_DRIVER, 304: _START,
    500: _SYMBOL, 700: _ADDRESS, 710: _ASSERT, 719: _LAUNCH, 801: _START, 802: _SYSTEM, 803: _START, 804: _OLD_DRIVER,
    999: _START,
}  # fmt: skip
