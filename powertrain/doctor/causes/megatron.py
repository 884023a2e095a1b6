"""Megatron-LM, GPT-NeoX, DeepSpeed: settings and files that their own checks refuse."""

from powertrain.doctor.causes.cause import Cause

_MEGATRON = "https://github.com/NVIDIA/Megatron-LM"

CAUSES = (
    Cause(
        "megatron-core-missing",
        r"No module named '?megatron\.core(?:'|$)",
        "Megatron Core is not in this Python, or another project's package megatron (GPT-NeoX's, one of the index) is "
        "found first",
        "pip install megatron-core at the version that the program names, or PYTHONPATH=<the folder of Megatron-LM>; "
        "python -c 'import megatron; print(megatron.__path__)' names the one found; pip uninstall megatron",
        "此 Python 中没有 Megatron Core，或先找到了别的项目的 megatron 包（GPT-NeoX 或索引上的同名包）",
        "按程序要求的版本 pip install megatron-core，或 PYTHONPATH=<Megatron-LM 目录>；python -c 'import megatron; "
        "print(megatron.__path__)' 查看实际使用的包；pip uninstall megatron",
        _MEGATRON,
        confidence="likely",
    ),
    Cause(
        "megatron-of-another-project",
        r"(?:cannot import name '(?P<name>\w+)' from|module) '(?P<module>megatron(?:\.(?!core\b)[\w.]+)?)'|"
        r"No module named '?(?P<gone>megatron\.(?!core\b|data\.helpers)[\w.]{1,80})",
        "Python finds another project's package megatron: Megatron-LM, Megatron-DeepSpeed, GPT-NeoX and packages on "
        "the "
        "index all have that name, and their modules moved between releases (megatron.model and mpu to megatron.core)",
        "python -c 'import megatron; print(megatron.__path__)' names the one found; start from the root of the "
        "repository with PYTHONPATH=$PWD first, pip uninstall the other; the tag of Megatron-LM that the program names",
        "Python 找到的是别的项目的 megatron 包：Megatron-LM、Megatron-DeepSpeed、GPT-NeoX 和索引上的包同名，"
        "且模块在版本间"
        "移动过（megatron.model、mpu 移到 megatron.core）",
        "python -c 'import megatron; print(megatron.__path__)' 查看实际使用的包；在仓库根目录以 PYTHONPATH=$PWD "
        "启动，卸载"
        "另一个；使用程序指定的 Megatron-LM 标签",
        _MEGATRON,
        confidence="likely",
    ),
    Cause(
        "deepspeed-config-key",
        r"KeyError: '(?P<key>train_(?:micro_)?batch_size\w*|gradient_accumulation_steps|zero_optimization|"
        r"stage3_\w+|fp16|bf16)'",
        "the DeepSpeed config has no {key}, and the program does not fill it in (\"auto\" is only for the Trainer of "
        "transformers and for accelerate)",
        "write {key} into the config as a number or section; with transformers give the config to TrainingArguments, "
        "which replaces \"auto\"",
        "DeepSpeed 配置中没有 {key}，而读取方不会补上（\"auto\" 只适用于 transformers 的 Trainer 和 accelerate）",
        "在配置中写入 {key}；使用 transformers 时把配置交给 TrainingArguments，由它替换 \"auto\"",
        "https://www.deepspeed.ai/docs/config-json/",
        confidence="likely",
    ),
    Cause(
        "checkpoint-arguments",
        r"(?P<name>\w+) value from checkpoint \((?P<saved>[^)]{1,80})\) is not equal to the (?:input|currently set) "
        r"argument value \((?P<given>[^)]{1,80})\)",
        "{name} is {saved} in the checkpoint and {given} in this run's arguments",
        "give --{name} as it was saved; --use-checkpoint-args takes all of them from the checkpoint",
        "{name} 在检查点中为 {saved}，本次运行参数为 {given}",
        "按保存时的值设置 --{name}；或 --use-checkpoint-args 全部取自检查点",
        _MEGATRON + "/issues/933",
    ),
    Cause(
        "megatron-checkpoint-keys",
        r"KeyError: '(?:iteration|total_iters|checkpoint_version|args|opt_param_scheduler|rng_state|"
        r"optimizer_state_dict|word_embeddings|language_model)'",
        "the checkpoint lacks what Megatron writes into its own: it was converted, saved by another program or "
        "release, or has only the weights",
        "--finetune (weights only, iteration 0), --no-load-optim --no-load-rng; the converter of this release "
        "(tools/checkpoint, powertrain convert)",
        "检查点缺少 Megatron 自己写入的内容：由转换得到、由其他程序或版本保存，或只有权重",
        "--finetune（只取权重，从 0 开始）、--no-load-optim --no-load-rng；使用该版本的转换工具（tools/checkpoint、"
        "powertrain convert）",
        "https://github.com/intelligent-machine-learning/dlrover/issues/977",
        confidence="likely",
        derive=lambda groups, excerpt: {}
        if any("egatron" in line or "checkpointing.py" in line or "neox" in line for line in excerpt.above)
        else None,
    ),
    Cause(
        "index-file",
        r"Could not find an index file at|(?:document|index)\.idx\b.{0,80}(?:not exist|not found|No such)|"
        r"doc_idx\.npy|Index file doesn't match expected format|"
        r"Invalid prefix.{0,40}data-path|One or both of the \.idx and \.bin files cannot be found",
        "no prepared data set exists under this prefix, or it is cut short, or of another kind: data_path is the path "
        "without .bin and .idx, and both files must be readable on every node",
        "ls <prefix>.bin <prefix>.idx on each node; prepare it (preprocess_data.py --append-eod, "
        "powertrain preprocess); the index cache must be written by rank 0 before the others read it "
        "(a shared file system)",
        "该前缀下没有预处理好的数据：data_path 不含 .bin/.idx 后缀，且各节点都要可读",
        "在每个节点 ls <前缀>.bin <前缀>.idx；用 preprocess_data.py（powertrain preprocess）预处理；"
        "索引缓存须在共享文件系统",
        "https://github.com/EleutherAI/gpt-neox/issues/1117",
        confidence="likely",
    ),
    Cause(
        "deepspeed-not-started",
        r"DeepSpeed backend not set, please initialize it|deepspeed\.comm\b.{0,60}not initialized",
        "DeepSpeed's communication is used before it was initialized: the program was started without its launcher, or "
        "a collective runs before deepspeed.initialize",
        "deepspeed (or torchrun) train.py ...; deepspeed.init_distributed() first",
        "DeepSpeed 通信尚未初始化就被使用：没有用其启动器启动，或在 deepspeed.initialize 之前进行集合通信",
        "用 deepspeed（或 torchrun）启动；先 deepspeed.init_distributed()",
        "https://www.deepspeed.ai/getting-started/",
    ),
    Cause(
        "accelerate-not-started",
        r"properly initialize your accelerator via|You must call `?accelerator\.prepare|"
        r"AcceleratorState has not been initialized",
        "a logger or function of accelerate is used before an Accelerator exists",
        "accelerator = Accelerator() (or PartialState()) before that line",
        "在创建 Accelerator 之前使用了 accelerate 的日志或函数",
        "在该行之前 accelerator = Accelerator()（或 PartialState()）",
        "https://huggingface.co/docs/accelerate/package_reference/state",
    ),
    Cause(
        "nccl-argument",
        r"NCCL error in.{0,200}, (?:invalid argument|invalid usage), NCCL version|ncclInvalidUsage|ncclInvalidArgument",
        "NCCL got arguments that cannot be right: two ranks use one GPU (more processes than GPUs, the same "
        "CUDA_VISIBLE_DEVICES or no torch.cuda.set_device), or ranks disagree about the group",
        "torch.cuda.set_device(LOCAL_RANK) before the first collective; --nproc-per-node = number of GPUs; "
        "NCCL_DEBUG=WARN prints which argument",
        "NCCL 参数不合法：两个 rank 使用同一 GPU（进程多于 GPU、CUDA_VISIBLE_DEVICES 相同、没有 set_device），或各 "
        "rank 的组不一致",
        "首次集合通信前 torch.cuda.set_device(LOCAL_RANK)；--nproc-per-node 等于 GPU 数；NCCL_DEBUG=WARN "
        "显示是哪个参数",
        "https://github.com/pytorch/pytorch/issues/50820",
        confidence="likely",
    ),
    Cause(
        "token-limit",
        r"Token indices sequence length is longer than the specified maximum sequence length for this model "
        r"\((?P<have>\d+) "
        r"> (?P<most>\d+)\)",
        "a text has {have} tokens and the model takes {most}: positions beyond it fail in the embedding, often as a "
        "device-side assert",
        "tokenizer(..., truncation=True, max_length={most}), or split the text; harmless where the text is cut later",
        "文本有 {have} 个 token，模型最多 {most}：超出的位置会在 embedding 中出错（常表现为 device-side assert）",
        "tokenizer(..., truncation=True, max_length={most})，或拆分文本；若之后会截断则无害",
        "https://huggingface.co/docs/transformers/pad_truncation",
    ),
    Cause(
        "rust-panic",
        r"pyo3_runtime\.PanicException|thread '[^']{1,60}' panicked at",
        "the Rust part of tokenizers (safetensors, polars) stopped: a file of another release or damaged, or an input "
        "it does not foresee",
        "pip install --upgrade tokenizers transformers; download tokenizer.json again; the panic's own line above "
        "names the file and line",
        "tokenizers（safetensors、polars）的 Rust 部分中止：文件属于其他版本或已损坏，或输入不符合预期",
        "pip install --upgrade tokenizers transformers；重新下载 tokenizer.json；上方的 panic 行给出位置",
        "https://github.com/huggingface/tokenizers/issues/1297",
        confidence="likely",
    ),
)  # fmt: skip
