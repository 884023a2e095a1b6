"""Why no xFormers operator supports a call: the reasons listed below its message, each once, and their remedies."""

from powertrain.doctor.excerpt import Excerpt

# a reason in the text -> what to do; the first that holds comes first
_ADVICE = (
    ("device=cpu", "move query, key and value to the GPU (the model or this input is on the CPU)"),
    ("wasn't build with CUDA", "install the xFormers of this torch and CUDA (python -m xformers.info)"),
    ("(too new)", "a newer xFormers, or PyTorch's attention, for a GPU that this release does not know"),
    ("dtype=torch.float32", "float16 or bfloat16 (autocast)"),
    ("shared-memory", "float16 or bfloat16, or a smaller head dim, on this GPU"),
    ("operator wasn't built", "install the xFormers of this torch and CUDA (python -m xformers.info)"),
    ("(too old)", "PyTorch's attention on this GPU"),
)
_MOST = 4


def refusals(groups: dict[str, str], excerpt: Excerpt) -> dict[str, str]:
    """The reasons that the lines below give, and the advice that follows from them."""
    said = [line.strip() for line in excerpt.below if line.startswith((" ", "\t")) and ":" not in line[:24]]
    reasons = [line for line in dict.fromkeys(said) if any(word in line for word, _ in _ADVICE) or "> " in line]
    text = "\n".join([excerpt.line, *excerpt.below])
    advice = next((one for word, one in _ADVICE if word in text), "read the reasons in the log")
    shown = "; ".join(reasons[:_MOST])
    return {"reasons": f": {shown}" if shown else "; its reasons stand below", "advice": advice}
