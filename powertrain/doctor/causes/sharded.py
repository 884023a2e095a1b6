"""Sharded training: FSDP, ZeRO, Megatron's groups, launchers."""

from powertrain.doctor.causes.cause import Cause

CAUSES = (
    Cause(
        "fsdp-mixed-grad",
        r"requires uniform .?requires_grad|flatten tensors with uniform .?requires_grad",
        "FSDP would put frozen and trained parameters (LoRA) into one flat tensor",
        "use_orig_params=True (fsdp_use_orig_params: true), or peft's fsdp_auto_wrap_policy, or "
        "FSDP2 (fully_shard)",
        "FSDP 会把冻结与可训练（LoRA）参数放进同一个扁平张量",
        "use_orig_params=True（fsdp_use_orig_params: true），或 peft 的 fsdp_auto_wrap_policy，或 "
        "FSDP2（fully_shard）",
        "https://github.com/huggingface/peft/issues/1702",
    ),
    Cause(
        "fsdp-device",
        r"Inconsistent compute device and `device_id` on rank (?P<rank>\d+): (?P<is>\S+) vs (?P<asked>\S+)",
        "on rank {rank} the model is on {is}, while FSDP was given {asked}",
        "torch.cuda.set_device(int(os.environ[\"LOCAL_RANK\"])) before the model is made, and "
        "device_id=torch.cuda.current_device()",
        "rank {rank} 的模型在 {is} 上，而 FSDP 被要求使用 {asked}",
        "创建模型之前 torch.cuda.set_device(int(os.environ[\"LOCAL_RANK\"]))，并传入 "
        "device_id=torch.cuda.current_device()",
        "https://docs.pytorch.org/docs/stable/fsdp.html",
    ),
    Cause(
        "fsdp-layer-class",
        r"Could not find the transformer layer class",
        "FSDP's auto-wrap policy names a layer class that the model does not have",
        "fsdp_transformer_layer_cls_to_wrap: the class of one block as print(model) shows it "
        "(LlamaDecoderLayer, Qwen2DecoderLayer)",
        "FSDP 自动包装策略中的层类在模型中不存在",
        "fsdp_transformer_layer_cls_to_wrap 写 print(model) 显示的块的类名",
        "https://huggingface.co/docs/accelerate/usage_guides/fsdp",
    ),
    Cause(
        "zero-no-sync",
        r"no_sync context manager is incompatible with gradient partitioning|"
        r"It is illegal to call Engine\.step\(\) inside no_sync",
        "DeepSpeed ZeRO-2 and 3 refuse no_sync, which a trainer enters for gradient accumulation: "
        "its release is older than DeepSpeed's",
        "upgrade accelerate and transformers; or pip install 'deepspeed<0.15.4'; or ZeRO-1",
        "DeepSpeed ZeRO-2、3 拒绝 no_sync，而训练器在梯度累积时使用它：训练器版本早于 DeepSpeed",
        "升级 accelerate 和 transformers；或 pip install 'deepspeed<0.15.4'；或 ZeRO-1",
        "https://github.com/deepspeedai/DeepSpeed/issues/6793",
    ),
    Cause(
        "zero-inflight",
        r"still have inflight params|Invalidate trace cache|inflight param registry",
        "ZeRO-3 fetched parameters for a module that did not run as it did in the step before: "
        "branches, generation or evaluation inside training, or experts that get no token",
        "stage3_prefetch_bucket_size 0 and stage3_max_reuse_distance 0; set_z3_leaf_modules for "
        "MoE; all modules in every step; a newer DeepSpeed",
        "ZeRO-3 预取了本步没有运行的模块的参数：分支、训练中的生成或评估，或没有 token 的专家",
        "stage3_prefetch_bucket_size 和 stage3_max_reuse_distance 设为 0；MoE 用 "
        "set_z3_leaf_modules；每步运行所有模块；升级 DeepSpeed",
        "https://github.com/deepspeedai/DeepSpeed/issues/5648",
        confidence="likely",
    ),
    Cause(
        "zero-empty-shape",
        r"(?:current model is|from checkpoint,? .{0,60}is) torch\.Size\(\[0\]\)",
        "ZeRO-3 has divided the parameters: each rank holds an empty one while weights are loaded "
        "or moved",
        "from_pretrained inside the trainer's DeepSpeed config (HfDeepSpeedConfig made first), "
        "deepspeed.zero.GatheredParameters around the load; saved files: zero_to_fp32.py",
        "ZeRO-3 已切分参数：加载或移动权重时每个 rank 上是空张量",
        "先创建 HfDeepSpeedConfig 再 from_pretrained；用 deepspeed.zero.GatheredParameters "
        "包住加载；已保存的文件用 zero_to_fp32.py",
        "https://huggingface.co/docs/transformers/deepspeed",
    ),
    Cause(
        "zero-optimizer",
        r"zero stage \d requires an optimizer|ZeRO.{0,40}requires an optimizer|DeepSpeedZeRoOffload|"
        r"DummyOptim",
        "DeepSpeed was started without an optimizer, as for evaluation, where its ZeRO stage wants "
        "one (or the other way round)",
        "an optimizer in the DeepSpeed config or in the call; for evaluation alone ZeRO-3 "
        "(deepspeed.init_inference) or no DeepSpeed",
        "DeepSpeed 启动时没有优化器（如仅评估），而该 ZeRO 阶段需要（或相反）",
        "在配置或调用中给出优化器；仅评估时用 ZeRO-3 或不用 DeepSpeed",
        "https://www.deepspeed.ai/docs/config-json/",
    ),
    Cause(
        "precision-device",
        r"can only be used on CUDA devices|Your setup doesn't support bf16|"
        r"fp16 mixed precision requires a GPU|bf16 mixed precision requires|"
        r"FP16 .{0,60}only be used on",
        "fp16 or bf16 was requested, and torch sees no GPU that supports it: a build for the CPU, no "
        "visible GPU, or one before Ampere",
        "python -c 'import torch; print(torch.version.cuda, torch.cuda.is_available())'; a CUDA "
        "build of torch; fp16 instead of bf16 before sm_80; neither on a CPU",
        "要求 fp16 或 bf16，而 torch 看不到支持它的 GPU：CPU 版 torch、GPU 不可见，或早于 Ampere",
        "python -c 'import torch; print(torch.version.cuda, torch.cuda.is_available())'；安装 CUDA "
        "版 torch；sm_80 之前用 fp16；CPU 上都不用",
        "https://huggingface.co/docs/transformers/perf_train_gpu_one",
    ),
    Cause(
        "batch-division",
        r"(?:global )?batch size \(?\d+\)? ?is not divisible|batch size .{0,60}(?:must be divisible|"
        r"not divisible)|is not divisible by (?:micro batch|the number of micro|world size)",
        "the global batch is not micro batch x data-parallel ranks x a whole number of "
        "accumulation steps",
        "choose them so that global = micro x ranks x steps; ranks = GPUs / (tensor x pipeline x "
        "context parallel)",
        "全局 batch 不等于 micro batch x 数据并行 rank 数 x 整数累积步数",
        "使 全局 = micro x rank 数 x 步数；rank 数 = GPU 数 / (张量 x 流水 x 上下文并行)",
        "https://github.com/NVIDIA/Megatron-LM",
    ),
    Cause(
        "megatron-no-checkpoint",
        r"could not find the metadata file|Checkpoint not found to provide arguments|"
        r"latest_checkpointed_iteration\.txt",
        "there is no Megatron checkpoint in the folder that was given: "
        "latest_checkpointed_iteration.txt is not in it",
        "--load names the folder that holds latest_checkpointed_iteration.txt, not iter_0000100 "
        "inside it; a Hugging Face model must be converted first",
        "所给目录中没有 Megatron 检查点：缺少 latest_checkpointed_iteration.txt",
        "--load 指向含 latest_checkpointed_iteration.txt 的目录，而非其中的 iter_0000100；Hugging "
        "Face 模型需先转换",
        "https://github.com/NVIDIA/Megatron-LM",
        confidence="likely",
    ),
    Cause(
        "model-parallel-groups",
        r"parallel group is not initialized|model parallel is not initialized|"
        r"initialize_model_parallel",
        "Megatron's process groups were used before they were created",
        "torch.distributed.init_process_group, then parallel_state.initialize_model_parallel(), "
        "before the model is built",
        "在创建之前就请求了 Megatron 的进程组",
        "构建模型前先 torch.distributed.init_process_group，再 "
        "parallel_state.initialize_model_parallel()",
        "https://docs.nvidia.com/megatron-core/developer-guide/latest/api-guide/index.html",
    ),
    Cause(
        "optimizer-groups",
        r"doesn't match the size of optimizer's group|different number of parameter groups",
        "the saved optimizer is of another set of parameters: layers were frozen, added (LoRA), or "
        "grouped otherwise since",
        "the same model, freezing and groups as when it was saved; or load the weights alone and "
        "begin with a new optimizer",
        "保存的优化器对应另一组参数：之后冻结、增加（LoRA）或重新分组",
        "使用保存时的模型、冻结与分组；或只加载权重并重新开始优化器",
        "https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.load_state_dict.html",
    ),
    Cause(
        "fused-optimizer",
        r"`?fused=True`? requires all the params",
        "the fused optimizer needs every parameter on a GPU in a floating dtype, and one is on the "
        "CPU, meta or quantized",
        "move the model before the optimizer is made; fused=False (optim=\"adamw_torch\") with "
        "offloading or quantized weights",
        "fused 优化器要求所有参数为 GPU 上的浮点类型，而有参数在 CPU、meta 或已量化",
        "先移动模型再创建优化器；offload 或量化时 fused=False（optim=\"adamw_torch\"）",
        "https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html",
    ),
    Cause(
        "accelerate-launch-argument",
        r"int\(args\.(?:machine_rank|num_processes|num_machines)\)|args\.main_process_port",
        "accelerate launch was not given a number that several machines need",
        "--machine_rank (in Slurm: $SLURM_NODEID), --num_machines, --num_processes, "
        "--main_process_ip and --main_process_port on each machine",
        "accelerate launch 缺少多机所需的参数",
        "每台机器给出 --machine_rank（Slurm：$SLURM_NODEID）、--nu"
        "m_machines、--num_processes、--main_process_ip、--main_process_port",
        "https://huggingface.co/docs/accelerate/basic_tutorials/launch",
    ),
    Cause(
        "launch-port",
        r"launch distributed communication on port|port is already allocated",
        "the port is taken: another job, or a run that did not end, listens on it",
        "another one: --main_process_port 29501 (--master_port; torchrun "
        "--rdzv_endpoint=localhost:0); ss -ltnp names who has it",
        "端口被占用：另一任务或未结束的运行正在监听",
        "换端口：--main_process_port 29501（--master_port；torchrun "
        "--rdzv_endpoint=localhost:0）；ss -ltnp 查看占用者",
        "https://docs.pytorch.org/docs/stable/elastic/run.html",
    ),
    Cause(
        "nvme-offload",
        r"deepspeed_aio: .{1,40}failed|num_elems \d+ ?> ?buffer|n_completes >= min_completes|"
        r"AsyncPartitionedParameterSwapper|"
        r"swap_buffer",
        "DeepSpeed's offloading to disk: a parameter is larger than the swap buffer, or the disk "
        "does not take asynchronous direct I/O (network, overlay, full)",
        "offload_param.buffer_size above the largest parameter; buffer_count; nvme_path on a local "
        "NVMe disk with room; device \"cpu\" instead",
        "DeepSpeed 卸载到磁盘：参数大于交换缓冲区，或磁盘不支持异步直接 I/O（网络盘、overlay、已满）",
        "offload_param.buffer_size 大于最大参数；buffer_count；nvme_path 位于有空间的本地 NVMe；或 "
        "device \"cpu\"",
        "https://www.deepspeed.ai/docs/config-json/",
        confidence="likely",
    ),
    Cause(
        "zero-offload-optimizer",
        r"ZeRO-Offload with a client provided optimizer",
        "the optimizer is offloaded to the CPU, and the one given (Apex's or torch's) is not "
        "DeepSpeed's CPU Adam",
        "DeepSpeedCPUAdam(params), or \"optimizer\": {\"type\": \"AdamW\"} in the DeepSpeed config; "
        "\"zero_force_ds_cpu_optimizer\": false to keep yours",
        "优化器被卸载到 CPU，而所给的（Apex 或 torch 的）不是 DeepSpeed 的 CPU Adam",
        "DeepSpeedCPUAdam(params)，或在 DeepSpeed 配置中写 \"optimizer\": {\"type\": "
        "\"AdamW\"}；保留自己的则 \"zero_force_ds_cpu_optimizer\": false",
        "https://www.deepspeed.ai/docs/config-json/",
    ),
)  # fmt: skip
