"""Configs, checkpoints and numbers of a training or a server."""

import re

from powertrain.doctor.causes.cause import Cause
from powertrain.doctor.excerpt import Excerpt


def _batch_numbers(groups: dict[str, str], excerpt: Excerpt) -> dict[str, str]:
    """The product, which GPT-NeoX has on the next line."""
    text = "\n".join([excerpt.line, *excerpt.below[:1]])
    numbers = re.search(r"world_size\s*(\d+ != [\d *]*\d)", text)
    return {"numbers": numbers[1] if numbers else ""}


CAUSES = (
    Cause(
        "deepspeed-batch",
        r"train_batch_size is not equal to micro_batch_per_gpu \* gradient_acc_step \* world_size|"
        r"AssertionError: train_batch_size (?P<sizes>[\w !=*]{3,60})|"
        r"Train batch size: (?P<size>\d+) (?:has to be|is not) ",
        "DeepSpeed's batch sizes do not multiply: {numbers}{sizes}{size}",
        "train_batch_size = micro batch * accumulation * data-parallel ranks, or leave train_batch_size out "
        "(\"auto\"); a world size of 1 means that it was not started by its launcher",
        "DeepSpeed 的 batch 大小不相乘：{numbers}{sizes}{size}",
        "train_batch_size = micro batch × 累积步数 × 数据并行 rank 数，或省略 train_batch_size（\"auto\"）；world "
        "size 为 1 说明没有通过启动器运行",
        "https://github.com/bigcode-project/starcoder/issues/41",
        derive=_batch_numbers,
        derives=("numbers",),
    ),
    Cause(
        "deepspeed-config-twice",
        r"we were given deepspeed configs in the deepspeed arguments and deepspeed\.initialize",
        "DeepSpeed got two configs: GPT-NeoX passes its own, for the DeeperSpeed of its requirements",
        "pip install -r requirements/requirements.txt of that GPT-NeoX (DeeperSpeed), or leave args= out of "
        "deepspeed.initialize",
        "DeepSpeed 得到两份配置：GPT-NeoX 传入自己的，面向其要求的 DeeperSpeed",
        "pip install -r requirements/requirements.txt（DeeperSpeed），或去掉 deepspeed.initialize 的 args=",
        "https://github.com/EleutherAI/gpt-neox/issues/1043",
        confidence="likely",
    ),
    Cause(
        "vocab-file",
        r"assert args\.vocab_file is not None",
        "no tokenizer file was named: vocab_file (or vocab-file) is not in the config",
        "\"vocab-file\": \"20B_tokenizer.json\" and tokenizer_type in the YAML (GPT-NeoX), --vocab-file and "
        "--merge-file (Megatron)",
        "没有指定分词器文件：配置中缺少 vocab_file（或 vocab-file）",
        "YAML 中写 \"vocab-file\": \"20B_tokenizer.json\" 和 tokenizer_type（GPT-NeoX）；--vocab-file 和 "
        "--merge-file（Megatron）",
        "https://github.com/EleutherAI/gpt-neox/issues/614",
    ),
    Cause(
        "checkpoint-broken",
        r"Invalid magic number; corrupt file|EOFError: Ran out of input|storage has wrong byte size|"
        r"PytorchStreamReader failed|Error while deserializing header|invalid load key, '(?P<key>[^']{1,4})'|"
        r"MetadataIncompleteBuffer|HeaderTooLarge|pickle data was truncated|"
        r"unexpected EOF, expected \d+ more bytes|Unsupported operand \d+|could not find MARK",
        "the checkpoint file is not whole: a download or a save was cut short, or it is a pointer of git-lfs",
        "ls -l and head -c 200 it (\"version https://git-lfs…\": git lfs pull); download it again, or take an earlier "
        "one",
        "检查点文件不完整：下载或保存被中断，或只是 git-lfs 指针",
        "ls -l，head -c 200（若为 “version https://git-lfs…”：git lfs pull）；重新下载，或使用更早的检查点",
        "https://github.com/NVIDIA/pix2pixHD/issues/243",
        confidence="likely",
    ),
    Cause(
        "weights-only",
        r"Weights only load failed",
        "torch.load reads only tensors by default since 2.6, and this file holds other Python objects",
        "torch.load(..., weights_only=False) if you trust the file, or torch.serialization.add_safe_globals",
        "自 2.6 起 torch.load 默认只读取张量，而该文件含有其他 Python 对象",
        "若信任该文件：torch.load(..., weights_only=False)，或 torch.serialization.add_safe_globals",
        "https://docs.pytorch.org/docs/stable/notes/serialization.html",
    ),
    Cause(
        "checkpoint-shape",
        r"size mismatch for (?P<parameter>[\w.]+): copying a param with shape",
        "the checkpoint belongs to another configuration than the model: {parameter} has another shape (sizes, "
        "vocabulary, or shards of another tensor-parallel size)",
        "the config that belongs to the checkpoint; merge or split shards for another tensor-parallel size "
        "(powertrain convert)",
        "检查点与模型的配置不同：{parameter} 的形状不同（大小、词表，或张量并行数不同的分片）",
        "使用检查点对应的配置；张量并行数不同时需合并或拆分（powertrain convert）",
        "https://github.com/deepspeedai/DeepSpeed/issues/5570",
    ),
    Cause(
        "checkpoint-keys",
        r"Missing key\(s\) in state_dict|Unexpected key\(s\) in state_dict",
        "the checkpoint has other parameter names than the model: another architecture or version, or a prefix "
        "(module., _orig_mod.) was saved too",
        "compare list(state)[:5] with the model's; strip the prefix; the version of the code that wrote it",
        "检查点的名称与模型不同：架构或版本不同，或保存了前缀（module.、_orig_mod.）",
        "比较 list(state)[:5] 与模型的名称；去掉前缀；使用写入它的代码版本",
        "https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html",
        confidence="likely",
    ),
    Cause(
        "model-unknown",
        r"Unrecognized configuration class|Unrecognized model in |[`']?rope_scaling[`']? must be a dictionary|"
        r"Should have a `model_type` key|Tokenizer class \w+ does not exist|"
        r"model type `(?P<type>[\w-]+)` but Transformers does not recognize|KeyError: '(?P<key>qwen\w*|llama\w*|"
        r"mistral\w*|gemma\w*|"
        r"phi\w*|deepseek\w*|glm\w*|gptj|mixtral)'|"
        r"Model architectures \[[^\]]{1,80}\] are not supported|Tokenizer class \w+ does not exist",
        "the installed Transformers (or vLLM) is older than the model",
        "pip install --upgrade transformers (vllm)",
        "安装的 Transformers 比模型旧",
        "pip install --upgrade transformers",
        "https://github.com/dredwardhyde/gpt-neo-fine-tuning-example/issues/13",
        confidence="likely",
    ),
    Cause(
        "remote-code",
        r"trust_remote_code=True` to (?:remove|allow)|pass the argument `trust_remote_code=True`",
        "the model or data set brings code of its own, which is run only if you allow it",
        "read that code; then trust_remote_code=True (--trust-remote-code)",
        "模型或数据集自带代码，需要您允许才会运行",
        "阅读该代码后设置 trust_remote_code=True（--trust-remote-code）",
        "https://huggingface.co/docs/transformers/models#custom-models",
    ),
    Cause(
        "no-map-location",
        r"Attempting to deserialize object on a? ?(?:CUDA|cuda) device",
        "the file holds tensors of a GPU (or a GPU index) that this machine does not have",
        "torch.load(..., map_location='cpu'), then model.to(device)",
        "文件中的张量位于此处不存在的 GPU",
        "torch.load(..., map_location='cpu')，再 model.to(device)",
        "https://docs.pytorch.org/docs/stable/generated/torch.load.html",
    ),
    Cause(
        "meta-tensor",
        r"Cannot copy out of meta tensor",
        "a part of the model was never given weights: it was made on the meta device and moved, or its weights are "
        "not in the file",
        "to_empty and load_state_dict(assign=True) instead of .to(device); from_pretrained without .to() where "
        "device_map is given",
        "模型的一部分没有权重：在 meta 设备上创建后被移动，或文件中没有其权重",
        "用 to_empty 和 load_state_dict(assign=True) 代替 .to(device)；使用 device_map 时不要再 .to()",
        "https://docs.pytorch.org/docs/stable/meta.html",
        confidence="likely",
    ),
    Cause(
        "tokenizer-backend",
        r"requires the SentencePiece library|Couldn't instantiate the backend tokenizer|"
        r"`tiktoken` (?:is )?required|requires the protobuf library",
        "the tokenizer needs a package that is not installed",
        "python -m pip install sentencepiece tiktoken protobuf tokenizers, and start again",
        "分词器需要的包没有安装",
        "python -m pip install sentencepiece tiktoken protobuf tokenizers，然后重新启动",
        "https://huggingface.co/docs/transformers/installation",
    ),
    Cause(
        "hub-name",
        r"is not a local folder and is not a valid model identifier|Repository Not Found for url|"
        r"Cannot access gated repo|401 Client Error: Unauthorized for url|GatedRepoError|Repo id must be in the form",
        "the Hub does not return this model: the name or path is wrong, or it is private or gated and nobody is logged "
        "in",
        "see whether the path exists; hf auth login, and accept the terms on the model's page",
        "Hub 没有提供该模型：名称或路径错误，或为私有、受限模型而未登录",
        "确认路径存在；hf auth login，并在模型页面接受条款",
        "https://huggingface.co/docs/hub/models-gated",
    ),
    Cause(
        "loss-scale",
        r"[Ll]oss scale already at minimum|Reached minimum loss scale|Minimum loss scale reached",
        "fp16 gradients overflow at every scale: the loss diverged, or the model was trained in bf16",
        "bf16 instead of fp16 (sm_80 and newer); a lower learning rate, clipping, warm-up; look at the data of the "
        "last batches",
        "fp16 梯度在任何 scale 下都溢出：loss 发散，或模型以 bf16 训练",
        "用 bf16 代替 fp16（sm_80 以上）；降低学习率、梯度裁剪、预热；检查最后几个 batch 的数据",
        "https://github.com/ymcui/Chinese-LLaMA-Alpaca/issues/534",
    ),
    Cause(
        "overflow-every-step",
        r"(?:[Rr]educing (?:loss scale )?to|Attempted loss scale:) (?P<scale>0?\.\d+\b|1(?:\.0)?(?![\d.])|"
        r"\d[\d.]*e-\d+)|"
        r"Attempted loss scale: (?P<same>1(?:\.0)?), reducing",
        "the loss scale is down to {scale}{same}, and gradients still overflow: the model or the loss is NaN, or its "
        "values do not fit float16 (a model trained in bf16, T5, Gemma)",
        "bf16 instead of fp16 (sm_80 and newer), or fp32; torch.isnan of loss and parameters (a broken checkpoint); a "
        "lower learning rate, warm-up, clipping",
        "loss scale 已降到 {scale}{same}，梯度仍溢出：模型或损失为 NaN，或数值超出 float16（以 bf16 训练的模型、T5、"
        "Gemma）",
        "用 bf16 代替 fp16（sm_80 以上），或 fp32；检查损失与参数的 NaN（检查点损坏）；降低学习率、预热、裁剪",
        "https://github.com/NVIDIA/apex/issues/715",
        confidence="likely",
    ),
    Cause(
        "overflow-skipped",
        r"Gradient overflow\. {1,2}Skipping step|OVERFLOW! (?:Rank \d+ )?Skipping step|Overflow detected\. Skipping "
        r"step|"
        r"Grad overflow on iteration",
        "dynamic loss scaling found gradients too large for float16, skipped this step and lowered the scale: normal "
        "in the first steps and now and then",
        "nothing, as long as the scale stays above 1 and most steps are not skipped; else bf16, or a lower learning "
        "rate",
        "动态 loss scaling 发现梯度超出 float16，跳过该步并降低 scale：开始阶段和偶尔出现属正常",
        "scale 保持在 1 以上且多数步未跳过时无需处理；否则用 bf16 或降低学习率",
        "https://github.com/NVIDIA/apex/issues/318",
        confidence="likely",
        fallback=True,
    ),
    Cause(
        "unscale-fp16",
        r"Attempting to unscale FP16 gradients",
        "the parameters themselves are fp16, and GradScaler needs fp32 parameters",
        "load the model in fp32 (or bf16 and no scaler); with PEFT: cast trainable parameters to fp32",
        "参数本身是 fp16，而 GradScaler 需要 fp32",
        "以 fp32 加载模型（或 bf16 且不用 scaler）；PEFT：将可训练参数转为 fp32",
        "https://huggingface.co/docs/peft/developer_guides/troubleshooting",
    ),
    Cause(
        "dtype-mismatch",
        r"Expected tensor for argument .{1,60} scalar type|Expected query, key, and value to have the same dtype|"
        r"expected scalar type \w+ but found \w+|must have the same dtype|"
        r"should be the same or input should be a MKLDNN tensor|Input type .{1,60} type .{1,60} should be the same|"
        r"mat1 and mat2 (?:must|to) have the same dtype",
        "two tensors of one operation have different dtypes: a part of the model or an input was not cast",
        "torch.autocast around the call, or .to(dtype) on inputs and on layers that were added after loading",
        "同一运算的两个张量类型不同：模型的一部分或输入没有转换",
        "用 torch.autocast 包住调用，或对输入和加载后新增的层使用 .to(dtype)",
        "https://docs.pytorch.org/docs/stable/amp.html",
        confidence="likely",
    ),
    Cause(
        "no-grad-input",
        r"element 0 of (?:tensors|variables) does not require grad|none of output has requires_grad=True",
        "nothing in the loss needs a gradient: everything is frozen, or gradient checkpointing gets frozen inputs "
        "(PEFT)",
        "model.enable_input_require_grads() before PEFT with checkpointing; use_reentrant=False; look at requires_grad",
        "loss 中没有需要梯度的量：全部被冻结，或梯度检查点的输入被冻结（PEFT）",
        "PEFT 与检查点同用时先 model.enable_input_require_grads()；use_reentrant=False；检查 requires_grad",
        "https://huggingface.co/docs/peft/developer_guides/troubleshooting",
        confidence="likely",
    ),
    Cause(
        "vllm-memory-taken",
        r"Free memory on device\W.{0,60}is less than desired GPU memory utilization",
        "vLLM reserves a share of the whole GPU (--gpu-memory-utilization, 0.9 by default), and other processes hold "
        "so much of it that less is free",
        "nvidia-smi names the processes: end them (an engine that was killed leaves workers behind); or a smaller "
        "--gpu-memory-utilization",
        "vLLM 要占用整个显存的一定比例（--gpu-memory-utilization，默认 0.9），而其他进程占用过多，剩余不足",
        "用 nvidia-smi 查看并结束这些进程（被杀死的引擎会留下子进程）；或减小 --gpu-memory-utilization",
        "https://docs.vllm.ai/en/latest/configuration/conserving_memory.html",
    ),
    Cause(
        "vllm-cache",
        r"No available memory for the cache blocks|"
        r"larger than the maximum number of tokens that can be stored in KV cache|"
        r"needed, which is larger than the available KV cache memory",
        "after the weights too little GPU memory is left for vLLM's KV cache",
        "a smaller --max-model-len; --gpu-memory-utilization 0.95; end other processes on the GPU; more GPUs "
        "(--tensor-parallel-size)",
        "加载权重后剩余显存不足以存放 vLLM 的 KV cache",
        "减小 --max-model-len；--gpu-memory-utilization 0.95；结束 GPU 上的其他进程；增加 "
        "GPU（--tensor-parallel-size）",
        "https://docs.vllm.ai/en/latest/configuration/conserving_memory.html",
    ),
    Cause(
        "vllm-parallel",
        r"attention heads \((?P<heads>\d+)\) must be divisible by tensor parallel size|"
        r"number of required GPUs exceeds the total number of available GPUs|"
        r"is greater than the number of available GPUs",
        "the tensor-parallel size does not fit: heads are not divisible by it, or there are fewer GPUs",
        "--tensor-parallel-size that divides the heads and is at most the GPUs of the host",
        "张量并行数不合适：不能整除 head 数，或多于 GPU 数",
        "--tensor-parallel-size 应整除 head 数且不超过本机 GPU 数",
        "https://docs.vllm.ai/en/latest/serving/parallelism_scaling.html",
    ),
)  # fmt: skip
