"""Trainers, servers and the models they load."""

from powertrain.doctor.causes.cause import Cause
from powertrain.doctor.nothing import none_value

CAUSES = (
    Cause(
        "vllm-engine",
        r"Engine core initialization failed|EngineCore failed to start|Engine process failed to start|"
        r"AsyncEngineDeadError|EngineDeadError|Background loop (?:has errored|is (?:stopped|not running))|"
        r"EngineCore encountered (?:a fatal|an) (?:error|issue)|WorkerProc initialization failed|"
        r"Scheduler hit an exception",
        "the server's worker process ended at its start or while it ran; its own error stands above, from another "
        "process",
        "look up for the first ERROR of EngineCore, Worker or Scheduler, and give that to powertrain diagnose; "
        "enforce_eager=True and one GPU narrow it down",
        "服务器的 worker 进程退出；其错误在上方，由另一进程打印",
        "向上查找 EngineCore、Worker 或 Scheduler 的第一个 ERROR，再交给 powertrain diagnose；enforce_eager=True "
        "和单 GPU 可缩小范围",
        "https://docs.vllm.ai/en/latest/usage/troubleshooting/",
        confidence="possible",
    ),
    Cause(
        "vllm-device",
        r"Failed to infer device type",
        "vLLM finds no GPU: NVML does not answer, torch is a build for the CPU, or this system is not supported",
        "nvidia-smi; python -c 'import torch; print(torch.version.cuda, torch.cuda.is_available())'; a vLLM wheel "
        "of that CUDA",
        "vLLM 找不到 GPU：NVML 无响应、torch 为 CPU 版，或系统不受支持",
        "nvidia-smi；python -c 'import torch; print(torch.version.cuda, torch.cuda.is_available())'；安装对应 CUDA "
        "的 vLLM",
        "https://docs.vllm.ai/en/latest/usage/troubleshooting/",
    ),
    Cause(
        "vllm-length",
        r"max_model_len \(?\d+\)? is greater than the derived max_model_len|longer than the maximum model length|"
        r"maximum context length is \d+ tokens|is longer than the maximum",
        "the prompt or max_model_len is longer than the model allows",
        "--max-model-len within max_position_embeddings, or rope scaling in the model's config; a shorter prompt",
        "提示或 max_model_len 超过模型允许的长度",
        "--max-model-len 不超过 max_position_embeddings，或在模型配置中设置 rope scaling；缩短提示",
        "https://docs.vllm.ai/en/latest/usage/troubleshooting/",
    ),
    Cause(
        "bitsandbytes-setup",
        r"CUDA SETUP: (?:Something unexpected happened|Setup Failed|CUDA detection failed|"
        r"Required library version not found)|CUDA is required but not available for bitsandbytes|"
        r"only has CPU support|libcudart\.so not found in any",
        "bitsandbytes has no library that fits this CUDA, or does not find the CUDA runtime",
        "pip install --upgrade bitsandbytes (older ones have neither newer CUDAs nor Windows); python -m "
        "bitsandbytes says what it looks for; BNB_CUDA_VERSION=124 chooses",
        "bitsandbytes 没有适合该 CUDA 的库，或找不到 CUDA 运行时",
        "pip install --upgrade bitsandbytes（旧版没有新 CUDA 和 Windows 支持）；python -m bitsandbytes "
        "显示查找过程；BNB_CUDA_VERSION=124 可指定",
        "https://huggingface.co/docs/bitsandbytes/main/en/installation",
        confidence="likely",
    ),
    Cause(
        "hub-files",
        r"does not appear to have (?:a )?files? named|Error no file named|no file named \S{1,80} found in directory|"
        r"Unable to load weights from pytorch checkpoint|We couldn't find .{0,80}(?:config|weights)|"
        r"Can't load (?:the )?(?:configuration|model|tokenizer|config|image processor|feature extractor) (?:of|"
        r"for) '(?P<name>[^']{1,120})'|EntryNotFoundError|LocalEntryNotFoundError|"
        r"Consistency check failed: file should be of size",
        "the folder or Hub repository does not hold the files of a Transformers model: the path is wrong, the "
        "download is not whole, or it is in another format (an adapter, original weights, GGUF)",
        "ls the folder (config.json, *.safetensors, tokenizer files); hf download again; a folder of your own with "
        "the same name as the Hub id hides it; adapters: PeftModel.from_pretrained",
        "目录或 Hub 仓库中没有 Transformers 模型的文件：路径错误、下载不完整，或为其他格式（adapter、原始权重、"
        "GGUF）",
        "检查目录（config.json、*.safetensors、分词器文件）；重新 hf download；与 Hub id 同名的本地目录会遮蔽它；"
        "adapter 用 PeftModel.from_pretrained",
        "https://huggingface.co/docs/transformers/troubleshooting",
        confidence="likely",
    ),
    Cause(
        "peft-targets",
        r"Target modules? .{1,300} not found in the base model|No modules were targeted for adaptation|"
        r"Please specify `target_modules` in `peft_config`|Target module \w.{0,200} is not supported",
        "LoRA's target_modules name no layer of this model, or a kind that PEFT does not adapt",
        "target_modules=\"all-linear\", or names from [n for n, m in model.named_modules() if isinstance(m, "
        "torch.nn.Linear)]",
        "LoRA 的 target_modules 在该模型中没有对应的层，或为 PEFT 不支持的类型",
        "target_modules=\"all-linear\"，或从 model.named_modules() 中取 Linear 的名字",
        "https://huggingface.co/docs/peft/developer_guides/troubleshooting",
    ),
    Cause(
        "quantized-training",
        r"cannot (?:perform )?fine-?tun(?:e|ing) on purely quantized|loaded (?:with|"
        r"in) `?device_map='auto'`? in any distributed mode|is not supported for `?[48]-bit`? ?(?:or `8-bit`)?|"
        r"can't train a model that has been loaded in (?:8|4)-bit|`\.to` is not supported for|"
        r"device_map=.{0,40}in any distributed mode",
        "a quantized or spread-out (device_map) model was trained or moved as if it were a plain one",
        "LoRA on top (get_peft_model after prepare_model_for_kbit_training); several ranks: device_map={\"\": "
        "LOCAL_RANK}; no .to() after loading in 4 or 8 bits",
        "量化或按 device_map 分布的模型被当作普通模型训练或移动",
        "在其上加 LoRA（prepare_model_for_kbit_training 后 get_peft_model）；多 rank：device_map={\"\": "
        "LOCAL_RANK}；4、8 位加载后不要 .to()",
        "https://huggingface.co/docs/transformers/quantization/bitsandbytes",
    ),
    Cause(
        "deepspeed-settings",
        r"Check batch related parameters|low_cpu_mem_usage=True` or with passing a `device_map`|"
        r"ZeRO-Offload with a client provided optimizer|DeepSpeed(?:Zero)?Config\w*.{0,80}(?:extra|validation)|"
        r"Extra inputs are not permitted|extra fields not permitted|"
        r"Please correct the following DeepSpeed config values|Found `(?:optimizer|"
        r"scheduler)` configured in the DeepSpeed config|CPUAdam param is on|ZeRO stage \d.{0,60}(?:not supported|"
        r"incompatible|requires)",
        "DeepSpeed's config contradicts itself, the trainer's arguments, or the installed version",
        "\"auto\" for what the trainer sets (batch sizes, lr, dtype); keys of this version's documentation; no "
        "device_map with ZeRO-3; DeepSpeedCPUAdam with offload",
        "DeepSpeed 配置自相矛盾，或与训练器参数、所装版本不符",
        "训练器设置的项写 \"auto\"（batch、学习率、dtype）；按所装版本的文档书写；ZeRO-3 不用 device_map；offload "
        "使用 DeepSpeedCPUAdam",
        "https://huggingface.co/docs/transformers/deepspeed",
    ),
    Cause(
        "sharded-checkpoint",
        r"Unable to find latest file at|load(?:ed)? used a DP world size of|Client provided checkpoint load path|"
        r"Missing key in checkpoint state_dict|Failed to validate global plan|No \.metadata|\.metadata' ?$|"
        r"checkpoint metadata .{0,40}(?:missing|not found)|saved with a different (?:world|tensor|pipeline)|"
        r"could not find arguments in the checkpoint",
        "a checkpoint of many files does not suit this run: a folder above or below is meant, files are missing, "
        "or it was saved by another number of ranks",
        "the folder that holds `latest` (DeepSpeed) or .metadata (torch); the same number of ranks, or convert it: "
        "zero_to_fp32.py, ds_to_universal.py, powertrain convert",
        "多文件检查点不适合本次运行：应为上一级或下一级目录、缺少文件，或保存时 rank 数不同",
        "使用含 latest（DeepSpeed）或 .metadata（torch）的目录；相同 rank 数，或先转换：zero_to_fp32.py、"
        "ds_to_universal.py、powertrain convert",
        "https://www.deepspeed.ai/tutorials/universal-checkpointing/",
        confidence="likely",
    ),
    Cause(
        "datasets-script",
        r"Dataset scripts are no longer supported|Loading a dataset cached in a LocalFileSystem is not supported|"
        r"Couldn't find (?:a|any) (?:dataset|data file)|DatasetNotFoundError|Feature type '\w+' not found|"
        r"DatasetGenerationError|An error occurred while generating the dataset",
        "the library datasets does not read this data set: newer versions run no scripts, older ones do not know "
        "its format, or its name is wrong",
        "a data set in parquet (its branch refs/convert/parquet); pip install --upgrade datasets, or 'datasets<4' "
        "for scripts; check the name",
        "datasets 库无法读取该数据集：新版不运行脚本，旧版不认识格式，或名称有误",
        "使用 parquet 数据集（分支 refs/convert/parquet）；pip install --upgrade datasets，脚本则用 'datasets<4'；"
        "检查名称",
        "https://huggingface.co/docs/datasets/index",
        confidence="likely",
    ),
    Cause(
        "accelerate-config",
        r"Less than two GPU ids were configured|args\.mixed_precision\.lower\(\)|had unknown keys \(|"
        r"accelerate/commands/config/config_args\.py",
        "accelerate's config file is missing, was made by another version, or does not suit the number of GPUs",
        "accelerate config (or rm ~/.cache/huggingface/accelerate/default_config.yaml); --multi_gpu "
        "--num_processes=N --gpu_ids=all; or torchrun",
        "accelerate 的配置文件缺失、由其他版本生成，或与 GPU 数不符",
        "accelerate config（或删除 ~/.cache/huggingface/accelerate/default_config.yaml）；--multi_gpu "
        "--num_processes=N --gpu_ids=all；或使用 torchrun",
        "https://huggingface.co/docs/accelerate/basic_tutorials/launch",
        confidence="likely",
    ),
    Cause(
        "script-arguments",
        r"are not used by the HfArgumentParser|remaining_argv: \[|"
        r"error: unrecognized arguments: (?P<arguments>[^\n]{1,200})|"
        r"error: the following arguments are required|error: argument \S{1,60}: (?:invalid|expected)|"
        r"[Nn]o such option:? |error: ambiguous option",
        "the program does not take these options: they are the launcher's, of another version, misspelled, or a "
        "required one is missing",
        "a launcher's own options (--hostfile, --num_gpus, --include) stand before the script; the program with "
        "--help; the script and the library of one time (the example's own requirements); options that a launcher adds "
        "(--local_rank): parse_known_args",
        "程序不接受这些选项：属于启动器、属于另一版本、拼写错误，或缺少必需项",
        "启动器自己的选项（--hostfile、--num_gpus）写在脚本之前；用 --help 查看；脚本与库使用同一时期的版本",
        "https://docs.python.org/3/library/argparse.html",
    ),
    Cause(
        "tokenizers-old",
        r"data did not match any variant of untagged enum",
        "the tokenizer file was written by a newer tokenizers (or transformers) than the installed one",
        "pip install --upgrade tokenizers transformers",
        "分词器文件由比所装版本更新的 tokenizers（或 transformers）写成",
        "pip install --upgrade tokenizers transformers",
        "https://github.com/huggingface/transformers/issues/31963",
    ),
    Cause(
        "no-labels",
        r"did not return a loss from the inputs",
        "the trainer got no loss: the batch has no labels, or their column has another name",
        "labels in the data set (a collator for the task: DataCollatorForLanguageModeling(mlm=False)); "
        "label_names; remove_unused_columns=False",
        "训练器没有得到损失：batch 中没有 labels，或列名不同",
        "数据集中加入 labels（使用相应的 collator：DataCollatorForLanguageModeling(mlm=False)）；label_names；"
        "remove_unused_columns=False",
        "https://huggingface.co/docs/transformers/troubleshooting",
    ),
    Cause(
        "none-value",
        r"'NoneType' object (?:has no attribute '(?P<attribute>\w+)'|is not (?:callable|subscriptable|iterable))|"
        r"object of type '(?P<len>NoneType)' has no len|a real number, not 'NoneType'|or a number, not 'NoneType'|"
        r"unsupported operand type\(s\) for [^ ]{1,12} '(?:NoneType' and '\w+|\w+' and 'NoneType)'|"
        r"argument of type 'NoneType' is not|expected str, bytes or os\.PathLike object, not NoneType|"
        r"not supported between instances of '(?:NoneType' and '\w+|\w+' and 'NoneType)'|"
        r"cannot unpack non-iterable NoneType|argument after \*\*? must be (?:a mapping|an iterable), not NoneType",
        "{what} is None{where}: what should have made it failed earlier, found nothing, or was not configured or "
        "passed",
        "{advice}; the first warning above it",
        "{what} 为 None{where}：产生它的步骤先前失败、没有找到内容，或没有配置、传入",
        "查看该变量的来源与上方第一个警告；在库内部时：使用调用方的 requirements 所要求的库版本",
        "https://huggingface.co/docs/transformers/troubleshooting",
        confidence="likely",
        derive=none_value,
        derives=("what", "where", "advice"),
        fallback=True,
    ),
    Cause(
        "command-missing",
        r"'(?P<command>[\w.+-]{1,60})' is not recognized as (?:an internal|the name)|"
        r"^(?:\S{1,40}: )?(?:line \d+: )?(?P<shell>[\w.+-]{1,60}): (?:command )?not found$|"
        r"[Cc]ommand not found: (?P<zsh>[\w.+-]{1,60})|无法将“(?P<powershell>[\w.+-]{1,60})”项识别|"
        r"'(?P<chinese>[\w.+-]{1,60})' 不是内部或外部命令",
        "there is no command {command}{shell}{zsh}{powershell}{chinese} on PATH: its package is not installed in this "
        "environment, or the folder of its scripts is not on PATH",
        "activate the environment; pip install the package with this very Python; python -m <package> instead of the "
        "command; PATH with ~/.local/bin (Windows: the Scripts folder)",
        "PATH 中没有命令 {command}{shell}{zsh}{powershell}{chinese}：其包未安装在当前环境，或脚本目录不在 PATH 中",
        "激活环境；用同一个 Python 安装该包；用 python -m <包> 代替；将 ~/.local/bin（Windows：Scripts 目录）加入 PATH",
        "https://packaging.python.org/en/latest/tutorials/installing-packages/",
        confidence="likely",
    ),
    Cause(
        "value-not-in-list",
        r"ValueError: '?(?P<value>[^']{1,120}?)'? is not in list|"
        r"(?:Value|Key|Type)Error: '?(?P<other>[^'\n]{1,80}?)'? (?:is )?not (?:a valid|one of|in the list of|among)",
        "{value}{other} is looked up in a list of names that does not have it: a setting (a metric, a column, a "
        "checkpoint, an optimizer) is spelled otherwise, or of another release",
        "print that list; the name exactly as the program has it (the line above the message)",
        "在名称列表中查找 {value}{other}，而列表中没有：设置（指标、列、检查点、优化器）的拼写不同，或属于另一版本",
        "打印该列表；按程序中的确切名称书写（见消息上一行）",
        "https://docs.python.org/3/library/stdtypes.html",
        confidence="likely",
    ),
    Cause(
        "name-not-text",
        r"attribute name must be string",
        "a class or function is looked up by a name that is None: the entry of the config that names it (optimizer, "
        "scheduler, model class) is missing",
        "give that entry (DeepSpeed: \"optimizer\" in the config, or optimizer= in initialize); the line above says "
        "which",
        "按名称查找类或函数，而名称为 None：配置中缺少该项（优化器、调度器、模型类）",
        "补上该项（DeepSpeed：配置中的 \"optimizer\"，或 initialize 的 optimizer=）；上一行说明是哪一项",
        "https://github.com/deepspeedai/DeepSpeed/issues/2255",
        confidence="likely",
    ),
    Cause(
        "file-missing",
        r"(?:FileNotFoundError: |"
        r"\[Errno 2\] )?(?:\[Errno 2\] )?No such file or directory: \W?(?P<path>[^'\"\n]{1,300})|"
        r"can't open file '(?P<script>[^']{1,300})'",
        "{path}{script} does not exist where the program runs: the path is relative to another folder, misspelled, "
        "or not mounted",
        "pwd and ls in the same place (in the container, on every node); an absolute path",
        "程序运行之处没有 {path}{script}：路径相对于别的目录、拼写错误或未挂载",
        "在同一处（容器内、每个节点）运行 pwd 和 ls；使用绝对路径",
        "https://docs.python.org/3/library/exceptions.html",
        confidence="likely",
    ),
    Cause(
        "custom-all-reduce",
        r"custom_all_reduce\.(?:py|cuh?)|register_graph_buffers",
        "the server's own all-reduce could not share GPU memory between ranks (CUDA IPC)",
        "--disable-custom-all-reduce; PYTORCH_CUDA_ALLOC_CONF without expandable_segments; docker run --ipc=host",
        "服务器自带的 all-reduce 无法在 rank 间共享显存（CUDA IPC）",
        "--disable-custom-all-reduce；PYTORCH_CUDA_ALLOC_CONF 不用 expandable_segments；docker run --ipc=host",
        "https://github.com/sgl-project/sglang/issues/9706",
        confidence="likely",
    ),
)  # fmt: skip
