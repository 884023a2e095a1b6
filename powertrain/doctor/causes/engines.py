"""Errors that TransformerEngine, DeepSpeed, vLLM and other engines raise in their argument checks."""

from powertrain.doctor.causes.cause import Cause

_TE = "https://github.com/NVIDIA/TransformerEngine"
_DEEPSPEED = "https://www.deepspeed.ai/docs/config-json/"

CAUSES = (
    Cause(
        "te-outside-autocast",
        r"Data types for parameters must match when outside of autocasted region",
        "a TransformerEngine layer got an input of another dtype than its parameters, outside of torch.autocast: an "
        "embedding, a norm or an input is float32 beside bfloat16 parameters",
        "with torch.autocast(\"cuda\", torch.bfloat16) around the call; or one dtype for all: params_dtype=, "
        "model.to(torch.bfloat16), x.to(layer.weight.dtype)",
        "TransformerEngine 层的输入与参数 dtype 不同，且不在 torch.autocast 内：嵌入、归一化或输入为 float32，"
        "而参数为 bfloat16",
        "在调用外加 with torch.autocast(\"cuda\", torch.bfloat16)；或统一 dtype：params_dtype=、"
        "model.to(torch.bfloat16)、"
        "x.to(layer.weight.dtype)",
        _TE + "/issues/403",
        confidence="likely",
    ),
    Cause(
        "te-parts-differ",
        r"(?:TransformerEngine|transformer.engine) package version mismatch|Could not find shared object "
        r"file.{0,40}ransformer|"
        r"Multiple files found: .{0,60}transformer_engine|undefined symbol: _ZN?K?\d*18?7?transformer_engine|"
        r"undefined symbol: _ZN\w{0,8}transformer_engine|undefined symbol: nvte_\w+|"
        r"Found empty `?transformer.engine`? meta package|PyPI package for `?transformer.engine|"
        r"Could not find (?:TE core package )?`transformer.engine",
        "the parts of TransformerEngine (transformer-engine, its core for the CUDA version, its PyTorch extension) are "
        "missing or of different releases",
        "pip uninstall -y transformer-engine transformer-engine-cu12 transformer-engine-cu13 transformer-engine-torch; "
        "then pip install --no-build-isolation 'transformer-engine[pytorch]' (one release for all)",
        "TransformerEngine 的各部分（元包、CUDA 核心、PyTorch 扩展）缺失或版本不同",
        "卸载 transformer-engine、transformer-engine-cu12、transformer-engine-cu13、transformer-engine-torch，再 pip "
        "install --no-build-isolation 'transformer-engine[pytorch]'",
        _TE + "/issues/1270",
        confidence="likely",
    ),
    Cause(
        "te-check",
        r"transformer_engine/\S{1,200}:\d+ in function \S{1,100}: Assertion failed: (?P<check>.{1,200})",
        "TransformerEngine's own check failed: {check}",
        "shapes, dtypes and contiguity of what the layer gets; rows in multiples of 8 and columns in 16 for FP8 (32 "
        "for MXFP8); one release of TransformerEngine and Megatron made for each other",
        "TransformerEngine 自身的检查失败：{check}",
        "检查该层输入的形状、dtype 与连续性；FP8 行为 8 的倍数、列为 16 的倍数（MXFP8 为 32）；TransformerEngine 与 "
        "Megatron 版本配套",
        _TE,
        confidence="likely",
        fallback=True,
    ),
    Cause(
        "cublas-lacks",
        r"cuBLAS Error: (?:the requested functionality is not supported|an absent device architectural feature is "
        r"required)|"
        r"CUBLAS_STATUS_(?:NOT_SUPPORTED|ARCH_MISMATCH)|cuBLAS API failed with status 15|cublasLt ran into an error",
        "cuBLAS has no kernel for this product on this GPU: dims that are no multiple of 16 (FP8, INT8), a GPU without "
        "that dtype, or an older cuBLAS",
        "dims in multiples of 16 and 16-byte aligned tensors; FP8 from compute capability 8.9 on, INT8 with cublasLt "
        "from 7.5 on; a newer CUDA build of torch; one GPU in CUDA_VISIBLE_DEVICES for 8-bit layers of bitsandbytes",
        "cuBLAS 在该 GPU 上没有该乘法的核函数：维度不是 16 的倍数（FP8、INT8）、GPU 不支持该类型，或 cuBLAS 较旧",
        "维度为 16 的倍数且按 16 字节对齐；FP8 需计算能力 8.9 以上，INT8（cublasLt）需 7.5 以上；升级 torch 的 CUDA "
        "版本",
        "https://docs.nvidia.com/cuda/cublas/",
        confidence="likely",
    ),
    Cause(
        "zero-trace",
        r"tracing error at step \d+: |no sync context manager is incompatible|'status': 'INFLIGHT'|"
        r"Model was not initialized with `?Zero-Infinity",
        "ZeRO-3 saw the modules run in another order than the first time (branches, MoE, checkpointing, one model used "
        "twice), or accumulation without synchronization, which partitioned gradients cannot have",
        "a call of every module on every step (deepspeed.utils.set_z3_leaf_modules for MoE); no no_sync() with ZeRO-2 "
        "and 3; stage3_prefetch_bucket_size: 0; ZeRO-2 where the model fits",
        "ZeRO-3 发现模块执行顺序与首次不同（分支、MoE、重计算、模型复用），或使用了 no_sync",
        "每步都调用所有模块（MoE 用 deepspeed.utils.set_z3_leaf_modules）；ZeRO-2、3 不用 no_sync()；"
        "stage3_prefetch_bucket_size: 0；能放下时用 ZeRO-2",
        _DEEPSPEED,
        confidence="likely",
    ),
    Cause(
        "backward-past-engine",
        r"object has no attribute '(?:ipg_index|ipg_buffer|_backward_pre|loss_scale_applied)'",
        "loss.backward() was called on a DeepSpeed model: its engine prepares the buffers of gradients in its own "
        "backward",
        "engine.backward(loss) and engine.step() (accelerator.backward(loss)) instead of loss.backward() and "
        "optimizer.step()",
        "对 DeepSpeed 模型调用了 loss.backward()：引擎在自己的 backward 中准备梯度缓冲",
        "使用 engine.backward(loss) 与 engine.step()（accelerator.backward(loss)）",
        "https://github.com/deepspeedai/DeepSpeed/issues/6995",
        confidence="likely",
    ),
    Cause(
        "pydantic-config",
        r"\d+ validation errors? for (?P<config>\w+)",
        "a setting is not one that {config} knows, or has another type; the lines below the message name the field",
        "the field named below, in the documentation of the installed release; \"auto\" only where the trainer fills "
        "it; a release of the library that knows the field",
        "某项设置不是 {config} 认识的，或类型不对；消息下方的行给出字段名",
        "按所装版本的文档检查下方所示字段；\"auto\" 仅用于训练器填写的项；或升级该库",
        "https://docs.pydantic.dev/latest/errors/validation_errors/",
        confidence="likely",
    ),
    Cause(
        "scaler-order",
        r"Attempted unscale_ but _scale is None|unscale_\(\) has already been called on this optimizer|"
        r"unscale_\(\) is being called after step\(\)|step\(\) has already been called since the last update",
        "GradScaler's methods are called in another order than scale(loss).backward(), unscale_, step, update, each "
        "once for an optimizer and step",
        "one unscale_ (accelerator.clip_grad_norm_) for each optimizer step, under sync_gradients with accumulation; "
        "scaler.scale(loss) before; bf16 needs no scaler",
        "GradScaler 的方法顺序不对：应为 scale(loss).backward()、unscale_、step、update，各一次",
        "每个优化器步只 unscale_（accelerator.clip_grad_norm_）一次，累积时放在 sync_gradients 下；bf16 不需要 scaler",
        "https://docs.pytorch.org/docs/stable/notes/amp_examples.html",
    ),
    Cause(
        "result-dtype",
        r"result type (?P<from>\w+) can't be cast to the desired output type (?P<to>\w+)|"
        r"value cannot be converted to type (?P<type>[\w:]+) without overflow|"
        r"expected m1 and m2 to have the same dtype|Expected attn_mask dtype to be bool or|"
        r"Expected object of scalar type (?P<want>\w+) but got scalar type",
        "dtypes do not go together: an in-place result, a mask value (-1e9 in float16), a mask or an integer tensor "
        "has one that the operation does not take",
        "torch.finfo(x.dtype).min as mask value; mask.bool() or mask.to(query.dtype); x = x + y instead of x += y; "
        ".float() on integers that are trained",
        "dtype 不相容：原地结果、mask 值（float16 中的 -1e9）、mask 或整数张量",
        "mask 值用 torch.finfo(x.dtype).min；mask.bool() 或 mask.to(query.dtype)；用 x = x + y 代替 x += y；整数先 "
        ".float()",
        "https://docs.pytorch.org/docs/stable/tensor_attributes.html",
        confidence="likely",
    ),
    Cause(
        "integer-gradients",
        r"[Oo]nly Tensors of floating point and complex dtype can require gradients",
        "weights that are integers are to be trained: they are quantized (4 or 8 bit), or ids",
        "train adapters on top (prepare_model_for_kbit_training, get_peft_model) and leave quantized weights frozen: "
        "requires_grad_ only where p.is_floating_point(); .float() for numbers",
        "要训练的是整数张量：量化的权重（4、8 bit）或 id",
        "训练其上的适配器（prepare_model_for_kbit_training、get_peft_model），量化权重保持冻结：仅对 "
        "p.is_floating_point() 设 requires_grad_；数值用 .float()",
        "https://github.com/haotian-liu/LLaVA/issues/783",
    ),
    Cause(
        "not-strided",
        r"memory format option is only supported by strided tensors|"
        r"Cannot access data pointer of Tensor that doesn't have storage|Cannot access storage of \w+",
        "a compiled kernel got a tensor without plain memory: sparse, on the meta device, a fake tensor of "
        "torch.compile or a library's lazy tensor",
        "switch that fused kernel off where models are built lazily or compiled (enable_layernorm_kernel=False, "
        "torch.compiler.disable); materialize before (to_empty, to_dense)",
        "编译的核函数得到没有普通内存的张量：稀疏、meta 设备、torch.compile 的 fake tensor，或库的惰性张量",
        "在惰性构建或编译时关闭该融合核函数（enable_layernorm_kernel=False、torch.compiler.disable）；"
        "先实体化（to_empty、to_dense）",
        "https://github.com/NUS-HPC-AI-Lab/VideoSys/issues/113",
        confidence="likely",
    ),
    Cause(
        "vllm-weight-shape",
        r"Tried to load weights of size (?P<saved>torch\.Size\(\[[\d, ]{1,60}\]\)) ?to a parameter of size "
        r"(?P<have>.{1,80})|"
        r"assert param(?:_data)?\.(?:shape|size\(\)) == loaded_weight\.",
        "the checkpoint's weight and the server's parameter have different shapes {saved} {have}: a quantized "
        "(packed) weight for a layer that this release does not quantize, another tensor-parallel split, or "
        "config.json of another model",
        "--quantization and --load-format as the checkpoint was made (bitsandbytes, awq, gptq); a newer server "
        "release for this model; merged 16-bit weights instead; config.json and weights of one checkpoint",
        "检查点权重与服务器参数形状不同 {saved} {have}：量化（打包）权重用于该版本不量化的层、张量并行切分不同，"
        "或配置属于其他模型",
        "按检查点的制作方式设置 --quantization 与 --load-format；升级服务器；或使用合并的 16 位权重；config.json "
        "与权重一致",
        "https://github.com/vllm-project/vllm/issues/12899",
        confidence="likely",
    ),
    Cause(
        "devices-differ",
        r"expected device \S{1,20} but got device|Expected a cuda device, but got|but expected them to be on GPU|"
        r"must be on the same device|to have the same device as tensor for argument|but device \d does not equal \d|"
        r"is on CPU, Tensor for argument",
        "one tensor of the operation is on another device than the others",
        ".to(x.device) for what is made in forward (masks, positions, buffers as register_buffer); the batch and the "
        "model on one device",
        "运算中的一个张量与其他张量不在同一设备",
        "forward 中创建的张量 .to(x.device)（mask、位置；缓冲用 register_buffer）；batch 与模型放在同一设备",
        "https://docs.pytorch.org/docs/stable/notes/cuda.html",
    ),
    Cause(
        "offloaded-move",
        r"can't move a model that has some modules offloaded|`?\.to`? is not supported for `?4-bit|"
        r"Calling `?(?:to|cuda|half|float)\(\)`? is not supported for",
        "the model was placed or quantized when it was loaded (device_map, bitsandbytes) and cannot be moved or cast "
        "afterwards",
        "take .to(), .cuda() and .half() out; device_map={'': 0} places it at loading",
        "模型在加载时已放置或量化（device_map、bitsandbytes），之后不能移动或转换",
        "去掉 .to()、.cuda()、.half()；加载时用 device_map={'': 0} 指定位置",
        "https://huggingface.co/docs/transformers/quantization/bitsandbytes",
    ),
    Cause(
        "signal-exit",
        r"exits with return code = -(?P<launcher>6|4|8)\b|exitcode: -(?P<exit>6|4|8)\b",
        "a rank was ended by signal {launcher}{exit} (6: abort, 4: illegal instruction, 8: arithmetic), which a C++ "
        "library raises after an error that stands above: an uncaught exception, a failed assertion, NCCL's watchdog",
        "the first `what():`, `terminate called` or assertion above, of any rank (torchrun --log-dir, NCCL_DEBUG=WARN)",
        "某个 rank 被信号 {launcher}{exit} 结束（6：abort，4：非法指令，8：算术），C++ 库在上方的错误之后发出",
        "查看上方任一 rank 的第一个 what()、terminate called 或断言（torchrun --log-dir、NCCL_DEBUG=WARN）",
        "https://docs.pytorch.org/docs/stable/elastic/errors.html",
        confidence="possible",
    ),
    Cause(
        "vllm-token-budget",
        r"max_num_batched_tokens \(\d+\) is smaller than max_model_len|exceed context window of|"
        r"Error in memory profiling|Initial free memory .{1,40}current free memory",
        "vLLM's budget does not fit: fewer tokens a batch than one sequence may have, or other processes took or gave "
        "back GPU memory while it measured",
        "--max-num-batched-tokens at least --max-model-len (or --enable-chunked-prefill); no other program on the GPU "
        "at start-up; start several servers one after another",
        "vLLM 的预算不合适：每批 token 少于单个序列上限，或测量时其他进程改变了显存",
        "--max-num-batched-tokens 不小于 --max-model-len（或 --enable-chunked-prefill）；启动时 GPU 上没有其他程序",
        "https://docs.vllm.ai/en/latest/configuration/engine_args.html",
    ),
)  # fmt: skip
