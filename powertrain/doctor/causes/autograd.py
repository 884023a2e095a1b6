"""Calls of PyTorch that are refused: autograd, scalars, indices, losses, data loaders."""

from powertrain.doctor.causes.cause import Cause

_NOTES = "https://docs.pytorch.org/docs/stable/notes/"

CAUSES = (
    Cause(
        "attention-second-derivative",
        r"derivative for aten::_(?:scaled_dot_product|flash_attention|efficient_attention)\w{0,60} is not implemented",
        "a second derivative goes through fused attention, which has a first one only (gradient penalty, "
        "torch.func, create_graph=True)",
        "with torch.nn.attention.sdpa_kernel(SDPBackend.MATH): around that attention",
        "二阶导数经过融合注意力，而它只有一阶导数（梯度惩罚、torch.func、create_graph=True）",
        "在该注意力处使用 with torch.nn.attention.sdpa_kernel(SDPBackend.MATH)",
        "https://github.com/pytorch/pytorch/issues/116350",
    ),
    Cause(
        "gradient-unused",
        r"differentiated Tensors appears to not have been used in the graph",
        "torch.autograd.grad was called for the gradient of a tensor that the result does not depend on",
        "allow_unused=True (its gradient is None), or take the tensor out of the inputs",
        "对结果不依赖的张量调用了 torch.autograd.grad",
        "allow_unused=True（梯度为 None），或从 inputs 中去掉该张量",
        _NOTES + "autograd.html",
    ),
    Cause(
        "memory-overlap",
        r"some elements of the input tensor and the written-to tensor refer to a single memory location|"
        r"more than one element of the written-to tensor refers to a single memory",
        "an in-place operation writes to a tensor whose elements share memory (expand(), overlapping views)",
        ".clone() (or .contiguous()) before it",
        "原地操作写入元素共享内存的张量（expand()、重叠视图）",
        "先 .clone()（或 .contiguous()）",
        _NOTES + "autograd.html",
    ),
    Cause(
        "tensor-as-number",
        r"only (?:one element tensors|integer tensors of a single element|length-1 arrays|size-1 arrays|0-dimensional "
        r"arrays) can be converted|"
        r"a Tensor with \d+ elements cannot be converted to Scalar|"
        r"Boolean value of Tensor with (?:more than one|no) value",
        "a tensor of several elements (or none) stands where one number or truth value is wanted: in an `if`, in "
        "item(), or in torch.tensor(list of tensors)",
        ".any(), .all(), .mean() or an index; torch.stack(list) for a list of tensors",
        "需要单个数值或真假值之处得到多元素张量：if、item() 或 torch.tensor(张量列表)",
        ".any()、.all()、.mean() 或取下标；张量列表用 torch.stack",
        "https://docs.pytorch.org/docs/stable/tensors.html",
    ),
    Cause(
        "index-dtype",
        r"tensors used as indices must be|index_\w+\(\): Expected dtype int32|"
        r"gather\(\): Expected dtype int64|scatter\w*\(\): Expected (?:index )?dtype int64|"
        r"one_hot is only applicable to index tensor",
        "indices have another dtype than int64: floats, or an integer of another width",
        "index.long() on that line",
        "下标的 dtype 不是 int64",
        "在该行使用 index.long()",
        "https://docs.pytorch.org/docs/stable/tensors.html",
    ),
    Cause(
        "bce-range",
        r"all elements of (?:input|target) should be between 0 and 1|Assertion `(?:input|target)_val >= zero",
        "binary cross entropy got values outside of [0, 1]: logits without a sigmoid, or NaN",
        "binary_cross_entropy_with_logits on the logits; torch.isfinite(x).all() to find NaN; targets in 0 to 1",
        "二元交叉熵的输入不在 [0, 1]：logits 未经 sigmoid，或为 NaN",
        "对 logits 使用 binary_cross_entropy_with_logits；用 torch.isfinite(x).all() 检查 NaN；目标在 0 到 1 之间",
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.BCELoss.html",
    ),
    Cause(
        "bce-autocast",
        r"BCELoss are unsafe to autocast",
        "binary_cross_entropy after a sigmoid is not safe in half precision, so autocast refuses it",
        "binary_cross_entropy_with_logits (BCEWithLogitsLoss) and no sigmoid before it",
        "sigmoid 之后的 binary_cross_entropy 在半精度下不安全，autocast 拒绝执行",
        "使用 binary_cross_entropy_with_logits（BCEWithLogitsLoss），去掉之前的 sigmoid",
        _NOTES + "amp_examples.html",
    ),
    Cause(
        "scheduler-resume",
        r"param 'initial_lr' is not specified in param_groups",
        "a learning rate schedule starts at last_epoch > -1 with an optimizer that was not loaded from the checkpoint",
        "optimizer.load_state_dict(...) before the scheduler is made, or last_epoch=-1 and "
        "scheduler.load_state_dict(...)",
        "学习率调度以 last_epoch > -1 开始，而优化器没有从检查点加载",
        "先 optimizer.load_state_dict(...) 再建调度器，或 last_epoch=-1 并 scheduler.load_state_dict(...)",
        "https://docs.pytorch.org/docs/stable/optim.html",
    ),
    Cause(
        "loader-options",
        r"sampler option is mutually exclusive|batch_sampler option is mutually exclusive|"
        r"prefetch_factor option could only be specified|persistent_workers option needs num_workers|"
        r"unspecified batch_size|IterableDataset: expected unspecified (?:shuffle|sampler)",
        "two options of the DataLoader exclude each other",
        "shuffle=False with a sampler or an IterableDataset; no prefetch_factor and no persistent_workers with "
        "num_workers=0; batch_sampler alone",
        "DataLoader 的两个选项互相排斥",
        "使用 sampler 或 IterableDataset 时 shuffle=False；num_workers=0 时不设 prefetch_factor、persistent_workers；"
        "batch_sampler 单独使用",
        "https://docs.pytorch.org/docs/stable/data.html",
    ),
    Cause(
        "pin-cuda",
        r"cannot pin 'torch\.cuda|cannot pin '\w[\w.]{0,60}' only dense CPU",
        "the data loader pins memory, and the data set returns tensors that are on the GPU already",
        "return CPU tensors from the data set and move the batch in the loop; or pin_memory=False",
        "数据加载器锁页内存，而数据集返回的张量已在 GPU 上",
        "数据集返回 CPU 张量，在循环中移动；或 pin_memory=False",
        "https://docs.pytorch.org/docs/stable/data.html#memory-pinning",
    ),
    Cause(
        "worker-crashed",
        r"DataLoader worker \(pid \d+\) is killed by signal: (?P<signal>Segmentation fault|Aborted|Floating point "
        r"exception|Illegal instruction|Terminated)",
        "a worker of the DataLoader crashed ({signal}) in a compiled library of the data set: a damaged file, OpenCV's "
        "threads, a handle (HDF5, LMDB, tokenizers) that was opened before the fork",
        "num_workers=0 with python -X faulthandler names the call; cv2.setNumThreads(0); open handles inside the "
        "worker; multiprocessing_context='spawn'",
        "DataLoader 的 worker 在数据集用到的编译库中崩溃（{signal}）：文件损坏、OpenCV 线程，或 fork 前打开的句柄",
        "用 num_workers=0 和 python -X faulthandler 找到调用；cv2.setNumThreads(0)；在 worker 内打开句柄；使用 spawn",
        "https://github.com/pytorch/pytorch/issues/1838",
        confidence="likely",
    ),
    Cause(
        "group-twice",
        r"trying to initialize the default process group twice|"
        r"(?:parallel|process) group is already initialized|groups? (?:are|is|has been) already initialized",
        "process groups are made a second time in one process: initialize is called for each of two models, or both by "
        "the launcher's library and by the program",
        "call it once: if not torch.distributed.is_initialized(); destroy_process_group (or "
        "parallel_state.destroy_model_parallel) before the second; one deepspeed.initialize with ZeRO++ or "
        "hpZ groups",
        "同一进程中第二次建立进程组：对两个模型各调用一次 initialize，或库与程序都调用",
        "只调用一次：if not torch.distributed.is_initialized()；第二次之前先 destroy_process_group；ZeRO++ 只用一次 "
        "deepspeed.initialize",
        "https://docs.pytorch.org/docs/stable/distributed.html",
        confidence="likely",
    ),
    Cause(
        "rank-outside",
        r"Invalid rank (?P<rank>\d+), rank should be in the interval|"
        r"rank (?P<other>\d+) (?:is )?(?:>=|out of range|must be less than) world",
        "rank {rank}{other} does not exist in a world of that size: WORLD_SIZE and the number of started processes "
        "differ, or a local rank was given where a global one is wanted",
        "torchrun sets both; num_replicas and rank of a DistributedSampler from torch.distributed",
        "该大小的 world 中没有 rank {rank}{other}：WORLD_SIZE 与启动的进程数不同，或误用了 local rank",
        "用 torchrun 启动；DistributedSampler 的 num_replicas 与 rank 取自 torch.distributed",
        "https://docs.pytorch.org/docs/stable/elastic/run.html",
    ),
    Cause(
        "collective-contiguous",
        r"Tensors must be contiguous|Tensor must be contiguous|tensors? to be contiguous for|"
        r"input tensor must be the same size as output|output tensor size must be equal to world_size times input",
        "a collective got a tensor that is not contiguous, or an output that is not as large as all inputs together",
        "tensor.contiguous() before it; output of world_size * input elements for all_gather_into_tensor; gathered "
        "losses of equal size (drop_last, padding)",
        "集合通信得到非连续张量，或输出大小不等于全部输入之和",
        "先 tensor.contiguous()；all_gather_into_tensor 的输出为 world_size * 输入；各 rank 大小相同（drop_last、"
        "补齐）",
        "https://docs.pytorch.org/docs/stable/distributed.html",
    ),
    Cause(
        "ddp-models-differ",
        r"DDP expects same model across all ranks|params? \w{0,20} ?in process \d+ with sizes|"
        r"appears not to match (?:sizes|strides) of the same param in process",
        "the ranks wrap different models: a part is built, frozen or loaded on one rank only",
        "the same construction, freezing and adapters on every rank, before DDP; no `if rank == 0` around them",
        "各 rank 包装的模型不同：某部分只在一个 rank 上构建、冻结或加载",
        "在 DDP 之前，每个 rank 以相同方式构建、冻结、加适配器；不要放在 if rank == 0 中",
        _NOTES + "ddp.html",
    ),
    Cause(
        "ddp-nothing-trains",
        r"DistributedDataParallel is not needed when a module doesn't have any parameters that require a gradient",
        "no parameter of the wrapped module requires a gradient: all are frozen, or the adapters were not added",
        "wrap trained modules only (accelerator.prepare for the others not needed); requires_grad after loading; "
        "model.train() does not unfreeze",
        "被包装的模块没有需要梯度的参数：全部冻结，或没有加适配器",
        "只包装要训练的模块；加载后检查 requires_grad",
        _NOTES + "ddp.html",
    ),
    Cause(
        "ddp-device-ids",
        r"device_ids and output_device arguments only work with single-device|"
        r"DistributedDataParallel's input module must be on the same type of devices",
        "DDP got a model that lies on several devices or on another one than device_ids (device_map, a part on the "
        "CPU)",
        "one device for the whole model: device_map={'': local_rank}; no device_ids for a model on several GPUs",
        "DDP 得到的模型位于多个设备，或不在 device_ids 上（device_map、部分在 CPU）",
        "整个模型放在一个设备：device_map={'': local_rank}；跨 GPU 的模型不要设 device_ids",
        _NOTES + "ddp.html",
    ),
    Cause(
        "checkpoint-sharding-differs",
        r"Size mismatch between saved torch\.Size\(\[(?P<saved>[\d, ]{1,60})\]\) and current: "
        r"torch\.Size\(\[(?P<now>[\d, ]{1,60})\]\)",
        "the checkpoint holds [{saved}] and the model now has [{now}]: saved whole or in parts, and loaded the "
        "other way (FSDP with flattened parameters, another kind of state dict), or another configuration",
        "the same state dict type for both: torch.distributed.checkpoint.state_dict.get_model_state_dict and "
        "set_model_state_dict around dcp.save and dcp.load; use_orig_params alike",
        "检查点中为 [{saved}]，模型现为 [{now}]：保存与加载的形式不同（FSDP 展平参数、另一种 state dict），或配置不同",
        "两边使用相同的 state dict：在 dcp.save、dcp.load 处用 get_model_state_dict 与 set_model_state_dict；"
        "use_orig_params 一致",
        "https://docs.pytorch.org/docs/stable/distributed.checkpoint.html",
        confidence="likely",
    ),
    Cause(
        "internal-assert",
        r"INTERNAL ASSERT FAILED at \W?(?P<file>[^\s\"',]{1,300})",
        "a check inside the library's own C++ code failed ({file}): a defect of this release, or a case it does not "
        "foresee",
        "another release of the library that the path names (newer first); contiguous inputs of usual dtypes; the "
        "same call on the CPU may give a clearer error",
        "库自身 C++ 代码中的检查失败（{file}）：该版本的缺陷，或未考虑的情况",
        "换用路径所示库的其他版本（先试更新的）；使用连续、常用 dtype 的输入；在 CPU 上执行可能给出更清楚的错误",
        "https://github.com/facebookresearch/xformers/issues/535",
        confidence="likely",
        fallback=True,
    ),
)  # fmt: skip
