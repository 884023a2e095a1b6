"""Errors of a PyTorch program: shapes, dtypes, parameters in parts, gradients."""

from powertrain.doctor.causes.cause import Cause

CAUSES = (
    Cause(
        "dtype-not-implemented",
        r"\"?(?P<op>\w+)\"? not implemented for '(?P<dtype>\w+)'",
        "PyTorch has no {op} for {dtype} on this device: most often a model in half precision runs on the CPU, or "
        "the labels have another dtype",
        "model.float() on a CPU (or bfloat16), or move it to the GPU; labels .long()",
        "PyTorch 在该设备上没有 {dtype} 的 {op}：多为半精度模型在 CPU 上运行，或标签类型不对",
        "在 CPU 上 model.float()（或 bfloat16），或移到 GPU；标签 .long()",
        "https://github.com/pytorch/pytorch/issues/52291",
        confidence="likely",
    ),
    Cause(
        "parameter-not-gathered",
        r"size of tensor a \(0\)|size of tensor b \(0\)|storage of size 0|'weight' must be 2-D|"
        r"torch\.Size\(\[0\]\) from checkpoint|got 1-D tensor|weight to be a? ?\w+, but got (?:shape )?\[0\]|"
        r"shape of weight \[0\]|the shape in current model is torch\.Size\(\[0\]\)|"
        r"out of bounds for storage of size 0|ds_status == ZeroParamStatus|'status': 'NOT_AVAILABLE'",
        "a parameter is empty here: ZeRO-3 or FSDP holds it in parts, and it was used outside of the forward that "
        "gathers it",
        "with deepspeed.zero.GatheredParameters([p]): around the use; call the wrapped model, not a submodule; "
        "FSDP: summon_full_params, or wrap that module itself",
        "此处参数为空：ZeRO-3 或 FSDP 分片保存它，而在收集它的 forward 之外使用了它",
        "使用处加 with deepspeed.zero.GatheredParameters([p])；调用包装后的模型而非子模块；FSDP："
        "summon_full_params，或单独包装该模块",
        "https://deepspeed.readthedocs.io/en/latest/zero3.html",
        confidence="likely",
    ),
    Cause(
        "fsdp-state-dict",
        r"local_state_dict\W|Trying to resize storage that is not resizable|"
        r"can only be used when parameters are flatten|_flat_param\b.{0,80}(?:Missing|Unexpected)|"
        r"Cannot writeback when the parameter shape changes|Expects? .{0,60}FlatParameter|sharded_state_dict",
        "weights of an FSDP model were saved or loaded as the wrong kind: in parts where whole ones are wanted, or "
        "the other way round",
        "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
        "options=StateDictOptions(full_state_dict=True)) on every rank; load with its set_model_state_dict",
        "FSDP 模型的权重以错误的形式保存或加载：需要完整的却是分片的，或相反",
        "在每个 rank 上调用 get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))；用 "
        "set_model_state_dict 加载",
        "https://docs.pytorch.org/docs/stable/fsdp.html",
        confidence="likely",
    ),
    Cause(
        "fsdp-wrapping",
        r"Must flatten tensors with uniform|`?sync_module_states=True`? requires|Module has (?:CPU|GPU|"
        r"both CPU and GPU) parameters|expected to be in states \[?<?(?:Training|Handle)?\w*State|FSDP (?:does not|"
        r"doesn't) support|Could not find the transformer layer class|"
        r"expects all parameters to have same requires_grad|Could not find \S+ class in the model",
        "FSDP was given a module that it cannot flatten or run as it is: mixed dtypes or frozen and trained "
        "parameters in one unit, the wrong device, or a module called outside of the wrapped one",
        "use_orig_params=True (or fully_shard, FSDP2); one dtype for all parameters; the model's layer class for "
        "wrapping; move it to the GPU before sync_module_states",
        "FSDP 得到的模块无法按现状展平或运行：一个单元内 dtype 混合、冻结与训练参数混合、设备不对，或在包装外被调用",
        "use_orig_params=True（或 fully_shard，FSDP2）；参数 dtype 一致；指定正确的层类；sync_module_states 前移到 "
        "GPU",
        "https://docs.pytorch.org/docs/stable/fsdp.html",
        confidence="likely",
    ),
    Cause(
        "dtensor-mixed",
        r"got mixed torch\.Tensor and DTensor|does not have a sharding strategy registered|"
        r"Sharding propagation failed",
        "an operation got a sharded tensor (DTensor) and a plain one, or has no rule for sharded tensors",
        "distribute_tensor (or .full_tensor(), .to_local()) so that both are of one kind; a newer torch",
        "某运算同时得到分片张量（DTensor）和普通张量，或没有分片规则",
        "用 distribute_tensor（或 .full_tensor()、.to_local()）使二者一致；升级 torch",
        "https://docs.pytorch.org/docs/stable/distributed.tensor.html",
        confidence="likely",
    ),
    Cause(
        "ready-twice",
        r"Expected to mark a variable ready only once|has already been reduced|"
        r"Gradient computed twice for this partition",
        "a parameter got its gradient twice in one backward: reentrant gradient checkpointing, or a module used "
        "twice, under DDP or ZeRO",
        "gradient_checkpointing_kwargs={\"use_reentrant\": False}; find_unused_parameters=False; one backward for "
        "a step",
        "同一次反向中某参数得到两次梯度：DDP 或 ZeRO 下的 reentrant 重计算，或模块被使用两次",
        "gradient_checkpointing_kwargs={\"use_reentrant\": False}；find_unused_parameters=False；每步只反向一次",
        "https://docs.pytorch.org/docs/stable/notes/ddp.html",
        confidence="likely",
    ),
    Cause(
        "inplace-modified",
        r"modified by an inplace operation|"
        r"a leaf Variable that requires grad is being used in an in-place operation|"
        r"is a view and (?:is )?being modified inplace",
        "a tensor that backward needs was overwritten after it was saved",
        "replace x += y by x = x + y (and ReLU(inplace=True)); clone() before; "
        "torch.autograd.set_detect_anomaly(True) names the forward line",
        "反向需要的张量在保存后被覆盖",
        "将 x += y 改为 x = x + y（以及 ReLU(inplace=True)）；先 clone()；torch.autograd.set_detect_anomaly(True) "
        "可指出前向位置",
        "https://docs.pytorch.org/docs/stable/notes/autograd.html#in-place-correctness-checks",
    ),
    Cause(
        "backward-twice",
        r"backward through the graph a second time",
        "backward was called twice on one graph, whose saved tensors are freed after the first",
        "one backward of the sum of losses; detach() tensors that are kept from one step to the next; "
        "retain_graph=True only if both are meant",
        "对同一计算图反向两次，而保存的张量在第一次后已释放",
        "对损失之和反向一次；跨步保留的张量要 detach()；确需两次才用 retain_graph=True",
        "https://docs.pytorch.org/docs/stable/generated/torch.autograd.backward.html",
    ),
    Cause(
        "index-range",
        r"index out of range in self|Target \d+ is out of bounds|"
        r"index \d+ is out of bounds for dimension \d+ with size|indices should be either on",
        "an index is beyond its table: a token id past the vocabulary, a position past the longest, a label past "
        "the classes",
        "compare the largest id with the embedding (added tokens: resize_token_embeddings), positions with the "
        "longest, labels with the classes",
        "下标超出表的大小：token id 超出词表、位置超出最大长度，或标签超出类别数",
        "比较最大的 id 与 embedding（新增 token：resize_token_embeddings）、位置与最大长度、标签与类别数",
        "https://github.com/huggingface/transformers/issues/7050",
        confidence="likely",
    ),
    Cause(
        "shape-mismatch",
        r"shapes? cannot be multiplied|size of tensor a \(\d+\) must match the size of tensor b|"
        r"Sizes of tensors must match except in dimension|is invalid for input of size \d+|Given normalized_shape=|"
        r"The expanded size of the tensor|size mismatch, m1|Expected input batch_size \(\d+\) to match|"
        r"shape mismatch: value tensor",
        "two tensors do not fit: a wrong size in the config, an input of another length, or a checkpoint of "
        "another model",
        "print the shapes on the line above it in the traceback; compare hidden size, heads and lengths with the "
        "model's config",
        "两个张量的形状不匹配：配置大小有误、输入长度不同，或检查点属于另一个模型",
        "打印 traceback 中该行上方的形状；与模型配置比较 hidden size、heads 和长度",
        "https://docs.pytorch.org/docs/stable/notes/broadcasting.html",
        confidence="possible",
    ),
    Cause(
        "batch-not-padded",
        r"stack expects each tensor to be equal size|activate truncation and/or padding|"
        r"does not have a padding token|expected sequence of length \d+ at dim|too many dimensions 'str'",
        "sequences of different lengths (or texts) were put into one batch without padding",
        "padding=True and a data collator (DataCollatorWithPadding, DataCollatorForSeq2Seq); tokenizer.pad_token = "
        "tokenizer.eos_token where there is none; pretraining (Megatron, NeoX): the data's index was built for "
        "another seq length or holds too little, so build it again",
        "不同长度的序列（或文本）未填充就放入同一 batch",
        "padding=True 并使用 data collator（DataCollatorWithPadding、DataCollatorForSeq2Seq）；没有 pad token 时 "
        "tokenizer.pad_token = tokenizer.eos_token",
        "https://huggingface.co/docs/transformers/troubleshooting",
    ),
    Cause(
        "no-parameters",
        r"optimizer got an empty parameter list",
        "the optimizer got no parameters to train: every parameter is frozen, or model.parameters() was used up "
        "before",
        "check requires_grad; pass list(model.parameters()); with PEFT: target_modules must match",
        "优化器没有可训练的参数：全部冻结，或 model.parameters() 迭代器已用尽",
        "检查 requires_grad；传入 list(model.parameters())；PEFT 的 target_modules 必须匹配",
        "https://docs.pytorch.org/docs/stable/optim.html",
    ),
    Cause(
        "shared-tensors",
        r"trying to be saved contained shared tensors|Some tensors share memory|tensors share(?:d)? memory, this will "
        r"lead",
        "safetensors does not save one tensor under two names (tied weights)",
        "save_pretrained, which knows the ties; safetensors.torch.save_model(model, path); or "
        "safe_serialization=False",
        "safetensors 不保存同一张量的两个名字（绑定的权重）",
        "使用了解绑定关系的 save_pretrained；safetensors.torch.save_model(model, path)；或 safe_serialization=False",
        "https://huggingface.co/docs/safetensors/torch_shared_tensors",
    ),
    Cause(
        "recomputation-differs",
        r"Recomputed values for the following tensors have different metadata|"
        r"number of tensors was saved during the original forward|"
        r"saved during (?:the )?(?:original )?forward and recomputation",
        "gradient checkpointing computed other tensors the second time: autocast, dropout state, a cache or a "
        "router that changes between the two",
        "use_cache=False; the same autocast around both; preserve_rng_state=True; for MoE with ZeRO-3 or FSDP: "
        "use_reentrant=True, or a newer torch",
        "重计算得到了不同的张量：autocast、dropout 状态、缓存或路由在两次之间变化",
        "use_cache=False；两次使用相同的 autocast；preserve_rng_state=True；MoE 与 ZeRO-3 或 FSDP："
        "use_reentrant=True，或升级 torch",
        "https://docs.pytorch.org/docs/stable/checkpoint.html",
        confidence="likely",
    ),
    Cause(
        "loss-not-scalar",
        r"grad can be implicitly created only for scalar outputs|Gather got an input of invalid size|"
        r"Caught \w+Error in replica \d+|chunk expects at least a 1-dimensional tensor",
        "nn.DataParallel (Trainer uses it where one process sees several GPUs) gave a loss for each GPU, or split "
        "an input that cannot be split",
        "torchrun --nproc-per-node=N, or CUDA_VISIBLE_DEVICES=0; with DataParallel: loss.mean()",
        "nn.DataParallel（一个进程看到多块 GPU 时 Trainer 会使用）对每块 GPU 给出一个损失，或拆分了不能拆分的输入",
        "torchrun --nproc-per-node=N，或 CUDA_VISIBLE_DEVICES=0；DataParallel 时 loss.mean()",
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html",
        confidence="likely",
    ),
    Cause(
        "no-inf-checks",
        r"No inf checks were recorded for this optimizer",
        "GradScaler saw no gradient: no parameter of this optimizer took part in the loss",
        "check that the loss depends on its parameters; build the optimizer after FSDP or PEFT wraps the model; "
        "bf16 needs no scaler",
        "GradScaler 没有看到梯度：该优化器的参数都未参与损失",
        "检查损失是否依赖其参数；在 FSDP 或 PEFT 包装后再建优化器；bf16 不需要 scaler",
        "https://docs.pytorch.org/docs/stable/amp.html",
    ),
    Cause(
        "mps-missing",
        r"not (?:currently )?(?:implemented|supported) (?:for|on) the MPS|MPS backend out of memory|"
        r"MPS framework doesn't support",
        "Apple's GPU backend (MPS) lacks this operator or dtype, or its memory is full",
        "PYTORCH_ENABLE_MPS_FALLBACK=1; float32; a smaller batch; PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0",
        "Apple GPU 后端（MPS）没有该算子或类型，或显存已满",
        "PYTORCH_ENABLE_MPS_FALLBACK=1；使用 float32；减小 batch；PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0",
        "https://docs.pytorch.org/docs/stable/mps_environment_variables.html",
    ),
    Cause(
        "attention-alignment",
        r"is not correctly aligned|attn_bias\.stride\(-\d\) % \d+ != 0",
        "an attention mask or bias does not have the alignment that the kernel needs: its rows must be multiples of "
        "8 elements apart",
        "a mask sliced from one whose last dim is padded to a multiple of 8; is_causal instead of a mask",
        "注意力 mask 或 bias 的地址不满足核函数要求：行距须为 8 个元素的倍数",
        "从最后一维补齐到 8 的倍数的 mask 上切片；用 is_causal 代替 mask",
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html",
        confidence="likely",
    ),
)  # fmt: skip
